"""What the stores' failures become: real answers of the test servers, through boto3 and oss2, into our classes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.base import Backend
from ckptmgr.backends.retry import Retrier, RetryingBackend, RetryPolicy
from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendError,
    BackendTimeoutError,
    BucketNotFoundError,
    ChecksumMismatchError,
    ConfigError,
    DiskFullError,
    ObjectExistsError,
    ObjectNotFoundError,
    PermanentBackendError,
    ThrottledError,
    TransientBackendError,
)
from ckptmgr.testing.faults import Fault

PART = 5 << 20
DATA = os.urandom(2 * PART + 7)
QUICK = RetryPolicy(attempts=4, base_s=0.001, cap_s=0.002, deadline_s=60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """A server, a bucket on it, and backends for it."""

    server: Any
    bucket: str
    plain: Callable[[], Backend]
    retrying: Callable[[], Backend]
    patch: pytest.MonkeyPatch

    def at(self, key: str) -> str:
        return f"{self.bucket}/{key}"

    def as_identity(self, name: str) -> Backend:
        for variable, value in self.server.env_of(name).items():
            self.patch.setenv(variable, value)
        return self.plain()


def _store(
    kind: str,
    server: Any,
    bucket: str,
    patch: pytest.MonkeyPatch,
    make: Callable[..., Backend],
    options: dict[str, Any],
) -> Store:
    server.create_bucket(bucket)
    for variable, value in server.env.items():
        patch.setenv(variable, value)

    def plain() -> Backend:
        return make(retrier=Retrier(RetryPolicy(attempts=1)), **options)

    def retrying() -> Backend:
        retrier = Retrier(QUICK)
        return RetryingBackend(make(retrier=retrier, **options), retrier)

    return Store(server=server, bucket=bucket, plain=plain, retrying=retrying, patch=patch)


@pytest.fixture(params=["s3", "oss"])
def store(request: pytest.FixtureRequest, bucket_name: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Both dialects, with faults."""
    return _open(request, request.param, bucket_name, monkeypatch)


