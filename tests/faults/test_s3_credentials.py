"""Fault rows 30 and 31 on S3: credentials that end in the middle of an upload, are renewed by their own source, or are not; and where they never appear."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckptmgr.backends.options import Engine, StoreOptions
from ckptmgr.backends.retry import Retrier, RetryPolicy
from ckptmgr.backends.s3 import S3Backend
from ckptmgr.core.errors import AccessDeniedError, BackendError, BucketNotFoundError, ConfigError, TransientBackendError
from ckptmgr.core.layout import Stem
from ckptmgr.core.retention import KeepLast
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.awscredentials import SOURCES, AwsCredentialServer, Source
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.outcomes import refused
from ckptmgr.transfer.messages import Task
from ckptmgr.transfer.tidying import Retention
from ckptmgr.transfer.uploader import Uploader

if TYPE_CHECKING:
    from ckptmgr.testing.stores import Store

pytestmark = pytest.mark.usefixtures("small_s3_parts")

PART_BYTES = 1 << 20
PARTS = 3
QUICK = RetryPolicy(attempts=4, base_s=0.001, cap_s=0.002, deadline_s=60.0)
ENGINES: tuple[Engine, ...] = ("auto", "boto3")


class _Ids:
    """Where the id of an upload is kept."""

    def __init__(self) -> None:
        self.upload_id: str | None = None
        self.all: list[str] = []

    def began(self, upload_id: str) -> None:
        self.upload_id = upload_id
        self.all.append(upload_id)

    def ended(self) -> None:
        self.upload_id = None


class _Told:
    """Calls `then` once, when the first part was sent."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then: Callable[[], object] | None = then
        self._moved = 0

    def relative_update(self, count: int) -> None:
        self._moved += count
        if self._moved > PART_BYTES and self._then is not None:
            then, self._then = self._then, None
            then()


@pytest.fixture
def source() -> Iterator[AwsCredentialServer]:
    with AwsCredentialServer() as server:
        yield server


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, source: AwsCredentialServer, tmp_path: Path) -> Callable[[Source], None]:
    """Takes the static keys away, and makes a source of `source` the one where credentials are found."""

    def use(kind: Source) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        for name, value in source.env(kind, token_file=tmp_path / "token").items():
            monkeypatch.setenv(name, value)

    return use


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20) * (PART_BYTES * PARTS >> 20))
    return path


def _backend(engine: Engine) -> S3Backend:
    return S3Backend(
        retrier=Retrier(QUICK),
        store_options=StoreOptions(engine=engine),
        multipart_threshold=PART_BYTES,
        part_bytes=PART_BYTES,
        workers=1,
    )


def _parts(store: Any) -> list[tuple[int | None, str]]:
    """Status, and token, of every part that was sent."""
    sent = (entry for entry in store.server.log if entry.method == "PUT" and "partNumber" in entry.query)
    return [(entry.status, entry.headers.get("x-amz-security-token", "")) for entry in sent]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", SOURCES)
def test_revoked_in_the_middle_of_an_upload(
    make_store: Callable[[str], Store],
    source: AwsCredentialServer,
    use: Callable[[Source], None],
    file: Path,
    kind: Source,
    engine: Engine,
) -> None:
    """The store says that they are expired before they should be: they are fetched anew, and the same upload goes on (row 30)."""
    store: Any = make_store("moto")
    use(kind)
    source.issue("first")
    store.server.app.live_tokens = {"first"}

    def revoke() -> None:
        source.issue("second")
        store.server.app.live_tokens = {"second"}

    ids = _Ids()
    _backend(engine).put_file(str(file), f"{store.bucket}/k", callback=_Told(revoke), parts=ids)
    assert store.server.raw_get(store.bucket, "k") == file.read_bytes()
    assert len(ids.all) == 1
    assert len([entry for entry in store.server.log if "uploads" in entry.query]) == 1
    parts = _parts(store)
    assert parts[0] == (200, "first")
    assert parts[-1] == (200, "second")
    assert [status for status, _ in parts].count(200) == PARTS
    # The part that was refused, and no more.
    assert len(parts) == PARTS + 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["container", "web-identity"])
