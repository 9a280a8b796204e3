"""`doctor`: what it finds out about a store, that it leaves nothing there, and that one failing question hides no other."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckptmgr.backends.base import BucketFacts
from ckptmgr.backends.probes import Greeting
from ckptmgr.core.errors import ConfigError
from ckptmgr.run import doctor, surroundings, trials
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.doctor import Question, examine
from ckptmgr.run.store import holds_anything
from ckptmgr.run.verdicts import Verdict
from ckptmgr.testing.faults import Fault

if TYPE_CHECKING:
    from ckptmgr.testing.certificates import Certificates
    from ckptmgr.testing.servers import MotoServer
    from ckptmgr.testing.stores import Store

pytestmark = pytest.mark.usefixtures("small_s3_parts")

_LEFT = ".ckptmgr-doctor-0123abcd"


@pytest.fixture(autouse=True)
def _little_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_FIRST_BYTES", 64 << 10)
    monkeypatch.setattr(trials, "_SECOND_BYTES", 128 << 10)


def _examined(url: str, **question: Any) -> dict[str, Verdict]:
    return {verdict.check: verdict for verdict in examine(Question(url=url, **question))}


def _levels(found: dict[str, Verdict], level: str) -> set[str]:
    return {check for check, verdict in found.items() if verdict.level == level}


def test_a_good_store(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk, on a real S3 and on OSS everything works; nothing that was written stays, in the store or here."""
    store.put("run/other.bin", b"theirs")
    if store.name == "s3":
        # SeaweedFS insists on parts of 5 MiB, as its profile says.
        monkeypatch.setenv("CKPTMGR_STORE_PROFILE", "seaweedfs")
    found = _examined(store.url, size_bytes=1000, local_dir=tmp_path / "tier")
    assert _levels(found, "problem") == _levels(found, "unknown") == set()
    assert _levels(found, "warning") <= {"lifecycle"}
    common = {"versions", "list", "put", "get", "head", "create_only", "copy", "round_trip", "upload_rate", "delete"}
    of_objects = {"credentials", "endpoint", "clock", "multipart", "abort", "checksum", "stale_uploads", "versioning"}
    assert set(found) == common | {"local_disk"} | (set() if store.name == "local" else of_objects | {"lifecycle"})
    assert store.snapshot() == {"run/other.bin": b"theirs"}
    if store.server is None:
        assert [path.name for path in (tmp_path / "store").iterdir()] == ["run"]
    else:
        assert store.server.raw_uploads(store.bucket) == {}  # type: ignore[attr-defined]
        assert found["multipart"].facts == {"lists_parts": True, "keeps_checksum": True}
    assert not (tmp_path / "tier").exists()


def test_a_store_that_is_not_there_yet(tmp_path: Path) -> None:
    """A directory that has to be made for the examination is gone after it."""
    found = _examined(str(tmp_path / "a" / "b"))
    assert _levels(found, "problem") == set()
    assert list(tmp_path.iterdir()) == []