@pytest.fixture
def s3(request: pytest.FixtureRequest, bucket_name: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    return _open(request, "s3", bucket_name, monkeypatch)


@pytest.fixture
def oss(request: pytest.FixtureRequest, bucket_name: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    return _open(request, "oss", bucket_name, monkeypatch)


def _open(request: pytest.FixtureRequest, kind: str, bucket: str, patch: pytest.MonkeyPatch) -> Store:
    options = {"multipart_threshold": PART, "part_bytes": PART}
    if kind == "s3":
        from ckptmgr.backends.s3 import S3Backend

        return _store(kind, request.getfixturevalue("moto_server"), bucket, patch, S3Backend, options)
    from ckptmgr.backends.oss import OSSBackend

    return _store(kind, request.getfixturevalue("oss_server"), bucket, patch, OSSBackend, options)


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
    (403, "RequestTimeTooSkewed", PermanentBackendError),
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
    (400, "ExpiredToken", AccessDeniedError),
    (400, "RequestTimeout", BackendTimeoutError),
    (503, "SlowDown", ThrottledError),
    (409, "ConditionalRequestConflict", TransientBackendError),
    (409, "OperationAborted", TransientBackendError),
    (507, "XMinioStorageFull", DiskFullError),
    (403, "InvalidObjectState", PermanentBackendError),
]
OSS_ONLY = [
    (403, "SecurityTokenExpired", AccessDeniedError),
    (403, "UserDisable", AccessDeniedError),
    (409, "FileImmutable", AccessDeniedError),
    (503, "QpsLimitExceeded", ThrottledError),
    (503, "UploadTrafficRateLimitExceeded", ThrottledError),
]


def _check_answer(store: Store, tmp_path: Path, status: int, code: str, kind: type[BackendError]) -> None:
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
def test_answers(store: Store, tmp_path: Path, status: int, code: str, kind: type[BackendError]) -> None:
    """Whatever the verb, an answer of the store has one meaning; only its own "no such key" is "not found" (I7)."""
    _check_answer(store, tmp_path, status, code, kind)


@pytest.mark.parametrize(("status", "code", "kind"), S3_ONLY)
def test_answers_of_s3(s3: Store, tmp_path: Path, status: int, code: str, kind: type[BackendError]) -> None:
    """The codes that only S3 and its likes have."""
    _check_answer(s3, tmp_path, status, code, kind)


@pytest.mark.parametrize(("status", "code", "kind"), OSS_ONLY)
def test_answers_of_oss(oss: Store, tmp_path: Path, status: int, code: str, kind: type[BackendError]) -> None:
    """The codes that only OSS has."""
    _check_answer(oss, tmp_path, status, code, kind)


def test_retry_after(store: Store) -> None:
    """A throttled request carries the time that the store asked for."""
    store.server.faults.add(Fault(status=503, code="SlowDown", retry_after_s=7))
    with pytest.raises(ThrottledError) as caught:
        store.plain().pipe_file(store.at("k"), b"1")
    assert caught.value.retry_after_s == 7.0


def test_hints_say_what_to_do(store: Store) -> None:
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


def test_without_list_permission_absent_is_denied(store: Store, tmp_path: Path) -> None:
    """I7: who may not list is told 403 for a key that is not there; that is never "not found"."""
    store.server.raw_put(store.bucket, "there", b"1")
    backend = store.as_identity("no-list")
    assert backend.cat_file(store.at("there")) == b"1"
    assert backend.info(store.at("there"))["size"] == 1
    for verb in ("cat_file", "get_file", "stored_crc"):
        # OSS says whether there is such a key; S3 does not.
        with pytest.raises(AccessDeniedError if store.server.kind == "moto" else ObjectNotFoundError):
            VERBS[verb](backend, store.at("absent"), tmp_path)
    for verb in ("info", "exists", "find", "ls"):
        with pytest.raises(AccessDeniedError):
            VERBS[verb](backend, store.at("absent"), tmp_path)


def test_without_write_permission(store: Store, tmp_path: Path) -> None:
    """A reader's writes are refused as such, and change nothing."""
    store.server.raw_put(store.bucket, "k", b"1")
    backend = store.as_identity("read-only")
    for verb in ("pipe_file", "rm_file", "rm_files", "cp_file"):
        with pytest.raises(AccessDeniedError):
            VERBS[verb](backend, store.at("k"), tmp_path)
    big = tmp_path / "big"
    big.write_bytes(DATA)
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


def test_no_credentials_at_all(store: Store) -> None:
    """Missing credentials are named before anything is sent."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET"):
        store.patch.delenv(name, raising=False)
    with pytest.raises(AccessDeniedError, match="ACCESS_KEY"):
        store.plain().find(store.bucket)
    assert store.server.log == []


# -- credentials that expire ----------------------------------------------------------------------------------------


def test_renewed_credentials_are_picked_up(store: Store) -> None:
    """Session credentials that expired in a long-lived process are looked up anew, and the same call succeeds."""
    token = "AWS_SESSION_TOKEN" if store.server.kind == "moto" else "OSS_SESSION_TOKEN"
    store.patch.setenv(token, "first")
    store.server.app.live_tokens = {"first"}
    backend = store.plain()
    backend.pipe_file(store.at("k"), b"1")
    store.server.app.live_tokens = {"second"}
    with pytest.raises(AccessDeniedError, match="SESSION_TOKEN"):
        backend.pipe_file(store.at("k"), b"2")
    store.patch.setenv(token, "second")
    backend.pipe_file(store.at("k"), b"3")
    assert store.server.raw_get(store.bucket, "k") == b"3"
    # Expiry at a HEAD, which cannot say so.
    store.server.app.live_tokens = {"third"}
    store.patch.setenv(token, "third")
    assert backend.info(store.at("k"))["size"] == 1


# -- the network ----------------------------------------------------------------------------------------------------


def test_nobody_there(store: Store, tmp_path: Path) -> None:
    """A refused connection is transient, and the message names the endpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    store.patch.setenv("AWS_ENDPOINT_URL", endpoint)
    store.patch.setenv("OSS_ENDPOINT", endpoint)
    backend = store.plain()
    for verb in VERBS.values():
        with pytest.raises(TransientBackendError, match=endpoint):
            verb(backend, store.at("k"), tmp_path)


def test_a_name_that_does_not_resolve(store: Store) -> None:
    """A host that DNS does not know is transient: name servers fail too."""
    store.patch.setenv("AWS_ENDPOINT_URL", "http://no-such-host.invalid:1")
    store.patch.setenv("OSS_ENDPOINT", "http://no-such-host.invalid:1")
    with pytest.raises(TransientBackendError, match=r"no-such-host\.invalid"):
        store.plain().find(store.bucket)


def test_an_endpoint_that_is_none(store: Store) -> None:
    """A malformed endpoint is a configuration error, not something to try again."""
    store.patch.setenv("AWS_ENDPOINT_URL", "nonsense")
    store.patch.setenv("OSS_ENDPOINT", "http://non sense")
    with pytest.raises(ConfigError, match="ENDPOINT"):
        store.plain().find(store.bucket)


@pytest.mark.parametrize("drop", ["before", "after"])
def test_a_connection_that_breaks(store: Store, tmp_path: Path, drop: Any) -> None:
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


def test_a_store_that_never_answers(s3: Store) -> None:
    """A stalled answer ends after the read timeout."""
    from ckptmgr.backends.s3 import S3Backend

    with s3.server.faults.injected(Fault(hold="before")) as fault, pytest.raises(BackendTimeoutError, match="in time"):
        S3Backend(client_config={"read_timeout": 0.3}).cat_file(s3.at("k"))
    assert fault.hits == 1


def test_a_body_that_is_cut(store: Store, tmp_path: Path) -> None:
    """A read that ends too early is an error, and with retries goes on where it stopped."""
    store.server.raw_put(store.bucket, "k", DATA)
    with (
        store.server.faults.injected(Fault(method="GET", key="k", cut_body=1000)),
        pytest.raises(TransientBackendError),
    ):
        store.plain().cat_file(store.at("k"))
    fault = store.server.faults.add(Fault(method="GET", key="k", cut_body=3_000_000, times=3))
    store.retrying().get_file(store.at("k"), str(tmp_path / "got"))
    assert (tmp_path / "got").read_bytes() == DATA
    assert fault.hits == 3


def test_an_object_replaced_while_it_is_read(store: Store, tmp_path: Path) -> None:
    """Two versions of an object are never mixed in one file: the read fails, and a new one gets the new bytes."""
    store.server.raw_put(store.bucket, "k", DATA)
    other = bytes(reversed(DATA))
    held = store.server.faults.add(Fault(method="GET", key="k", cut_body=1000))

    def replace_once(policy: RetryPolicy) -> Retrier:
        def sleep(seconds: float) -> None:
            store.server.raw_put(store.bucket, "k", other)

        return Retrier(policy, sleep=sleep)

    backend = store.plain()
    backend._retrier = replace_once(QUICK)
    with pytest.raises(TransientBackendError, match="replaced"):
        backend.get_file(store.at("k"), str(tmp_path / "got"))
    assert held.hits == 1
    backend.get_file(store.at("k"), str(tmp_path / "got"))
    assert (tmp_path / "got").read_bytes() == other


# -- writes under fault ---------------------------------------------------------------------------------------------

WRITE_FAULTS = {
    "before": Fault(method="PUT", drop="before"),
    "after": Fault(method="PUT", drop="after"),
    "throttled": Fault(method="PUT", status=503, code="SlowDown", times=3),
    "internal": Fault(method="PUT", status=500),
    "damaged": Fault(method="PUT", corrupt_request=True),
}


@pytest.mark.parametrize("name", WRITE_FAULTS)
@pytest.mark.parametrize("size", [1000, len(DATA)], ids=["whole", "parts"])
def test_uploads_outlive_faults(store: Store, tmp_path: Path, name: str, size: int) -> None:
    """Rows 13-18, 24: lost requests, lost answers, throttling and damage on the way are outlived, and the bytes are right."""
    source = tmp_path / "f"
    source.write_bytes(DATA[:size])
    fault = store.server.faults.add(WRITE_FAULTS[name])
    store.retrying().put_file(str(source), store.at("k"), expected=digest_bytes(DATA[:size]))
    assert fault.hits == WRITE_FAULTS[name].times
    assert store.server.raw_get(store.bucket, "k") == DATA[:size]
    assert store.server.raw_uploads(store.bucket) == {}


@pytest.mark.parametrize("mode", ["create", "overwrite"])
@pytest.mark.parametrize("drop", ["before", "after"])
@pytest.mark.parametrize("step", ["begin", "complete"])
def test_the_ends_of_a_multipart_upload(store: Store, tmp_path: Path, mode: Any, drop: Any, step: str) -> None:
    """Row 20: an unanswered begin or complete is settled: the object is there once, and is ours."""
    source = tmp_path / "f"
    source.write_bytes(DATA)
    fault = store.server.faults.add(
        Fault(method="POST", query={"begin": "uploads", "complete": "uploadId"}[step], drop=drop)
    )
    store.retrying().put_file(str(source), store.at("k"), mode=mode, expected=digest_bytes(DATA))
    assert fault.hits == 1
    assert store.server.raw_get(store.bucket, "k") == DATA


def test_a_completion_that_failed_in_a_200(s3: Store, tmp_path: Path) -> None:
    """Row 15: S3 may report a failed completion in the body of a 200; it is never taken for success."""
    source = tmp_path / "f"
    source.write_bytes(DATA)
    s3.server.faults.add(Fault(method="POST", query="uploadId", status=200, code="InternalError", times=None))
    with pytest.raises(TransientBackendError):
        s3.plain().put_file(str(source), s3.at("k"))
    assert s3.server.raw_keys(s3.bucket) == []
    s3.server.faults.clear()
    s3.server.faults.add(Fault(method="POST", query="uploadId", status=200, code="InternalError"))
    s3.retrying().put_file(str(source), s3.at("k"))
    assert s3.server.raw_get(s3.bucket, "k") == DATA


def test_a_failed_upload_leaves_no_parts(store: Store, tmp_path: Path) -> None:
    """Parts of an upload that was given up are removed, so that nobody pays for what nobody sees."""
    source = tmp_path / "f"
    source.write_bytes(DATA)
    store.server.faults.add(Fault(query="partNumber", status=403, code="AccessDenied", times=None, skip=1))
    with pytest.raises(AccessDeniedError):
        store.retrying().put_file(str(source), store.at("k"))
    assert store.server.raw_uploads(store.bucket) == {}
    assert store.server.raw_keys(store.bucket) == []


def test_a_lost_answer_to_a_create(store: Store) -> None:
    """Row 19, I3: a create tried again after a lost answer is refused by its own object, for the caller to settle."""
    store.server.faults.add(Fault(method="PUT", drop="after"))
    backend = store.retrying()
    with pytest.raises(ObjectExistsError):
        backend.pipe_file(store.at("manifest"), b"mine", mode="create")
    assert backend.cat_file(store.at("manifest")) == b"mine"


def test_what_the_store_holds_is_compared(oss: Store) -> None:
    """OSS says what it received: other bytes are removed again, and the error is one of integrity."""
    oss.server.faults.add(Fault(method="PUT", corrupt_request=True, times=None))
    with pytest.raises(ChecksumMismatchError) as caught:
        oss.plain().pipe_file(oss.at("k"), b"0123456789")
    assert isinstance(caught.value, TransientBackendError)
    assert caught.value.expected == digest_bytes(b"0123456789").crc64xz  # type: ignore[attr-defined]
    assert oss.server.raw_keys(oss.bucket) == []


def test_damage_at_rest_does_not_change_the_stored_crc(store: Store) -> None:
    """The CRC is the one of the bytes that were written: it is compared with digests of what is read, not trusted alone."""
    backend = store.plain()
    backend.pipe_file(store.at("k"), b"0123456789")
    before = backend.stored_crc(store.at("k"))
    store.server.raw_flip_bit(store.bucket, "k", 3)
    assert backend.stored_crc(store.at("k")) == before
    assert digest_bytes(backend.cat_file(store.at("k"))) != digest_bytes(b"0123456789")


def test_rm_files_reports_what_was_refused(s3: Store) -> None:
    """Row 41: keys refused inside a successful batch are reported, by name and reason."""
    backend = s3.plain()
    client = backend._s3._client()

    def answer(http_response: Any, parsed: dict[str, Any], **kwargs: Any) -> None:
        errors = [
            {"Key": "b", "Code": "AccessDenied", "Message": "Access Denied"},
            {"Key": "c", "Code": "InternalError", "Message": "oops"},
        ]
        parsed["Errors"] = errors

    client.meta.events.register("after-call.s3.DeleteObjects", answer)
    with pytest.raises(AccessDeniedError, match="2 objects") as caught:
        backend.rm_files([s3.at(key) for key in "abc"])
    failed = caught.value.failed  # type: ignore[attr-defined]
    assert {path: type(error) for path, error in failed.items()} == {
        s3.at("b"): AccessDeniedError,
        s3.at("c"): TransientBackendError,
    }


def test_a_store_without_checksums_is_used_without(s3: Store, tmp_path: Path) -> None:
    """A store that refuses checksum headers is found out once, and from then on written to without them."""
    refuse = Fault(
        match=lambda seen: any(name.startswith("x-amz-checksum-") for name in seen.headers),
        status=501,
        code="NotImplemented",
        times=None,
    )
    refused = s3.server.faults.add(refuse)
    backend = s3.plain()
    backend.pipe_file(s3.at("k"), b"1", mode="create")
    source = tmp_path / "f"
    source.write_bytes(DATA)
    backend.put_file(str(source), s3.at("big"))
    assert refused.hits == 1
    assert backend.capabilities.stored_crc is None
    assert s3.server.raw_get(s3.bucket, "k") == b"1"
    assert s3.server.raw_get(s3.bucket, "big") == DATA


def test_a_batch_delete_that_is_not_offered(s3: Store) -> None:
    """Where DeleteObjects is not implemented (Google's interop), keys are removed one by one."""
    for key in "abc":
        s3.server.raw_put(s3.bucket, key, b"1")
    s3.server.faults.add(Fault(method="POST", query="delete", status=501, code="NotImplemented", times=None))
    s3.plain().rm_files([s3.at(key) for key in "abc"])
    assert s3.server.raw_keys(s3.bucket) == []


def test_the_requests_of_small_verbs(store: Store) -> None:
    """The common verbs cost one request each; a refused look-up is not asked for again and again."""
    backend = store.plain()
    backend.pipe_file(store.at("a/k"), b"1", mode="create")
    for verb, most in (
        (lambda: backend.pipe_file(store.at("a/k"), b"1"), 1),
        (lambda: backend.cat_file(store.at("a/k")), 1),
        (lambda: backend.info(store.at("a/k")), 1),
        (lambda: backend.stored_crc(store.at("a/k")), 1),
        (lambda: backend.find(store.at("a")), 1),
        (lambda: backend.ls(store.at("a")), 1),
        (lambda: backend.info(store.at("a")), 2),
        (lambda: backend.exists(store.at("none")), 2),
        (lambda: backend.rm_file(store.at("a/k")), 1),
    ):
        store.server.log.clear()
        verb()
        assert len(store.server.log) <= most
