"""Row 3: an upload in parts that is killed in the middle of a part, and goes on: only what the store does not hold is sent again."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends import partupload
from ckptmgr.backends.registry import open_store
from ckptmgr.core.layout import Stem
from ckptmgr.core.protocol import GC_GRACE_S, prune
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import StoreDriver, drive
from ckptmgr.run.journal import Journal, UploadEntry
from ckptmgr.run.replicate import abort_multiparts, replicate
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.relay import Relay
from ckptmgr.testing.stores import Store
from ckptmgr.transfer.drain import drain

Kill = Callable[..., bool]
Ask = Callable[..., Any]
LocalSave = Callable[..., Stem]

DEADLINE_S = 60.0
PART_BYTES = 5 << 20
# Where nobody is killed in the middle of a part, nothing depends on its size.
SMALL_PART_BYTES = 100 << 10
WORKERS = 4
PARTS = 7


def files(part_bytes: int) -> dict[str, bytes]:
    """A file of seven parts, of six that are a fifth larger, and a small one."""
    return {"model.safetensors": os.urandom(part_bytes // 5) * 31 + b"the end", "state.json": b'{"step": 100}'}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A run on a store behind a relay, and one save in its local tier: a file of seven parts, and a small one."""

    store: Store
    relay: Relay
    run: RunDirectory
    tier: LocalTier
    stem: Stem
    files: dict[str, bytes]
    part_bytes: int

    @property
    def key(self) -> str:
        return f"run/checkpoints/{self.stem}/model.safetensors"

    def job(self, **more: Any) -> dict[str, Any]:
        return {"url": self.run.url, "tier": str(self.tier.root), "part_bytes": self.part_bytes, **more}

    def entry(self) -> UploadEntry:
        entry = self.tier.journal.read(self.stem)
        assert entry is not None
        return entry

    def uploads(self) -> dict[str, str]:
        """Unfinished uploads in the store: key by id."""
        server, bucket = self.store.server, self.store.url.split("/")[2]
        return {upload: key.removeprefix("exp/") for upload, key in server.raw_uploads(bucket).items()}

    def stored_parts(self) -> set[int]:
        """The numbers of the parts that the store holds of the one unfinished upload."""
        server, bucket = self.store.server, self.store.url.split("/")[2]
        ((upload_id, key),) = self.uploads().items()
        if self.store.name == "s3":
            listed = server._s3.list_parts(Bucket=bucket, Key=f"exp/{key}", UploadId=upload_id)
            return {part["PartNumber"] for part in listed.get("Parts", ())}
        return set(server._core.part_sizes(bucket, upload_id))

    def parts_sent(self) -> Counter[int]:
        """How often each part was sent, by requests that began."""
        lines = self.relay.requests(r"^PUT .*partNumber=")
        return Counter(int(re.findall(r"partNumber=(\d+)", line)[0]) for line in lines)

    def begun(self) -> int:
        return len(self.relay.requests(r"^POST \S*[?&]uploads(=|&|$)"))


MakeScene = Callable[..., Scene]