def test_renewed_before_they_end(
    make_store: Callable[[str], Store],
    source: AwsCredentialServer,
    use: Callable[[Source], None],
    file: Path,
    kind: Source,
    engine: Engine,
) -> None:
    """Near their end they are renewed by themselves: no request is refused, and one upload is signed with both."""
    store: Any = make_store("moto")
    use(kind)
    source.issue("first", lifetime_s=120)
    _backend(engine).put_file(
        str(file), f"{store.bucket}/k", callback=_Told(lambda: source.issue("second", lifetime_s=7200))
    )
    assert store.server.raw_get(store.bucket, "k") == file.read_bytes()
    parts = _parts(store)
    assert {status for status, _ in parts} == {200}
    assert {token for _, token in parts} == {"first", "second"}
    assert len(parts) == PARTS


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["instance", "web-identity"])
def test_never_renewed(
    make_store: Callable[[str], Store],
    source: AwsCredentialServer,
    use: Callable[[Source], None],
    file: Path,
    kind: Source,
    engine: Engine,
) -> None:
    """Expired, and their source refuses for ever: permanent after at most three requests; the parts stay for a later try (row 31)."""
    store: Any = make_store("moto")
    use(kind)
    source.issue("first")
    store.server.app.live_tokens = {"first"}
    asked: list[int] = []

    def revoke() -> None:
        store.server.app.live_tokens = set()
        source.refuse(403)
        asked.extend((len(store.server.log), len(source.asked)))

    ids = _Ids()
    backend = _backend(engine)
    with pytest.raises(AccessDeniedError) as caught:
        backend.put_file(str(file), f"{store.bucket}/k", callback=_Told(revoke), parts=ids)
    assert not isinstance(caught.value, TransientBackendError)
    assert caught.value.hint
    assert len(store.server.log) - asked[0] <= 3
    assert len(source.asked) - asked[1] <= 6
    assert list(store.server.raw_uploads(store.bucket)) == [ids.upload_id]
    # Renewed at last: the same upload goes on.
    source.issue("third")
    store.server.app.live_tokens = {"third"}
    backend.put_file(str(file), f"{store.bucket}/k", parts=ids)
    assert store.server.raw_get(store.bucket, "k") == file.read_bytes()
    assert len(ids.all) == 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (403, "AccessDenied", AccessDeniedError),
        (404, "NoSuchBucket", BucketNotFoundError),
        (400, "ExpiredToken", AccessDeniedError),
    ],
)
def test_refused_for_good(
    make_store: Callable[[str], Store], file: Path, status: int, code: str, error: type[BackendError], engine: Engine
) -> None:
    """No permission, no bucket, a token that nobody renews: permanent within three requests, and said with what to do (row 31)."""
    store: Any = make_store("moto")
    store.server.faults.add(Fault(status=status, code=code, times=None))
    store.server.log.clear()
    with pytest.raises(error) as caught:
        _backend(engine).put_file(str(file), f"{store.bucket}/k")
    assert not isinstance(caught.value, TransientBackendError)
    assert code in str(caught.value)
    assert caught.value.hint
    assert len(store.server.log) <= 3


def test_a_source_that_is_away_for_a_while(
    make_store: Callable[[str], Store], source: AwsCredentialServer, use: Callable[[Source], None]
) -> None:
    """STS that cannot be reached may be back the next time: transient, and it, not the store, is named."""
    store: Any = make_store("moto")
    use("web-identity")
    source.close()
    with pytest.raises(TransientBackendError, match=re.escape(source.url)):
        _backend("auto").pipe_file(f"{store.bucket}/k", b"x")
    assert store.server.log == []


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Takes the static keys away, and has a program of the profile hand out credentials: a shell's command line."""

    def program(command: str) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        (tmp_path / "config").write_text(f"[default]\ncredential_process = {command}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

    return program


def test_a_source_that_fails_once(
    make_store: Callable[[str], Store], program: Callable[[str], None], tmp_path: Path, cli_here: Callable[..., Any]
) -> None:
    """Is asked again, as a store is, from the very first request on."""
    store: Any = make_store("moto")
    identity = store.server.identities[0]
    keys = {"Version": 1, "AccessKeyId": identity.access_key, "SecretAccessKey": identity.secret_key}
    script = tmp_path / "hand-out"
    script.write_text(f"#!/bin/sh\nmkdir {tmp_path}/asked && exit 3\necho '{json.dumps(keys)}'\n")
    script.chmod(0o755)
    program(str(script))
    done = cli_here("ls", f"{store.url}/run")
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "asked").is_dir()


def test_a_source_that_cannot_be_asked(
    make_store: Callable[[str], Store], program: Callable[[str], None], tmp_path: Path, cli_here: Callable[..., Any]
) -> None:
    """A program that is not there is a mistake of the configuration, and is not called a broken connection."""
    store: Any = make_store("moto")
    program(str(tmp_path / "nothing"))
    refused(cli_here("ls", f"{store.url}/run"), 2, str(tmp_path / "nothing"), "~/.aws")


def test_the_doctor_and_a_source_that_fails(
    make_store: Callable[[str], Store], program: Callable[[str], None], cli_here: Callable[..., Any]
) -> None:
    """Is a verdict on credentials, the last one."""
    store: Any = make_store("moto")
    program("false")
    done = cli_here("doctor", store.url, "--json")
    verdicts = json.loads(done.stdout)["verdicts"]
    assert (done.returncode, [verdict["check"] for verdict in verdicts]) == (4, ["versions", "credentials"])
    assert (verdicts[1]["level"], "~/.aws" in verdicts[1]["advice"]) == ("problem", True)