def test_credentials_that_only_read(
    make_store: Callable[[str], Store], moto_server: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get a report: writing is refused, reading works, and what the bucket does is still told."""
    store = make_store("moto")
    store.put("run.json", b"something")
    for name, value in moto_server.env_of("read-only").items():
        monkeypatch.setenv(name, value)
    found = _examined(store.url)
    assert _levels(found, "problem") == {"put"}
    assert "AccessDenied" in found["put"].text
    assert found["get"].level == "ok"
    assert "restored" in found["get"].text
    assert found["versioning"].level == "ok"
    assert "clean_up" not in found


def test_credentials_that_may_not_list(
    make_store: Callable[[str], Store], moto_server: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing is the problem, everything else is tried, and all that was written is removed by its names."""
    store = make_store("moto")
    for name, value in moto_server.env_of("no-list").items():
        monkeypatch.setenv(name, value)
    found = _examined(store.url)
    assert _levels(found, "problem") == {"list"}
    assert "s3:ListBucket" in found["list"].advice
    assert found["stale_uploads"].level == "unknown"
    assert store.keys() == []


def test_no_credentials(make_store: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once, and the store is not asked."""
    store = make_store("moto")
    store.server.log.clear()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    found = _examined(store.url)
    assert _levels(found, "problem") == {"credentials"}
    assert {entry.bucket for entry in store.server.log} <= {""}


def test_conditions_are_ignored(make_store: Callable[[str], Store], moto_server: MotoServer) -> None:
    """A store that accepts the header and overwrites is a warning, and a run that relies on it is told (fault row 33)."""
    store = make_store("moto")
    run = RunDirectory.open_or_create(f"{store.url}/run")
    assert run.record.create_only
    moto_server.app.ignores_conditions = True
    found = _examined(store.url)
    assert found["create_only"].level == "warning"
    assert "when the run here was created" in found["create_only"].text
    fresh = _examined(f"{store.url}/elsewhere/x")["create_only"]
    assert (fresh.level, fresh.facts) == ("warning", {"create_only": False})
    assert not RunDirectory.open_or_create(f"{store.url}/run2").record.create_only


def test_a_versioned_oss_bucket(make_store: Callable[[str], Store]) -> None:
    """There create-only writes do nothing, also once versioning is suspended: found by trying, and explained (fault row 34)."""
    store: Any = make_store("oss")
    run = RunDirectory.open_or_create(f"{store.url}/run")
    assert run.record.create_only
    oss2 = pytest.importorskip("oss2")
    admin = store.server.identities[0]
    auth = oss2.Auth(admin.access_key, admin.secret_key)
    bucket = oss2.Bucket(auth, store.server.url, store.bucket, is_path_style=True)
    for state in ("Enabled", "Suspended"):
        config = oss2.models.BucketVersioningConfig()
        config.status = state
        bucket.put_bucket_versioning(config)
        found = _examined(store.url)
        assert found["create_only"].level == found["versioning"].level == "warning"
        assert "versioning" in found["create_only"].advice
        assert "create-only writes are ignored" in found["versioning"].text
        assert _levels(found, "problem") == set()


def test_conditions_are_not_relied_on(make_store: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """CKPTMGR_CREATE_ONLY=no holds even where the store would refuse."""
    store = make_store("moto")
    monkeypatch.setenv("CKPTMGR_CREATE_ONLY", "no")
    verdict = _examined(store.url)["create_only"]
    assert (verdict.level, verdict.facts) == ("ok", {"create_only": False})


def test_wrong_checksums_are_taken(
    make_store: Callable[[str], Store], moto_server: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that does not compare the checksum with what arrived is found out, and can still be used."""
    store = make_store("moto")
    monkeypatch.setattr(moto_server.app, "_checksums", lambda request: None)
    found = _examined(store.url)
    assert found["checksum"].level == "warning"
    assert found["checksum"].facts["refuses_wrong"] is False
    assert _levels(found, "problem") == set()


def test_other_bytes_come_back(make_store: Callable[[str], Store], moto_server: MotoServer) -> None:
    """Bytes that differ from those written are a problem; the other questions are answered all the same."""
    store = make_store("moto")
    moto_server.faults.add(Fault(method="GET", key="*/small", corrupt=True))
    found = _examined(store.url)
    assert _levels(found, "problem") == {"get"}
    assert found["copy"].level == found["multipart"].level == "ok"


@pytest.mark.parametrize(
    ("fault", "check", "level"),
    [
        (
            Fault(match=lambda seen: "x-amz-copy-source" in seen.headers, status=501, code="NotImplemented"),
            "copy",
            "warning",
        ),
        (Fault(method="POST", query="uploads", status=501, code="NotImplemented", times=None), "multipart", "problem"),
        (Fault(method="DELETE", key="*/small", status=403, code="AccessDenied", times=1), "delete", "warning"),
        (Fault(method="GET", query="uploads", status=403, code="AccessDenied"), "stale_uploads", "unknown"),
        (Fault(method="GET", query="versioning", status=403, code="AccessDenied"), "versioning", "unknown"),
        (Fault(method="PUT", key="*/create", status=501, code="NotImplemented"), "create_only", "problem"),
    ],
    ids=["copy", "multipart", "delete", "uploads", "versioning", "create"],
)
def test_one_refusal_hides_nothing(
    make_store: Callable[[str], Store], moto_server: MotoServer, fault: Fault, check: str, level: str
) -> None:
    """What is refused is that verdict; all others are as they would be without it, and nothing stays."""
    store = make_store("moto")
    moto_server.faults.add(fault)
    found = _examined(store.url)
    assert found[check].level == level
    beside = {"put", "get", "head", "checksum", "round_trip", "upload_rate"}
    assert beside <= _levels(found, "ok")
    assert store.keys() == []


def test_an_own_mistake_hides_nothing(make_store: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that we fail to ask is unknown, and no traceback."""
    store = make_store("moto")

    def fail(self: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(trials.Trials, "head", fail)
    found = _examined(store.url)
    assert found["head"].level == "unknown"
    assert "ZeroDivisionError" in found["head"].text
    assert found["copy"].level == "ok"


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no-such-host.invalid", "https://127.0.0.1:9"])
def test_nobody_answers(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """The endpoint is named, and nothing else is asked (fault row 16)."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setattr(doctor, "_POLICY", dataclasses.replace(doctor._POLICY, attempts=1))
    found = _examined("s3://bucket/run")
    assert _levels(found, "problem") == {"list"}
    assert endpoint in found["list"].text
    assert endpoint in found["clock"].text
    assert "put" not in found


def test_no_tls_there(make_store: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """https to a server that speaks http: the endpoint is named, and nothing else is asked."""
    store = make_store("moto")
    endpoint = store.server.url.replace("http://", "https://")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setattr(doctor, "_POLICY", dataclasses.replace(doctor._POLICY, attempts=1))
    found = _examined(store.url)
    assert _levels(found, "problem") == {"list"}
    assert endpoint in found["list"].text
    assert "put" not in found


def test_a_certificate_that_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once, with what to do; and with the authority in AWS_CA_BUNDLE somebody answers."""
    from ckptmgr.testing.certificates import make_certificates

    certificates = make_certificates(tmp_path)
    with tls_server(certificates) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        found = _examined("s3://bucket/run")
        assert _levels(found, "problem") == {"list"}
        assert endpoint in found["list"].text
        assert "AWS_CA_BUNDLE" in found["list"].advice
        assert found["clock"].level == "unknown"
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates.authority))
        found = _examined("s3://bucket/run")
        assert found["clock"].level == "ok"
        assert "NoSuchBucket" in found["list"].text


@contextlib.contextmanager
def tls_server(certificates: Certificates) -> Iterator[str]:
    """An S3 endpoint that knows no bucket."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"<Error><Code>NoSuchBucket</Code><Message>no</Message></Error>"
            self.send_response(404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if self.command == "GET" else b"")

        do_HEAD = do_GET

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing on stderr."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_no_bucket(make_store: Callable[[str], Store]) -> None:
    """That it does not exist is said once."""
    make_store("moto")
    found = _examined("s3://no-such-bucket/run")
    assert _levels(found, "problem") == {"list"}
    assert "put" not in found


def test_configuration_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong profile of the provider's, or a wrong variable of ours, is no verdict about a store."""
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match="nobody"):
        _examined("s3://bucket/run")
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("CKPTMGR_PART_SIZE", "big")
    with pytest.raises(ConfigError, match="CKPTMGR_PART_SIZE"):
        _examined("s3://bucket/run")


# --- nothing stays ----------------------------------------------------------------------------------------------------------


def _until(verdicts: Iterator[Verdict], check: str) -> None:
    assert any(verdict.check == check for verdict in verdicts)


@pytest.mark.parametrize("kind", ["local", "moto", "oss"])
def test_an_examination_that_is_given_up(make_store: Callable[[str], Store], kind: str) -> None:
    """Closed in the middle, it still removes what it has written."""
    store = make_store(kind)
    verdicts = examine(Question(url=store.url))
    _until(verdicts, "create_only")
    assert store.keys() != []
    verdicts.close()  # type: ignore[attr-defined]
    assert store.keys() == []


def test_interrupted_in_an_upload(make_store: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of an upload in parts leaves no part."""
    store: Any = make_store("moto")

    def interrupt(*arguments: object) -> None:
        assert store.server.raw_uploads(store.bucket) != {}
        raise KeyboardInterrupt

    from ckptmgr.backends import probes

    monkeypatch.setattr(probes, "_send", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _examined(store.url)
    assert store.keys() == []
    assert store.server.raw_uploads(store.bucket) == {}


def test_what_could_not_be_removed_is_named(make_store: Callable[[str], Store], moto_server: MotoServer) -> None:
    """A clean-up that is refused says where things are."""
    store = make_store("moto")
    denied = {"status": 403, "code": "AccessDenied", "times": None}
    moto_server.faults.add(Fault(method="DELETE", **denied))  # type: ignore[arg-type]
    moto_server.faults.add(Fault(method="POST", query="delete", **denied))  # type: ignore[arg-type]
    found = _examined(store.url)
    assert found["clean_up"].level == "warning"
    left = {key.split("/")[0] for key in store.snapshot()}
    assert len(left) == 1
    assert left.pop() in found["clean_up"].text


@pytest.mark.parametrize("kind", ["local", "moto"])
def test_what_a_killed_one_left_disturbs_nobody(
    make_store: Callable[[str], Store], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as nothing where a run is looked for or begun, and the next examination removes it once it is old."""
    store = make_store(kind)
    store.put(f"{_LEFT}/small", b"x")
    store.put(".ckptmgr-doctor-mine/file", b"the user's")
    assert holds_anything(store.url)
    store.delete(".ckptmgr-doctor-mine/file")
    if kind == "local":
        store.delete(".ckptmgr-doctor-mine")
    assert not holds_anything(store.url)
    run = RunDirectory.open_or_create(store.url)
    assert run.loose_data([]) == []
    _examined(store.url)
    assert f"{_LEFT}/small" in store.snapshot()
    now_s = time.time()
    monkeypatch.setattr(doctor, "wall_s", lambda: now_s + 7200)
    assert _examined(store.url)["left_overs"].level == "ok"
    assert store.keys() == ["run.json"]


# --- what is made of it -----------------------------------------------------------------------------------------------------


def test_time_against_the_grace(make_store: Callable[[str], Store], push_steps: Callable[..., list[str]]) -> None:
    """The size is that of the newest checkpoint unless it is given; the time to save counts."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 1, 2)
    history = RunDirectory.open(f"{store.url}/run").history()
    stem = history.newest()
    assert stem is not None
    newest = history.manifests[stem]
    found = _examined(store.url)["upload_rate"]
    assert (found.level, found.facts["size_bytes"]) == ("ok", newest.size_bytes)
    assert _examined(f"{store.url}/run")["upload_rate"].facts["size_bytes"] == newest.size_bytes
    large = _examined(store.url, size_bytes=1 << 50)["upload_rate"]
    assert large.level == "warning"
    assert large.facts["size_bytes"] == 1 << 50
    assert _examined(store.url, size_bytes=1, saving_s=121.0)["upload_rate"].level == "warning"
    assert _examined(store.url, size_bytes=1, saving_s=119.0)["upload_rate"].level == "ok"


def test_a_slow_link_is_not_waited_for(make_store: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that takes long is cut off, and the rate is that of what went through."""
    store = make_store("local")
    monkeypatch.setattr(trials, "_FIRST_BYTES", 64 << 20)
    monkeypatch.setattr(trials, "_LONGEST_S", 0.0)
    monkeypatch.setattr(trials, "_SLOW_S", 0.0)
    rate = _examined(store.url)["upload_rate"]
    assert 0 < rate.facts["sent_bytes"] < 64 << 20


@pytest.mark.parametrize(
    ("ahead_s", "level", "says"),
    [
        (3.0, "ok", "within 3 s"),
        (-300.0, "warning", "5 min ahead of"),
        (1800.0, "warning", "30 min behind the store's, more than"),
    ],
)
def test_clocks(monkeypatch: pytest.MonkeyPatch, ahead_s: float, level: str, says: str) -> None:
    """A wrong clock is a warning, beyond the limit of signatures too: requests are signed with the store's time then."""
    from ckptmgr.backends import probes

    monkeypatch.setattr(probes, "greet", lambda endpoint: Greeting(ahead_s=ahead_s, server="MinIO"))
    monkeypatch.setattr(doctor, "_POLICY", dataclasses.replace(doctor._POLICY, attempts=1))
    verdict = _examined("s3://bucket/run")["clock"]
    assert (verdict.level, says in verdict.text) == (level, True)
    if level == "ok":
        assert "CKPTMGR_STORE_PROFILE=minio" in verdict.advice


def test_uploads_that_nobody_finished(make_store: Callable[[str], Store]) -> None:
    """They are counted, with the age of the oldest; moto says of each that it was begun in 2010."""
    store: Any = make_store("moto")
    import boto3

    client = boto3.client("s3")
    client.create_multipart_upload(Bucket=store.bucket, Key="exp/run/x")
    # Of an examination that was killed: it goes, and is not counted.
    client.create_multipart_upload(Bucket=store.bucket, Key=f"exp/{_LEFT}/parts")
    verdict = _examined(store.url)["stale_uploads"]
    assert (verdict.level, verdict.facts["stale"]) == ("warning", 1)
    assert "ckptmgr gc" in verdict.advice
    assert list(store.server.raw_uploads(store.bucket).values()) == ["exp/run/x"]


@pytest.mark.parametrize(
    ("facts", "kind", "levels", "says"),
    [
        (BucketFacts(), "s3", ("unknown", "unknown"), "may not be asked"),
        (BucketFacts(versioning="off", abort_days=7, expires=False), "s3", ("ok", "ok"), "after 7 days"),
        (BucketFacts(versioning="off", abort_days=0, expires=False), "s3", ("ok", "warning"), "AbortIncomplete"),
        (BucketFacts(versioning="enabled", abort_days=7, noncurrent_days=0), "s3", ("warning", "ok"), "Noncurrent"),
        (BucketFacts(versioning="enabled", abort_days=7, noncurrent_days=5), "s3", ("ok", "ok"), "for 5 days"),
        (BucketFacts(versioning="suspended", abort_days=7), "oss", ("warning", "ok"), "create-only writes are ignored"),
        (BucketFacts(versioning="off", abort_days=7, expires=True), "s3", ("ok", "warning"), "by age"),
        (BucketFacts(versioning="off", abort_days=7, archives=True), "s3", ("ok", "warning"), "archive"),
    ],
)
def test_what_a_bucket_does_by_itself(facts: BucketFacts, kind: str, levels: tuple[str, str], says: str) -> None:
    """Versions that stay and rules that delete are said before they cost money, or checkpoints."""
    found = surroundings.versioning(facts, kind), surroundings.lifecycle(facts)
    assert tuple(verdict.level for verdict in found) == levels
    assert says in " ".join(f"{verdict.text} {verdict.advice}" for verdict in found)


def test_a_small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local tier where not one save fits is a problem, one where no second fits a warning."""
    free = {"bytes": 0}

    def usage(path: object) -> Any:
        return type("Usage", (), {"free": free["bytes"]})

    monkeypatch.setattr(shutil, "disk_usage", usage)
    levels = []
    for free["bytes"] in (999, 1001, 2001):
        levels.append(surroundings.local_disk(tmp_path / "tier" / "run", 1000).level)
    assert levels == ["problem", "warning", "ok"]