@pytest.fixture
def make_scene(
    make_store: Callable[[str], Store],
    new_tier: Callable[[RunDirectory], LocalTier],
    local_save: LocalSave,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[MakeScene]:
    with contextlib.ExitStack() as stack:

        def make(kind: str, part_bytes: int = PART_BYTES) -> Scene:
            store = make_store(kind)
            relay = stack.enter_context(Relay(store.server.url))
            monkeypatch.setenv("OSS_ENDPOINT" if kind == "oss" else "AWS_ENDPOINT_URL", relay.url)
            run = RunDirectory.open_or_create(f"{store.url}/run")
            tier = new_tier(run)
            saved = files(part_bytes)
            stem = local_save(tier, run, 100, saved)
            return Scene(store=store, relay=relay, run=run, tier=tier, stem=stem, files=saved, part_bytes=part_bytes)

        yield make


@pytest.fixture(params=["s3", pytest.param("moto", marks=pytest.mark.slow), "oss"])
def scene(request: pytest.FixtureRequest, make_scene: MakeScene) -> Scene:
    """On SeaweedFS, moto and OSS, with the parts' size left to the job that is killed."""
    return make_scene(request.param)


@pytest.fixture(params=["moto", "oss"])
def faulty_scene(request: pytest.FixtureRequest, make_scene: MakeScene, small_s3_parts: None) -> Scene:
    """On the servers that inject faults; the run makes small parts, and tries each request once."""
    scene = make_scene(request.param, SMALL_PART_BYTES)
    fs, root = open_store(scene.run.url, retry=False)
    fs._part_bytes = fs._multipart_threshold = SMALL_PART_BYTES
    return replace(scene, run=RunDirectory.open(scene.run.url, fs=fs, root=root))


def assert_committed(scene: Scene, ask: Ask) -> None:
    prefix = f"run/checkpoints/{scene.stem}/"
    assert scene.store.snapshot(prefix) == {prefix + name: data for name, data in scene.files.items()}
    assert scene.store.keys("run/manifests/") == [f"run/manifests/{scene.stem}.json"]
    assert scene.uploads() == {}
    assert scene.entry().state == "uploaded"
    assert scene.entry().multiparts == {}
    assert ask("verify", scene.run.url, "--quick")["damaged"] == []


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_killed_in_the_middle_of_a_part(scene: Scene, kill: Kill, ask: Ask, share: float) -> None:
    """SIGKILL while parts are on the wire: no manifest, no object; the next process goes on with the same upload, and at most the parts that
    were under way, one per worker, go again."""
    scene.relay.forget()
    size = len(scene.files["model.safetensors"])
    scene.relay.freeze_after(int(size * share) + 100_000)
    assert kill("drain", **scene.job(kill={"sent_bytes": int(size * share) + 1000}))
    assert scene.store.keys("run/manifests/") == []
    assert scene.key not in scene.store.keys("run/checkpoints/")
    (upload_id,) = scene.uploads()
    assert scene.entry().multiparts == {"model.safetensors": upload_id}
    scene.relay.thaw()
    first, stored = scene.parts_sent(), scene.stored_parts()
    assert len(stored) >= int(PARTS * share) - WORKERS

    assert not kill("drain", **scene.job())
    sent = scene.parts_sent()
    assert scene.begun() == 1
    # What the server had taken completely before the second process looked is not sent again; what it had not, is.
    assert set(sent) == set(range(1, PARTS + 1))
    assert (sent - first).total() <= PARTS - len(stored)
    assert sent.total() <= PARTS + WORKERS
    assert_committed(scene, ask)


def test_killed_with_all_parts_sent(scene: Scene, kill: Kill, ask: Ask) -> None:
    """Killed before the parts were joined: the next process joins them, and sends none."""
    scene.relay.forget()
    assert kill("drain", **scene.job(kill={"request": "_complete"}))
    assert scene.stored_parts() == set(range(1, PARTS + 1))
    assert scene.key not in scene.store.keys("run/checkpoints/")
    assert not kill("drain", **scene.job())
    assert scene.parts_sent() == Counter(range(1, PARTS + 1))
    assert_committed(scene, ask)


def test_killed_once_the_object_is_there(scene: Scene, kill: Kill, ask: Ask) -> None:
    """Killed between the object and its line in the journal: the upload's id leads nowhere any more, and nothing is sent again."""
    scene.relay.forget()
    assert kill("drain", **scene.job(kill={"verb": "put_file", "nth": 1, "when": "after"}))
    assert set(scene.entry().multiparts) == {"model.safetensors"}
    assert scene.uploads() == {}
    assert not kill("drain", **scene.job())
    assert scene.parts_sent() == Counter(range(1, PARTS + 1))
    assert scene.begun() == 1
    assert_committed(scene, ask)


def test_killed_again_and_again(scene: Scene, kill: Kill, ask: Ask) -> None:
    """Each life gets some parts further; together they send hardly more than the file."""
    scene.relay.forget()
    lives = 0
    while kill("drain", **scene.job(kill={"sent_bytes": PART_BYTES})):
        lives += 1
        assert lives <= PARTS
        assert scene.store.keys("run/manifests/") == []
    assert lives >= 2
    assert scene.begun() == 1
    assert scene.parts_sent().total() <= PARTS + WORKERS * lives
    assert_committed(scene, ask)


# --- what ends an upload for good, and what does not ----------------------------------------------------------------------


def _interrupt(scene: Scene, code: str = "InternalError", status: int = 500) -> str:
    """A drain that fails in the middle; returns the id of the upload that it leaves."""
    failing = Fault(query="partNumber", status=status, code=code, skip=4, times=None)
    with scene.store.server.faults.injected(failing):
        drained = drain(scene.tier, scene.run)
    assert drained.pending == (scene.stem,)
    (upload_id,) = scene.uploads()
    assert scene.entry().multiparts == {"model.safetensors": upload_id}
    assert scene.entry().state == "failed"
    return upload_id


@pytest.mark.parametrize("code", ["InternalError", "SlowDown", "AccessDenied"])
def test_a_failure_that_may_pass_keeps_the_parts(faulty_scene: Scene, ask: Ask, code: str) -> None:
    """Also for wrong or expired credentials, which somebody will renew: then the same upload goes on."""
    scene = faulty_scene
    _interrupt(scene, code, {"InternalError": 500, "SlowDown": 503, "AccessDenied": 403}[code])
    stored = scene.stored_parts()
    assert len(stored) == 4
    scene.relay.forget()
    assert drain(scene.tier, scene.run).committed == (scene.stem,)
    assert set(scene.parts_sent()) == set(range(1, PARTS + 1)) - stored
    assert scene.begun() == 0
    assert_committed(scene, ask)


def test_a_part_that_is_not_these_bytes_is_sent_again(faulty_scene: Scene, ask: Ask) -> None:
    """Another tool has put other bytes of the same length in the place of a part: it alone of those there goes again."""
    scene = faulty_scene
    upload_id = _interrupt(scene)
    victim, *intact = sorted(scene.stored_parts())
    bucket = scene.store.url.split("/")[2]
    query = {"partNumber": str(victim), "uploadId": upload_id}
    reply = scene.store.server._core.call("PUT", bucket, f"exp/{scene.key}", query=query, body=b"x" * scene.part_bytes)
    assert reply.status == 200
    scene.relay.forget()
    assert drain(scene.tier, scene.run).committed == (scene.stem,)
    assert set(scene.parts_sent()) == set(range(1, PARTS + 1)) - set(intact)
    assert_committed(scene, ask)


def test_an_upload_that_the_store_forgot_begins_anew(faulty_scene: Scene, ask: Ask) -> None:
    """A lifecycle rule has aborted it."""
    scene = faulty_scene
    upload_id = _interrupt(scene)
    scene.run.fs.abort_upload(scene.run.path(scene.key.removeprefix("run/")), upload_id)
    assert scene.uploads() == {}
    scene.relay.forget()
    assert drain(scene.tier, scene.run).committed == (scene.stem,)
    assert scene.parts_sent() == Counter(range(1, PARTS + 1))
    assert_committed(scene, ask)


def test_other_parts_than_before_begin_anew(faulty_scene: Scene, ask: Ask) -> None:
    """A version that cuts files in another way: parts of both would not make the file, so the old ones are dropped."""
    scene = faulty_scene
    _interrupt(scene)
    scene.run.fs._part_bytes = scene.part_bytes * 6 // 5
    scene.relay.forget()
    assert drain(scene.tier, scene.run).committed == (scene.stem,)
    assert len(scene.parts_sent()) == 6
    assert_committed(scene, ask)


def test_parts_that_may_not_be_listed_are_sent_again(faulty_scene: Scene, ask: Ask) -> None:
    """Listing parts is a right of its own: without it the upload begins anew, and the old one is dropped."""
    scene = faulty_scene
    _interrupt(scene)
    scene.relay.forget()
    refused = Fault(method="GET", query="uploadId", status=403, code="AccessDenied", times=None)
    with scene.store.server.faults.injected(refused) as active:
        assert drain(scene.tier, scene.run).committed == (scene.stem,)
    assert active.hits == 1
    assert scene.parts_sent() == Counter(range(1, PARTS + 1))
    assert_committed(scene, ask)


@pytest.mark.parametrize("how", ["refused", "changed"])
def test_a_failure_for_good_drops_the_parts(faulty_scene: Scene, how: str) -> None:
    """The store will never take it, or the source is not what it was: no invisible parts stay behind and are paid for."""
    scene = faulty_scene
    _interrupt(scene)
    if how == "refused":
        scene.store.server.faults.add(Fault(query="partNumber", status=400, code="InvalidArgument", times=None))
    else:
        victim = scene.tier.data_dir(scene.stem) / "model.safetensors"
        victim.write_bytes(scene.files["model.safetensors"][:-1] + b"D")
    assert drain(scene.tier, scene.run).pending == (scene.stem,)
    assert scene.uploads() == {}
    assert scene.entry().multiparts == {}
    assert scene.key not in scene.store.keys("run/checkpoints/")


def test_an_upload_that_is_interrupted_is_not_aborted(
    faulty_scene: Scene, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stops an upload from outside, a signal or a newer save in a hurry, leaves the parts for the next one."""
    scene = faulty_scene
    # Progress is told by another thread than the one that sends: what it is told of must not be all by the time it interrupts.
    held = scene.store.server.faults.add(Fault(method="PUT", query="partNumber", hold="before", skip=2, times=None))

    class Ending(ThreadPoolExecutor):
        """The threads that send parts; the held ones are answered once nothing more is wanted of them."""

        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            held.release()
            super().shutdown(wait, cancel_futures=cancel_futures)

    monkeypatch.setattr(partupload, "ThreadPoolExecutor", Ending)

    class Stopped(BaseException):
        pass

    sent = 0

    def stop(count: int) -> None:
        nonlocal sent
        sent += count
        if sent >= 2 * scene.part_bytes and held.hits:
            raise Stopped

    ((manifest, entry),) = scene.tier.pending(scene.run.url)
    with pytest.raises(Stopped):
        replicate(manifest, scene.tier.data_dir(scene.stem), scene.run, scene.tier.journal, entry, moved=stop)
    assert scene.relay.requests("^DELETE .*uploadId") == []
    stored = scene.stored_parts()
    assert 2 < len(stored) < PARTS
    scene.store.server.faults.clear()
    scene.relay.forget()
    assert drain(scene.tier, scene.run).committed == (scene.stem,)
    assert set(scene.parts_sent()) == set(range(1, PARTS + 1)) - stored
    assert_committed(scene, ask)


def test_a_lost_answer_to_the_last_request(faulty_scene: Scene, ask: Ask) -> None:
    """Row 20, and the process ends before it can ask again: the next one finds the object, and sends nothing."""
    scene = faulty_scene
    lost = Fault(method="POST", query="uploadId", drop="after")
    with scene.store.server.faults.injected(lost) as active:
        assert drain(scene.tier, scene.run).pending == (scene.stem,)
    assert active.hits == 1
    scene.relay.forget()
    assert drain(scene.tier, scene.run).committed == (scene.stem,)
    assert scene.parts_sent() == Counter()
    assert_committed(scene, ask)


@pytest.mark.parametrize("end", ["stale", "pruned"])
def test_a_name_that_is_given_up_takes_its_parts_along(faulty_scene: Scene, end: str) -> None:
    """An upload that goes on under a new name, or not at all, leaves no parts under the old one."""
    scene = faulty_scene
    old = _interrupt(scene)
    entry = scene.entry()
    if end == "stale":
        began_at_s = entry.began_at_s
        assert began_at_s is not None
        scene.tier.journal.write(replace(entry, began_at_s=began_at_s - GC_GRACE_S))
        assert drain(scene.tier, scene.run).committed == (scene.stem,)
        assert scene.entry().remote != scene.stem
    else:
        # Committed by another process, and pruned since.
        ((manifest, _),) = scene.tier.pending(scene.run.url)
        other = Journal(scene.tier.root / "other", makes_root=True)
        replicate(
            manifest, scene.tier.data_dir(scene.stem), scene.run, other, UploadEntry(stem=scene.stem, remote=scene.stem)
        )
        assert drive(prune(scene.stem, closed_at=None), StoreDriver(scene.run))
        assert drain(scene.tier, scene.run).pending == ()
        assert scene.entry().state == "dropped"
    assert old not in scene.uploads()
    assert scene.uploads() == {}
    assert scene.entry().multiparts == {}


def test_what_is_evicted_takes_its_parts_along(faulty_scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever removes an entry aborts its uploads; a store that cannot be reached is named in the log, and stops nobody."""
    scene = faulty_scene
    upload_id = _interrupt(scene)
    with scene.store.server.faults.injected(Fault(method="DELETE", drop="before", times=None)):
        assert abort_multiparts(scene.entry(), scene.run) == scene.entry().multiparts
    assert upload_id in caplog.text
    assert set(scene.uploads()) == {upload_id}
    assert abort_multiparts(scene.entry(), scene.run) == {}
    assert scene.uploads() == {}
    assert abort_multiparts(scene.entry(), scene.run) == {}


def test_a_push_goes_on_as_well(scene: Scene, kill: Kill, ask: Ask, tmp_path: Path) -> None:
    """`push` of a trainer's directory, killed in the middle of a large file: repeated, it sends what is missing."""
    source = tmp_path / "checkpoint-7"
    source.mkdir()
    for name, data in scene.files.items():
        (source / name).write_bytes(data)
    job = {"url": scene.run.url, "directory": str(source), "part_bytes": PART_BYTES}
    scene.relay.forget()
    assert kill("push", **job, kill={"sent_bytes": 5 * PART_BYTES})
    assert len(scene.stored_parts()) >= 1
    assert not kill("push", **job)
    assert scene.begun() == 1
    assert scene.parts_sent().total() <= PARTS + WORKERS
    assert scene.uploads() == {}
    assert ask("verify", scene.run.url)["checked"] == 1