def test_a_source_that_hands_out_expired_ones(
    make_store: Callable[[str], Store], source: AwsCredentialServer, use: Callable[[Source], None]
) -> None:
    """A clock that is wrong at their source is said as what it is, and not as a mistake of ours."""
    store: Any = make_store("moto")
    use("container")
    source.issue("first", lifetime_s=-60)
    with pytest.raises(AccessDeniedError, match="expired"):
        _backend("auto").pipe_file(f"{store.bucket}/k", b"x")


@pytest.mark.parametrize("kind", SOURCES)
def test_where_they_were_found(
    make_store: Callable[[str], Store], source: AwsCredentialServer, use: Callable[[Source], None], kind: Source
) -> None:
    """The source and the end are told, and nothing of what they are."""
    make_store("moto")
    use(kind)
    keys = source.issue("first", lifetime_s=7200)
    connection = _backend("auto").connection()
    expected = {"instance": "instance's role", "container": "container's role", "web-identity": "web identity"}
    assert expected[kind] in str(connection.credentials)
    assert connection.is_temporary
    assert connection.expires_s is not None
    assert abs(datetime.fromtimestamp(connection.expires_s, timezone.utc) - keys.expires).total_seconds() < 2
    assert not [secret for secret in (keys.access_key, keys.secret_key) if secret in repr(connection)]


@pytest.mark.parametrize("endpoint", ["http://AKIA:hush-hush@127.0.0.1:9", "https://hush-hush@store.example.com/x"])
def test_an_endpoint_with_credentials(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """It is refused, and not repeated: endpoints are named in messages."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ConfigError, match="endpoint") as caught:
        _backend("auto").find("bucket/x")
    assert "hush" not in str(caught.value)


# --- where they never appear --------------------------------------------------------------------------------------------------


def _signatures(store: Any) -> set[str]:
    found = (
        re.search("Signature=([0-9a-f]{64})", entry.headers.get("authorization", "")) for entry in store.server.log
    )
    return {match.group(1) for match in found if match is not None}


def _files(directory: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            yield str(path), path.read_bytes()


def test_no_secret_is_written_or_printed(
    make_store: Callable[[str], Store],
    cli_here: Callable[..., subprocess.CompletedProcess[str]],
    new_tier: Callable[[RunDirectory], LocalTier],
    local_save: Callable[..., Stem],
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a transfer process with a failing upload, and the commands beside it with -v, print and write: no key, no token, no signature."""
    store: Any = make_store("moto")
    secret, token, key = "the-secret-key-of-the-test", "the-session-token-of-the-test", "AKIAOFTHETEST"
    keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_SESSION_TOKEN": token}
    for name, value in {**keys, "XDG_STATE_HOME": str(tmp_path / "state")}.items():
        monkeypatch.setenv(name, value)
    store.server.log.clear()
    url = f"{store.url}/run"
    run = RunDirectory.open_or_create(url)
    tier = new_tier(run)
    local_save(tier, run, 100)
    store.server.faults.add(Fault(method="PUT", key="*/checkpoints/*", status=403, code="AccessDenied"))
    task = Task(
        url=url,
        record=run.record,
        local_dir=str(tier.root),
        attempt=1,
        retention=Retention(store=None, local=KeepLast(10)),
        retry=QUICK,
        wrap_backend=None,
        linger_s=60.0,
        pause_s=0.05,
        log_level=20,
        labels={"run": url},
    )
    uploader = Uploader(tier, run, stop=threading.Event(), task=task, pause_s=0.05)
    uploader.notify()
    uploader.close(60.0)
    failed = {f"failed:{name}": data for name, data in _files(tmp_path)}
    assert any(b"AccessDenied" in data for data in failed.values())
    told = []
    for words in (
        ["drain", tier.root],
        ["push", make_checkpoint(200), url],
        ["ls", url, "--json"],
        ["status", tier.root, "--json"],
        ["verify", url, "--json"],
        ["resume", url, "--to", tmp_path / "restored", "--json"],
    ):
        done = cli_here(*words, "-v")
        assert done.returncode == 0, done.stderr
        told.append(done.stdout + done.stderr)

    signatures = _signatures(store)
    assert len(signatures) > 10
    assert {entry.headers.get("x-amz-security-token") for entry in store.server.log if entry.bucket} == {token}
    written = dict(_files(tmp_path))
    assert {"transfer.json", "transfer.log"} <= {os.path.basename(name) for name in written}
    stored = {f"store:{name}": data for name, data in store.snapshot().items()}
    assert any("/manifests/" in name for name in stored)
    hidden = [value.encode() for value in (secret, token, key, *signatures)]
    printed = {f"printed:{at}": text.encode() for at, text in enumerate(told)}
    for where, data in {**printed, **failed, **written, **stored}.items():
        found = [value for value in hidden if value in data]
        assert not found, (where, found)
