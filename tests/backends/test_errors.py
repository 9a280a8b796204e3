"""What the stores' failures become: real answers of the test servers, through boto3 and oss2, into our classes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.base import Backend
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendError,
    BackendTimeoutError,
    BucketNotFoundError,
    ConfigError,
    DiskFullError,
    ObjectNotFoundError,
    PermanentBackendError,
    ThrottledError,
    TransientBackendError,
)
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.server_store import PART_BYTES, ServerStore

VERBS: dict[str, Callable[[Backend, str, Path], object]] = {
    "pipe_file": lambda backend, path, tmp: backend.pipe_file(path, b"1"),
    "cat_file": lambda backend, path, tmp: backend.cat_file(path),
    "get_file": lambda backend, path, tmp: backend.get_file(path, str(tmp / "got")),
    "info": lambda backend, path, tmp: backend.info(path),
    "exists": lambda backend, path, tmp: backend.exists(path),
    "find": lambda backend, path, tmp: backend.find(path),
    "ls": lambda backend, path, tmp: backend.ls(path),
    "rm_file": lambda backend, path, tmp: backend.rm_file(path),
    "rm_files": lambda backend, path, tmp: backend.rm_files([path]),
    "cp_file": lambda backend, path, tmp: backend.cp_file(path, path + "2"),
    "stored_crc": lambda backend, path, tmp: backend.stored_crc(path),
}


# -- answers ------------------------------------------------------------------------------------------------------

COMMON = [
    (403, "AccessDenied", AccessDeniedError),
    (403, "InvalidAccessKeyId", AccessDeniedError),
    (403, "SignatureDoesNotMatch", AccessDeniedError),
    (403, "SomethingNew", AccessDeniedError),
    (404, "NoSuchBucket", BucketNotFoundError),
    (400, "SomethingNew", PermanentBackendError),
    (500, "InternalError", TransientBackendError),
    (500, "SomethingNew", TransientBackendError),
    (502, "BadGateway", TransientBackendError),
    (503, "ServiceUnavailable", ThrottledError),
    (429, "TooMany", ThrottledError),
    (501, "NotImplemented", PermanentBackendError),
]
S3_ONLY = [
    (403, "RequestTimeTooSkewed", PermanentBackendError),
    (400, "ExpiredToken", AccessDeniedError),
    (400, "RequestTimeout", BackendTimeoutError),
    (503, "SlowDown", ThrottledError),
    (409, "ConditionalRequestConflict", TransientBackendError),
    (409, "OperationAborted", TransientBackendError),
    (507, "XMinioStorageFull", DiskFullError),
    (403, "InvalidObjectState", PermanentBackendError),
]
OSS_ONLY = [
    # This machine's clock is right: it was the request that took too long.
    (403, "RequestTimeTooSkewed", TransientBackendError),
    (403, "InvalidObjectState", PermanentBackendError),
    (403, "InvalidSecurityToken", AccessDeniedError),
    (403, "SecurityTokenExpired", AccessDeniedError),
    (403, "UserDisable", AccessDeniedError),
    (409, "FileImmutable", AccessDeniedError),
    (503, "QpsLimitExceeded", ThrottledError),
    (503, "UploadTrafficRateLimitExceeded", ThrottledError),
]


def _check_answer(store: ServerStore, tmp_path: Path, status: int, code: str, kind: type[BackendError]) -> None:
    store.server.raw_put(store.bucket, "k", b"1")
    backend = store.plain()
    for name, verb in VERBS.items():
        with (
            store.server.faults.injected(Fault(status=status, code=code, times=None)) as fault,
            pytest.raises(BackendError) as caught,
        ):
            verb(backend, store.at("k"), tmp_path)
        assert type(caught.value) is kind, f"{name}: {caught.value!r}"
        assert caught.value.backend
        assert caught.value.operation
        assert store.bucket in caught.value.key
        assert "\n" not in str(caught.value)
        # Row 31 of the fault matrix: no hot loop.
        # (A HEAD refused without a word is asked for once more, by a listing, and botocore looks for the bucket's region.)
        assert fault.hits <= 4, name


@pytest.mark.parametrize(("status", "code", "kind"), COMMON)
def test_answers(store: ServerStore, tmp_path: Path, status: int, code: str, kind: type[BackendError]) -> None:
    """Whatever the verb, an answer of the store has one meaning; only its own "no such key" is "not found" (I7)."""
    _check_answer(store, tmp_path, status, code, kind)


@pytest.mark.parametrize(("status", "code", "kind"), S3_ONLY)
def test_answers_of_s3(s3: ServerStore, tmp_path: Path, status: int, code: str, kind: type[BackendError]) -> None:
    """The codes that only S3 and its likes have."""
    _check_answer(s3, tmp_path, status, code, kind)


@pytest.mark.parametrize(("status", "code", "kind"), OSS_ONLY)
def test_answers_of_oss(oss: ServerStore, tmp_path: Path, status: int, code: str, kind: type[BackendError]) -> None:
    """The codes that only OSS has."""
    _check_answer(oss, tmp_path, status, code, kind)


def test_retry_after(store: ServerStore) -> None:
    """A throttled request carries the time that the store asked for."""
    store.server.faults.add(Fault(status=503, code="SlowDown", retry_after_s=7))
    with pytest.raises(ThrottledError) as caught:
        store.plain().pipe_file(store.at("k"), b"1")
    assert caught.value.retry_after_s == 7.0


def test_hints_say_what_to_do(store: ServerStore) -> None:
    """The errors that people meet most say what to do about them."""
    for code, status, hint in (
        ("InvalidAccessKeyId", 403, "ACCESS_KEY_ID"),
        ("RequestTimeTooSkewed", 403, "clock"),
        ("NoSuchBucket", 404, "create the bucket"),
    ):
        with (
            store.server.faults.injected(Fault(status=status, code=code, times=None)),
            pytest.raises(BackendError, match=hint),
        ):
            store.plain().pipe_file(store.at("k"), b"1")


# -- permissions --------------------------------------------------------------------------------------------------


def test_without_list_permission_absent_is_denied(store: ServerStore, tmp_path: Path) -> None:
    """I7: who may not list is told 403 for a key that is not there; that is never "not found"."""
    store.server.raw_put(store.bucket, "there", b"1")
    backend = store.as_identity("no-list")
    assert backend.cat_file(store.at("there")) == b"1"
    assert backend.info(store.at("there"))["size"] == 1
    # OSS says whether there is such a key; S3 does not.
    with pytest.raises(AccessDeniedError if store.server.kind == "moto" else ObjectNotFoundError):
        backend.cat_file(store.at("absent"))
    for verb in ("get_file", "stored_crc", "info", "exists", "find", "ls"):
        with pytest.raises(AccessDeniedError):
            VERBS[verb](backend, store.at("absent"), tmp_path)


def test_without_write_permission(store: ServerStore, tmp_path: Path) -> None:
    """A reader's writes are refused as such, and change nothing."""
    store.server.raw_put(store.bucket, "k", b"1")
    backend = store.as_identity("read-only")
    for verb in ("pipe_file", "rm_file", "rm_files", "cp_file"):
        with pytest.raises(AccessDeniedError):
            VERBS[verb](backend, store.at("k"), tmp_path)
    big = tmp_path / "big"
    big.write_bytes(b"x" * (2 * PART_BYTES))
    with pytest.raises(AccessDeniedError):
        backend.put_file(str(big), store.at("big"))
    assert store.server.raw_keys(store.bucket) == ["k"]
    assert backend.cat_file(store.at("k")) == b"1"


