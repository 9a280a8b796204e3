"""What is particular to OSS: keys that expire in the middle of an upload, a wrong clock, versioned buckets, CRCs of parts, what is left in a bucket."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastcrc
import oss2  # type: ignore[import-untyped, unused-ignore]
import pytest

from ckptmgr.backends.base import BucketFacts
from ckptmgr.backends.oss import OSSBackend
from ckptmgr.backends.retry import Retrier, RetryPolicy
from ckptmgr.core.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    ObjectExistsError,
    PermanentBackendError,
    TransientBackendError,
)
from ckptmgr.run.directory import RunDirectory
from ckptmgr.testing.faults import Fault, Seen
from ckptmgr.testing.metadata import ALIYUN_ROLES_PATH, MetadataServer
from ckptmgr.testing.oss_sessions import Session
from ckptmgr.testing.server_store import ServerStore, open_server_store
from ckptmgr.testing.servers import OssServer

PART_BYTES = 128 << 10
PARTS = 6


@pytest.fixture
def oss(oss_server: OssServer, bucket_name: str, monkeypatch: pytest.MonkeyPatch) -> ServerStore:
    """A bucket on the OSS dialect, and the environment that leads there."""
    return open_server_store(oss_server, bucket_name, monkeypatch.setenv)


def backend_of(*, workers: int = 1, attempts: int = 1) -> OSSBackend:
    retrier = Retrier(RetryPolicy(attempts=attempts, base_s=0.001, cap_s=0.002))
    return OSSBackend(retrier=retrier, multipart_threshold=PART_BYTES, part_bytes=PART_BYTES, workers=workers)


@dataclass
class Journal:
    upload_id: str | None = None
    begun: list[str] = field(default_factory=list)

    def began(self, upload_id: str) -> None:
        self.upload_id = upload_id
        self.begun.append(upload_id)

    def ended(self) -> None:
        self.upload_id = None


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file of some parts."""
    path = tmp_path / "large"
    path.write_bytes(random.Random(7).randbytes(PARTS * PART_BYTES))
    return path


class Instance:
    """An ECS instance with a RAM role, whose sessions this test begins and ends."""

    def __init__(self, server: OssServer, metadata: MetadataServer) -> None:
        self._server = server
        self.metadata = metadata
        self.session = self.renew()

    def renew(self) -> Session:
        """The metadata service has new keys."""
        self.session = self._server.app.sessions.begin(self._server.identity("admin"))
        self.metadata.attach_aliyun_role(
            "trainer",
            access_key=self.session.access_key,
            secret_key=self.session.secret_key,
            token=self.session.token,
            expires=datetime.now(timezone.utc) + timedelta(hours=1),
        )
        return self.session

    def end(self, code: str | None = None) -> None:
        """The keys of now are refused from now on, and the service has others; with `code` it has none."""
        ended = self.session
        self._server.app.sessions.end(ended)
        if code is None:
            self.renew()
        else:
            self.metadata.attach_aliyun_role(
                "trainer", access_key="", secret_key="", token="", expires=datetime.now(timezone.utc), code=code
            )

    @property
    def questions(self) -> int:
        """How often keys were asked for."""
        return sum(request.path == f"{ALIYUN_ROLES_PATH}trainer" for request in self.metadata.requests)