@pytest.mark.parametrize("which", ["weed", "oss"])
def test_wrong_credentials(
    request: pytest.FixtureRequest, bucket_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, which: str
) -> None:
    """A wrong key and a wrong secret are refusals for every verb, on the servers that check signatures."""
    server = request.getfixturevalue(f"{which}_server")
    server.create_bucket(bucket_name)
    for variable, value in server.env.items():
        monkeypatch.setenv(variable, value)
    if which == "weed":
        from ckptmgr.backends.s3 import S3Backend as Kind

        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    else:
        from ckptmgr.backends.oss import OSSBackend as Kind

        names = ("OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET")
    server.raw_put(bucket_name, "k", b"1")
    for name in names:
        with monkeypatch.context() as patch:
            patch.setenv(name, "wrong")
            backend = Kind()
            for verb, call in VERBS.items():
                with pytest.raises(AccessDeniedError) as caught:
                    call(backend, f"{bucket_name}/k", tmp_path)
                # Also for HEAD, whose answer has no body: which of the two is wrong is what people need to know.
                assert names[0] in caught.value.hint, verb


def test_no_credentials_at_all(store: ServerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing credentials are named before anything is sent."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(AccessDeniedError, match="ACCESS_KEY"):
        store.plain().find(store.bucket)
    assert store.server.log == []


# -- credentials that expire ----------------------------------------------------------------------------------------


def test_renewed_credentials_are_picked_up(store: ServerStore) -> None:
    """Session credentials that expired in a long-lived process are looked up anew, and the same call succeeds."""
    token = "AWS_SESSION_TOKEN" if store.server.kind == "moto" else "OSS_SESSION_TOKEN"
    store.setenv(token, "first")
    store.server.app.live_tokens = {"first"}
    backend = store.plain()
    backend.pipe_file(store.at("k"), b"1")
    store.server.app.live_tokens = {"second"}
    with pytest.raises(AccessDeniedError, match="SESSION_TOKEN"):
        backend.pipe_file(store.at("k"), b"2")
    store.setenv(token, "second")
    backend.pipe_file(store.at("k"), b"3")
    assert store.server.raw_get(store.bucket, "k") == b"3"
    # Expiry at a HEAD, which cannot say so.
    store.server.app.live_tokens = {"third"}
    store.setenv(token, "third")
    assert backend.info(store.at("k"))["size"] == 1


# -- the network ----------------------------------------------------------------------------------------------------


def test_nobody_there(store: ServerStore, tmp_path: Path) -> None:
    """A refused connection is transient, and the message names the endpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    store.setenv("AWS_ENDPOINT_URL", endpoint)
    store.setenv("OSS_ENDPOINT", endpoint)
    backend = store.plain()
    for verb in VERBS.values():
        with pytest.raises(TransientBackendError, match=endpoint):
            verb(backend, store.at("k"), tmp_path)


def test_a_name_that_does_not_resolve(store: ServerStore) -> None:
    """A host that DNS does not know is transient: name servers fail too."""
    store.setenv("AWS_ENDPOINT_URL", "http://no-such-host.invalid:1")
    store.setenv("OSS_ENDPOINT", "http://no-such-host.invalid:1")
    with pytest.raises(TransientBackendError, match=r"no-such-host\.invalid"):
        store.plain().find(store.bucket)


def test_an_endpoint_that_is_none(store: ServerStore) -> None:
    """A malformed endpoint is a configuration error, not something to try again."""
    store.setenv("AWS_ENDPOINT_URL", "nonsense")
    store.setenv("OSS_ENDPOINT", "http://non sense")
    with pytest.raises(ConfigError, match="ENDPOINT"):
        store.plain().find(store.bucket)


@pytest.mark.parametrize("drop", ["before", "after"])
def test_a_connection_that_breaks(store: ServerStore, tmp_path: Path, drop: Any) -> None:
    """A reset is transient for every verb, whether the request was applied or not."""
    store.server.raw_put(store.bucket, "k", b"1")
    backend = store.plain()
    for name, verb in VERBS.items():
        with (
            store.server.faults.injected(Fault(drop=drop, times=None)),
            pytest.raises(BackendTimeoutError) as caught,
        ):
            verb(backend, store.at("k"), tmp_path)
        assert store.server.url in str(caught.value), name


def test_a_store_that_never_answers(s3: ServerStore) -> None:
    """A stalled answer ends after the read timeout."""
    from ckptmgr.backends.s3 import S3Backend

    with s3.server.faults.injected(Fault(hold="before")) as fault, pytest.raises(BackendTimeoutError, match="in time"):
        S3Backend(client_config={"read_timeout": 0.3}).cat_file(s3.at("k"))
    assert fault.hits == 1