@pytest.fixture
def instance(oss: ServerStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    """The credentials of this process are those of the instance's role."""
    with MetadataServer() as metadata:
        for name in ("OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET", "ALIBABA_CLOUD_ECS_METADATA_DISABLED"):
            monkeypatch.delenv(name)
        for name, value in metadata.env.items():
            monkeypatch.setenv(name, value)
        yield Instance(oss.server, metadata)


@contextlib.contextmanager
def before_part(store: ServerStore, number: int, do: Callable[[], object]) -> Iterator[None]:
    """Something happens right before the store looks at a part for the first time."""
    done: list[int] = []

    def watch(seen: Seen) -> bool:
        if seen.query.get("partNumber") == str(number) and not done:
            done.append(number)
            do()
        return False

    with store.server.faults.injected(Fault(match=watch, times=None)):
        yield
    assert done


def parts_sent(store: ServerStore) -> list[tuple[int, int | None]]:
    return sorted(
        (int(each.query["partNumber"]), each.status) for each in store.server.log if "partNumber" in each.query
    )


# -- keys that expire (rows 30, 31) --------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 4])
def test_keys_that_expire_in_the_middle_of_an_upload(
    oss: ServerStore, instance: Instance, large: Path, workers: int
) -> None:
    """Row 30: they are renewed once, the same upload goes on, and what was sent is not sent again."""
    journal = Journal()
    with before_part(oss, 3, instance.end):
        backend_of(workers=workers).put_file(str(large), oss.at("k"), parts=journal)
    assert oss.server.raw_get(oss.bucket, "k") == large.read_bytes()
    assert len(journal.begun) == 1
    assert instance.questions == 2
    sent = parts_sent(oss)
    assert [number for number, status in sent if status == 200] == list(range(1, PARTS + 1))
    refused = [number for number, status in sent if status == 403]
    assert 3 in refused
    assert len(refused) <= workers


def test_keys_that_expire_while_parts_come_down(oss: ServerStore, instance: Instance, tmp_path: Path) -> None:
    """Row 30, the other way."""
    data = random.Random(8).randbytes(PARTS * PART_BYTES)
    oss.server.raw_put(oss.bucket, "k", data)
    ended: list[int] = []

    def watch(seen: Seen) -> bool:
        if seen.headers.get("range", "").startswith(f"bytes={2 * PART_BYTES}-") and not ended:
            ended.append(1)
            instance.end()
        return False

    with oss.server.faults.injected(Fault(match=watch, times=None)):
        backend_of().get_file(oss.at("k"), str(tmp_path / "down"))
    assert ended
    assert (tmp_path / "down").read_bytes() == data
    assert instance.questions == 2


def test_keys_that_cannot_be_renewed(oss: ServerStore, instance: Instance, large: Path) -> None:
    """Row 31: a few requests, one line, and the parts wait for the keys of another day."""
    journal = Journal()
    backend = backend_of(attempts=6)
    with (
        before_part(oss, 3, lambda: instance.end("Broken")),
        pytest.raises(AccessDeniedError, match=r"gives no keys: Broken - check the role") as caught,
    ):
        backend.put_file(str(large), oss.at("k"), parts=journal)
    assert "\n" not in str(caught.value)
    refused = [number for number, status in parts_sent(oss) if status == 403]
    assert len(refused) == 1
    assert instance.questions == 2
    upload_id = journal.upload_id
    assert upload_id is not None
    oss.server.log.clear()
    instance.renew()
    backend.put_file(str(large), oss.at("k"), parts=journal)
    assert journal.begun == [upload_id]
    assert [number for number, _ in parts_sent(oss)] == list(range(3, PARTS + 1))
    assert oss.server.raw_get(oss.bucket, "k") == large.read_bytes()


@pytest.mark.parametrize("code", ["SecurityTokenExpired", "InvalidAccessKeyId", "AccessDenied", "NoSuchBucket"])
def test_a_refusal_for_good_makes_no_hot_loop(oss: ServerStore, instance: Instance, code: str) -> None:
    """Row 31: at most three requests, also when each renewal is refused like the one before."""
    backend = backend_of(attempts=6)
    status = 404 if code == "NoSuchBucket" else 403
    with (
        oss.server.faults.injected(Fault(status=status, code=code, times=None)) as fault,
        pytest.raises(BucketNotFoundError if code == "NoSuchBucket" else AccessDeniedError, match=code) as caught,
    ):
        backend.pipe_file(oss.at("k"), b"1")
    assert fault.hits <= 3
    is_about_keys = code in ("SecurityTokenExpired", "InvalidAccessKeyId")
    assert ("the keys are those of the RAM role of this ECS instance" in str(caught.value)) == is_about_keys
    assert instance.questions <= 2


def test_keys_are_renewed_before_they_expire(oss: ServerStore, instance: Instance) -> None:
    """No request is refused when the store is asked in time."""
    instance.metadata.attach_aliyun_role(
        "trainer",
        access_key=instance.session.access_key,
        secret_key=instance.session.secret_key,
        token=instance.session.token,
        expires=datetime.now(timezone.utc) + timedelta(seconds=61),
    )
    clock = [0.0]
    backend = backend_of()
    backend._oss.credentials._clock = lambda: clock[0]
    backend.pipe_file(oss.at("a"), b"1")
    instance.end()
    clock[0] += 55.0
    backend.pipe_file(oss.at("b"), b"2")
    assert {each.status for each in oss.server.log} == {200}
    assert instance.questions == 2


# -- the clock (row 32, K123) --------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v4", "v1"])
@pytest.mark.parametrize("offset_s", [1300.0, -4000.0])
def test_k123_a_wrong_clock(
    oss: ServerStore, large: Path, caplog: pytest.LogCaptureFixture, offset_s: float, version: str
) -> None:
    """K123 a: requests are dated by the store's clock from the first refusal on; how wrong ours is, is said once. It goes on when it is set right."""
    oss.setenv("OSS_SIGNATURE_VERSION", version)
    backend = backend_of()
    oss.server.app.clock_offset_s = offset_s
    with caplog.at_level(logging.WARNING):
        backend.put_file(str(large), oss.at("k"))
        backend.pipe_file(oss.at("m"), b"1", mode="create")
    assert sum(each.status == 403 for each in oss.server.log) == 1
    assert oss.server.raw_get(oss.bucket, "k") == large.read_bytes()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "clock is" in message
    assert ("behind" if offset_s > 0 else "ahead") in message
    seconds = int(next(word for word in message.split() if word.isdecimal()))
    assert abs(seconds - abs(offset_s)) < 30
    caplog.clear()
    oss.server.app.clock_offset_s = 0.0
    assert backend.cat_file(oss.at("m")) == b"1"
    assert "right again" in caplog.text


def test_a_clock_that_cannot_be_made_up_for(oss: ServerStore) -> None:
    """Where the store says no time, the message says what is wrong."""
    fault = Fault(status=403, code="RequestTimeTooSkewed", times=None)
    backend = backend_of()
    backend._oss._now = lambda: 1e9  # type: ignore[attr-defined]
    with (
        oss.server.faults.injected(fault),
        pytest.raises(PermanentBackendError, match=r"minutes behind.*set this machine's clock"),
    ):
        backend.pipe_file(oss.at("k"), b"1")


def test_k123_a_request_that_was_held_back(oss: ServerStore, large: Path) -> None:
    """K123 b: signed anew and sent again; the clock is right, and no other date is taken."""
    with oss.server.faults.injected(
        Fault(query="partNumber", status=403, code="RequestTimeTooSkewed", skip=1)
    ) as fault:
        backend = backend_of()
        backend.put_file(str(large), oss.at("k"))
    assert fault.hits == 1
    assert oss.server.raw_get(oss.bucket, "k") == large.read_bytes()
    assert backend._oss._signer.offset_s == 0.0  # type: ignore[attr-defined]


# -- throttling (row 13) -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["QpsLimitExceeded", "UploadTrafficRateLimitExceeded", "ServiceUnavailable"])
def test_throttled_parts(oss: ServerStore, large: Path, code: str) -> None:
    """Row 13: parts that are turned away come again, and not before the store's own time."""
    waits: list[float] = []
    retrier = Retrier(RetryPolicy(attempts=5, base_s=0.001, cap_s=0.002), sleep=waits.append)
    backend = OSSBackend(retrier=retrier, multipart_threshold=PART_BYTES, part_bytes=PART_BYTES)
    with oss.server.faults.injected(Fault(query="partNumber", status=503, code=code, retry_after_s=7, times=3)):
        backend.put_file(str(large), oss.at("k"))
    assert oss.server.raw_get(oss.bucket, "k") == large.read_bytes()
    # Waited for in slices, so that somebody may end it.
    assert sum(waits) >= 3 * 7.0 - 0.1


# -- create-only (row 34) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["Enabled", "Suspended"])
def test_a_versioned_bucket_has_no_create_only(oss: ServerStore, state: str) -> None:
    """Row 34: OSS accepts the header and ignores it; a run that begins there finds out, and keeps to the slower rules."""
    plain = oss.plain()
    plain.pipe_file(oss.at("k"), b"1", mode="create")
    with pytest.raises(ObjectExistsError):
        plain.pipe_file(oss.at("k"), b"2", mode="create")
    oss.server._core.call("PUT", oss.bucket, query={"versioning": ""}, body=_versioning(state))
    plain.pipe_file(oss.at("k"), b"2", mode="create")
    assert oss.server.raw_get(oss.bucket, "k") == b"2"
    run = RunDirectory.open_or_create(f"oss://{oss.at('run')}", fs=plain, root=oss.at("run"))
    assert run.record is not None
    assert not run.record.create_only
    assert plain.bucket_facts(oss.bucket).versioning == state.lower()


def _versioning(state: str) -> bytes:
    return f"<VersioningConfiguration><Status>{state}</Status></VersioningConfiguration>".encode()


@pytest.fixture
def with_pages_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """From now on so many parts or uploads come in one answer: 1000 are a lot for a test."""
    real = oss2.Bucket._do

    def limit(count: int) -> None:
        def do(self: Any, method: str, bucket: str, key: str, **options: Any) -> Any:
            params = options.get("params", {})
            smaller = {name: str(count) for name in ("max-parts", "max-uploads") if name in params}
            return real(self, method, bucket, key, **{**options, "params": {**params, **smaller}})

        monkeypatch.setattr(oss2.Bucket, "_do", do)

    return limit


# -- parts that are there already ----------------------------------------------------------------------------------


def test_parts_are_proven_by_the_crc_that_oss_keeps(
    oss: ServerStore, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by their ETag, which OSS advises against and which costs an MD5 of the file."""
    journal = Journal()
    with (
        oss.server.faults.injected(Fault(query="partNumber", drop="before", skip=4, times=None)),
        pytest.raises(TransientBackendError),
    ):
        backend_of().put_file(str(large), oss.at("k"), parts=journal)
    assert journal.upload_id is not None
    backend = backend_of()
    receipts = backend._list_parts(oss.at("k"), journal.upload_id)
    data = large.read_bytes()
    for receipt in receipts:
        piece = data[(receipt.number - 1) * PART_BYTES :][:PART_BYTES]
        assert (receipt.crc, receipt.size) == (f"{fastcrc.crc64.xz(piece):016x}", len(piece))
    oss.server.log.clear()

    def no_md5(*_: Any, **__: Any) -> Any:
        raise AssertionError("an MD5 was computed")

    # Only there: the server is in this process, and computes its own.
    monkeypatch.setattr("ckptmgr.backends.partupload.hashlib", SimpleNamespace(md5=no_md5))
    backend.put_file(str(large), oss.at("k"), parts=journal)
    assert [number for number, _ in parts_sent(oss)] == list(range(len(receipts) + 1, PARTS + 1))
    assert hashlib.sha256(oss.server.raw_get(oss.bucket, "k")).digest() == hashlib.sha256(data).digest()


def test_more_parts_than_one_page_has(oss: ServerStore, with_pages_of: Callable[[int], None]) -> None:
    """ListParts answers some at a time, and where to go on."""
    core = oss.server._core
    reply = core.call("POST", oss.bucket, "k", query={"uploads": ""})
    upload_id = reply.body.split(b"<UploadId>")[1].split(b"<")[0].decode()
    for number in range(1, 8):
        core.call("PUT", oss.bucket, "k", query={"uploadId": upload_id, "partNumber": str(number)}, body=b"%d" % number)
    with_pages_of(3)
    receipts = backend_of()._list_parts(oss.at("k"), upload_id)
    assert [receipt.number for receipt in receipts] == list(range(1, 8))
    assert receipts[-1].crc == f"{fastcrc.crc64.xz(b'7'):016x}"
    assert sum("max-parts" in each.query for each in oss.server.log) == 3


# -- the bucket ----------------------------------------------------------------------------------------------------


def test_unfinished_uploads(oss: ServerStore, with_pages_of: Callable[[int], None]) -> None:
    """Those below a path, all pages of them, whatever the key; when each began."""
    backend = backend_of()
    keys = ["run/a ü+&%.bin", "run/b", "run/b", "run/sub/c", "run2/d", "run"]
    begun = sorted((oss.at(key), backend._begin(oss.at(key), "overwrite")) for key in keys)
    with_pages_of(2)
    found = backend.list_uploads(oss.at("run"))
    assert sorted((each.path, each.upload_id) for each in found) == [
        one for one in begun if one[0].startswith(oss.at("run/"))
    ]
    now_s = datetime.now(timezone.utc).timestamp()
    assert all(each.started_s is not None and abs(now_s - each.started_s) < 60 for each in found)
    assert len(backend.list_uploads(oss.bucket)) == len(keys)
    for each in found:
        backend.abort_upload(each.path, each.upload_id)
    assert backend.list_uploads(oss.at("run")) == []


def test_a_bucket_that_does_nothing_by_itself(oss: ServerStore) -> None:
    """Known to be so, which is not the same as unknown."""
    assert backend_of().bucket_facts(oss.at("run")) == BucketFacts(
        versioning="off", abort_days=0, expires=False, archives=False, noncurrent_days=0
    )


def test_what_a_bucket_does_by_itself(oss: ServerStore) -> None:
    """Rules for all keys below a path, for some of them, and for others; those that are off do not count."""
    rules = (
        _rule("run/", "<AbortMultipartUpload><Days>7</Days></AbortMultipartUpload>")
        + _rule("", "<AbortMultipartUpload><Days>1</Days></AbortMultipartUpload>", status="Disabled")
        + _rule(
            "", "<AbortMultipartUpload><Days>2</Days></AbortMultipartUpload><Tag><Key>a</Key><Value>b</Value></Tag>"
        )
        + _rule("run/x/", "<Expiration><CreatedBeforeDate>2030-01-01T00:00:00.000Z</CreatedBeforeDate></Expiration>")
        + _rule("ru", "<NoncurrentVersionExpiration><NoncurrentDays>5</NoncurrentDays></NoncurrentVersionExpiration>")
        + _rule("", "<Transition><Days>9</Days><StorageClass>ColdArchive</StorageClass></Transition>")
    )
    _put_lifecycle(oss, rules)
    backend = backend_of()
    assert backend.bucket_facts(oss.at("run")) == BucketFacts(
        versioning="off", abort_days=7, expires=True, archives=True, noncurrent_days=5
    )
    assert backend.bucket_facts(oss.at("other")) == BucketFacts(
        versioning="off", abort_days=0, expires=False, archives=True, noncurrent_days=0
    )


def _rule(prefix: str, what: str, status: str = "Enabled") -> str:
    return f"<Rule><ID>{abs(hash(what))}</ID><Prefix>{prefix}</Prefix><Status>{status}</Status>{what}</Rule>"


def _put_lifecycle(store: ServerStore, rules: str) -> None:
    store.server.app._lifecycles[store.bucket] = f"<LifecycleConfiguration>{rules}</LifecycleConfiguration>".encode()


def test_facts_that_may_not_be_asked_are_unknown(oss: ServerStore) -> None:
    """A missing permission raises nothing, a store in trouble and a missing bucket do."""
    backend = backend_of()
    with oss.server.faults.injected(Fault(status=403, code="AccessDenied", times=None)):
        assert backend.bucket_facts(oss.bucket) == BucketFacts()
    with oss.server.faults.injected(Fault(status=503, times=None)), pytest.raises(TransientBackendError):
        backend.bucket_facts(oss.bucket)
    with pytest.raises(BucketNotFoundError):
        backend.bucket_facts("no-such-bucket-anywhere")


def test_how_a_store_is_reached(oss: ServerStore, instance: Instance) -> None:
    """For people: where to, with whose keys, until when; nothing secret."""
    found = backend_of().connection()
    assert (found.endpoint, found.region, found.is_temporary) == (oss.server.url, "cn-hangzhou", True)
    assert found.credentials == "the RAM role of this ECS instance"
    assert found.expires_s is not None
    assert instance.session.secret_key not in repr(found)
    assert instance.session.token not in repr(found)
    instance.metadata.detach_aliyun_role()
    assert backend_of().connection().credentials is None


def test_archived_objects_are_named(oss: ServerStore, tmp_path: Path) -> None:
    """Nobody can read them before they are restored; that is said, and not tried again. Their CRC is known nevertheless."""
    oss.server._core.call("PUT", oss.bucket, "k", headers={"x-amz-storage-class": "DEEP_ARCHIVE"}, body=b"1")
    backend = backend_of(attempts=6)
    for call in (lambda: backend.cat_file(oss.at("k")), lambda: backend.get_file(oss.at("k"), str(tmp_path / "k"))):
        with pytest.raises(PermanentBackendError, match="archive class: restore it first"):
            call()
    assert backend.stored_crc(oss.at("k")) == ("crc64xz", f"{fastcrc.crc64.xz(b'1'):016x}")


@pytest.mark.parametrize("page", [b"<html><p>log in</html>", b"<html><p>log in</p></html>", b"log in", b""])
def test_an_answer_that_is_none(oss: ServerStore, page: bytes) -> None:
    """A portal's page in place of an answer is trouble on the way, not an empty store (I7)."""
    oss.server.raw_put(oss.bucket, "k", b"1")
    backend = backend_of()
    with oss.server.faults.injected(Fault(status=200, document=page, times=None)):
        for call in (
            lambda: backend.find(oss.bucket),
            lambda: backend.ls(oss.bucket),
            lambda: backend.list_uploads(oss.bucket),
            lambda: backend.bucket_facts(oss.bucket),
            lambda: backend._list_parts(oss.at("k"), "1"),
            lambda: backend._begin(oss.at("k"), "overwrite"),
        ):
            with pytest.raises(TransientBackendError, match=r"not that of OSS.*OSS_ENDPOINT"):
                call()


def test_the_endpoint_of_another_region(oss: ServerStore) -> None:
    """OSS refuses with the right one; what to set is said."""
    document = (
        b"<Error><Code>AccessDenied</Code><Message>The bucket you are attempting to access must be addressed using the specified endpoint."
        b"</Message><Endpoint>oss-cn-beijing.aliyuncs.com</Endpoint></Error>"
    )
    with (
        oss.server.faults.injected(Fault(status=403, document=document)),
        pytest.raises(AccessDeniedError, match="set OSS_ENDPOINT and OSS_REGION to the bucket's region"),
    ):
        backend_of().pipe_file(oss.at("k"), b"1")
