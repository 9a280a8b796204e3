"""Uploads that fail: lost answers, refusals, bugs, two processes at once; and in which order the queue goes."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from ckptmgr.backends.base import Backend
from ckptmgr.backends.registry import open_store
from ckptmgr.backends.wrap import WrappedBackend
from ckptmgr.core.errors import (
    AccessDeniedError,
    IntegrityError,
    ObjectExistsError,
    SourceChangedError,
    UploadError,
)
from ckptmgr.core.layout import Stem, upload_key
from ckptmgr.core.protocol import prune, replicate
from ckptmgr.run import locks
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import StoreDriver, drive
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.faulty import FaultyBackend, StoreFault, denied, transient
from ckptmgr.testing.stores import Store
from ckptmgr.transfer.drain import drain
from ckptmgr.transfer.uploader import Uploader

T = TypeVar("T")
LocalSave = Callable[..., Stem]

DEADLINE_S = 60.0


class Scene:
    """A run behind a faulty backend, its local tier, and an uploader that the test starts and ends."""

    def __init__(self, store: Store, new_tier: Callable[[RunDirectory], LocalTier], local_save: LocalSave) -> None:
        fs, root = open_store(f"{store.url}/run")
        self.store = store
        self.faulty = FaultyBackend(fs)
        self.run = RunDirectory.open_or_create(f"{store.url}/run", fs=self.faulty, root=root)
        self.tier = new_tier(self.run)
        self.settled: list[Stem] = []
        self.uploader = self.new_uploader(self.run)
        self._local_save = local_save

    def new_uploader(self, run: RunDirectory, **options: Any) -> Uploader:
        """An uploader of this tier that notes what it has settled."""
        options.setdefault("committed", self.settled.append)
        return Uploader(self.tier, run, stop=threading.Event(), **options)

    def save(self, *steps: int) -> list[Stem]:
        """Saves of two files each, queued, without telling the uploader."""
        return [self._local_save(self.tier, self.run, step) for step in steps]

    def manifests(self) -> list[str]:
        """The ids of all manifests in the store."""
        return [key.split("/")[2].removesuffix(".json") for key in self.store.keys("run/manifests/")]

    def state_of(self, stem: Stem) -> str:
        """The state in the journal."""
        return str(json.loads((self.tier.root / upload_key(stem)).read_text())["state"])


@pytest.fixture
def scene(store: Store, new_tier: Callable[[RunDirectory], LocalTier], local_save: LocalSave) -> Iterator[Scene]:
    made = Scene(store, new_tier, local_save)
    yield made
    made.faulty.clear()
    made.uploader.close(DEADLINE_S)


@pytest.fixture
def local_scene(
    make_store: Callable[[str], Store], new_tier: Callable[[RunDirectory], LocalTier], local_save: LocalSave
) -> Iterator[Scene]:
    """As `scene`, on local disk only: for what does not depend on the store."""
    made = Scene(make_store("local"), new_tier, local_save)
    yield made
    made.faulty.clear()
    made.uploader.close(DEADLINE_S)


def wait_until(happened: Callable[[], bool]) -> None:
    """Look until something that another thread does has happened."""
    pause, deadline = threading.Event(), time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline
        pause.wait(0.01)


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.event.set()


@pytest.fixture
def error_logged() -> Iterator[threading.Event]:
    """Set once an upload has logged an error."""
    told = _Told()
    logging.getLogger("ckptmgr.transfer").addHandler(told)
    yield told.event
    logging.getLogger("ckptmgr.transfer").removeHandler(told)


# --- the manifest's create (I3) -------------------------------------------------------------------------------------------


def test_a_lost_answer_to_the_manifest_is_settled_by_reading_it_back(scene: Scene) -> None:
    """Applied, the answer lost: success, exactly one manifest, and the data is not sent again."""
    (stem,) = scene.save(100)
    lost = scene.faulty.add(StoreFault(verb="pipe_file", path="*/manifests/*", when="after", error=transient))
    assert drain(scene.tier, scene.run).committed == (stem,)
    assert lost.hits == 1
    assert scene.manifests() == [str(stem)]
    assert len(scene.faulty.calls("put_file")) == 2
    assert scene.state_of(stem) == "uploaded"


@pytest.mark.parametrize(
    "fault",
    [
        Fault(method="PUT", key="*/manifests/*", drop="after"),
        Fault(method="PUT", key="*/manifests/*", drop="before"),
        Fault(method="PUT", key="*/manifests/*", status=503, code="SlowDown"),
        Fault(method="PUT", key="*/manifests/*", status=500, code="InternalError", times=2),
    ],
    ids=["applied and dropped", "dropped", "503", "500 twice"],
)
@pytest.mark.parametrize("kind", ["moto", "oss"])
def test_a_manifest_whose_request_failed_is_there_once(
    kind: str,
    fault: Fault,
    make_store: Callable[[str], Store],
    new_tier: Callable[[RunDirectory], LocalTier],
    local_save: LocalSave,
) -> None:
    """On the wire: the retried create may meet its own first try (412 of S3, 409 of OSS), which is success."""
    store = make_store(kind)
    run = RunDirectory.open_or_create(f"{store.url}/run")
    tier = new_tier(run)
    stem = local_save(tier, run, 100)
    store.server.log.clear()
    with store.server.faults.injected(fault) as active:
        assert drain(tier, run).committed == (stem,)
    assert active.hits == (fault.times or 0)
    puts = [request for request in store.server.log if request.method == "PUT" and "/manifests/" in request.key]
    last = 200 if fault.drop != "after" else 412 if kind == "moto" else 409
    assert [request.status for request in puts] == [fault.status] * (fault.times or 0) + [last]
    assert store.keys("run/manifests/") == [f"run/manifests/{stem}.json"]
    data = [request for request in store.server.log if request.method == "PUT" and "/checkpoints/" in request.key]
    assert len(data) == 2


def test_a_conflict_that_s3_reports_for_a_race_is_tried_again(
    make_store: Callable[[str], Store], new_tier: Callable[[RunDirectory], LocalTier], local_save: LocalSave
) -> None:
    """409 ConditionalRequestConflict: nothing is known about the key, so it is settled, not taken for somebody else's."""
    store = make_store("moto")
    run = RunDirectory.open_or_create(f"{store.url}/run")
    tier = new_tier(run)
    stem = local_save(tier, run, 100)
    fault = Fault(method="PUT", key="*/manifests/*", status=409, code="ConditionalRequestConflict")
    with store.server.faults.injected(fault) as active:
        assert drain(tier, run).committed == (stem,)
    assert active.hits == 1
    assert store.keys("run/manifests/") == [f"run/manifests/{stem}.json"]


def test_a_refusal_by_an_own_earlier_try_is_success(scene: Scene) -> None:
    """The manifest is there already, made by a try whose record was lost: refused, read back, own."""
    (stem,) = scene.save(100)
    manifest, _ = scene.tier.pending()[0]
    steps = replicate(manifest, new_nonce=lambda: "00000000")
    drive(steps, StoreDriver(scene.run, source=scene.tier.data_dir(stem)))
    before = scene.store.snapshot("run/")
    scene.faulty.log.clear()
    assert drain(scene.tier, scene.run).committed == (stem,)
    assert scene.store.snapshot("run/") == before
    create = [call for call in scene.faulty.calls("pipe_file") if "/manifests/" in call.path]
    assert len(create) == 1
    with pytest.raises(ObjectExistsError):
        scene.run.fs.pipe_file(create[0].path, b"another", mode="create")
    assert scene.store.snapshot("run/") == before


# --- failures that must stop nothing --------------------------------------------------------------------------------------


class Buggy(WrappedBackend):
    """A backend with a bug: the first `times` stores raise a TypeError."""

    def __init__(self, inner: Backend, times: int) -> None:
        super().__init__(inner)
        self.left = times
        self.hit = threading.Event()

    def _around(self, verb: str, path: str, call: Callable[[], T]) -> T:
        if verb == "put_file" and self.left:
            self.left -= 1
            self.hit.set()
            raise TypeError("unsupported operand")
        return call()


def test_the_uploader_survives_a_bug_in_a_backend(scene: Scene) -> None:
    """A TypeError out of a backend: kept, counted, and the next save goes up; the hit one at the end."""
    buggy = Buggy(scene.faulty, times=1)
    uploader = scene.new_uploader(RunDirectory.open(scene.run.url, fs=buggy, root=scene.run.root), pause_s=1000)
    (first,) = scene.save(100)
    uploader.notify()
    assert buggy.hit.wait(DEADLINE_S)
    (second,) = scene.save(200)
    uploader.notify()
    assert uploader.close(DEADLINE_S) == []
    assert sorted(scene.manifests()) == [str(first), str(second)]
    (error,) = uploader.poll_errors()
    assert isinstance(error, UploadError)
    assert isinstance(error.__cause__, TypeError)
    assert uploader.status().failures == 1
    assert uploader.status().committed == 2


def test_a_bug_is_in_the_journal_and_a_drain_goes_on_with_the_next(local_scene: Scene) -> None:
    """What failed unexpectedly is `failed` with its reason, and the other saves are uploaded."""
    older, newer = local_scene.save(100, 200)
    buggy = Buggy(local_scene.faulty, times=1)
    done = drain(local_scene.tier, RunDirectory.open(local_scene.run.url, fs=buggy, root=local_scene.run.root))
    assert (done.committed, done.pending) == ((older,), (newer,))
    assert local_scene.state_of(newer) == "failed"
    assert "unsupported operand" in (local_scene.tier.root / upload_key(newer)).read_text()
    assert drain(local_scene.tier, local_scene.run).committed == (newer,)


def test_the_uploader_survives_a_tier_that_cannot_be_read(local_scene: Scene, error_logged: threading.Event) -> None:
    """A link in the tier that leads to itself: kept and logged; once it is gone, a save goes up."""
    garbage = local_scene.tier.root / "manifests"
    if garbage.exists():
        garbage.rmdir()  # nothing is saved yet
    garbage.symlink_to(garbage.name)
    local_scene.uploader.notify()
    assert error_logged.wait(DEADLINE_S)
    assert len(local_scene.uploader.poll_errors()) == 1
    garbage.unlink()
    (stem,) = local_scene.save(100)
    local_scene.uploader.notify()
    assert local_scene.uploader.close(DEADLINE_S) == []
    assert local_scene.manifests() == [str(stem)]


@pytest.mark.usefixtures("in_order")
def test_refused_credentials_do_not_spin(scene: Scene) -> None:
    """AccessDenied for ever, five saves of two files: at most two requests per file, and for two saves at the end, nothing lost."""
    refused = scene.faulty.add(StoreFault(verb="put_file", times=None, error=denied))
    stems = []
    for step in range(100, 600, 100):
        stems += scene.save(step)
        scene.uploader.notify()
    assert refused.reached.wait(DEADLINE_S)
    assert scene.uploader.close(DEADLINE_S) == sorted(stems, reverse=True)
    assert refused.hits <= 2 * 2 * (len(stems) + 1)
    assert all(isinstance(error, AccessDeniedError) for error in scene.uploader.poll_errors())
    assert scene.manifests() == []
    assert scene.tier.run.stems() == stems
    asked = refused.hits
    assert drain(scene.tier, scene.run).pending == tuple(sorted(stems, reverse=True))
    assert refused.hits == asked + 2 * 2
    scene.faulty.clear()
    assert drain(scene.tier, scene.run).pending == ()
    assert scene.manifests() == [str(stem) for stem in stems]


def test_refused_saves_keep_nothing_else_from_going_up(local_scene: Scene) -> None:
    """Files of the two newest saves cannot be stored, whenever they are tried: the others go up, also those saved later."""
    *good, bad, worse = local_scene.save(100, 200, 300, 400)
    for stem in (bad, worse):
        local_scene.faulty.add(StoreFault(verb="put_file", path=f"*/{stem}/*", times=None, error=denied))
    assert drain(local_scene.tier, local_scene.run).committed == ()
    assert drain(local_scene.tier, local_scene.run).committed == tuple(reversed(good))
    good += local_scene.save(150, 160)
    local_scene.uploader.notify()
    assert local_scene.uploader.close(DEADLINE_S) == [worse, bad]
    assert sorted(local_scene.manifests()) == sorted(map(str, good))


def test_an_upload_that_failed_is_tried_again_after_the_pause_and_at_the_end(
    local_scene: Scene, error_logged: threading.Event
) -> None:
    """A failure that may pass: the queue waits, and `close` does not give up without a last try."""
    local_scene.faulty.add(StoreFault(verb="put_file", times=1, error=transient))
    (first,) = local_scene.save(100)
    local_scene.uploader.notify()
    assert error_logged.wait(DEADLINE_S)
    assert local_scene.uploader.close(DEADLINE_S) == []
    assert local_scene.manifests() == [str(first)]

    local_scene.faulty.add(StoreFault(verb="put_file", times=1, error=transient))
    done = threading.Event()
    again = local_scene.new_uploader(local_scene.run, pause_s=0.01, committed=lambda stem: done.set())
    (second,) = local_scene.save(200)
    again.notify()
    assert done.wait(DEADLINE_S)
    assert local_scene.manifests() == [str(first), str(second)]
    assert again.status().failures == 1
    again.close(DEADLINE_S)


def test_retention_that_fails_is_no_failure_of_the_upload(local_scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """No right to delete: both saves are committed, the error is kept, and nothing says that they are not there."""

    def clean_up(stem: Stem) -> None:
        raise AccessDeniedError("no right to delete")

    uploader = local_scene.new_uploader(local_scene.run, committed=clean_up, pause_s=1000)
    stems = local_scene.save(100, 200)
    uploader.notify()
    assert uploader.close(DEADLINE_S) == []
    assert local_scene.manifests() == [str(stem) for stem in stems]
    assert (uploader.status().failures, uploader.status().committed) == (0, 2)
    assert [str(error) for error in uploader.poll_errors()] == ["no right to delete"] * 2
    assert "is not in" not in caplog.text
    assert caplog.text.count("clean-up after step") == 2


def test_a_source_that_changed_is_never_committed(local_scene: Scene) -> None:
    """I10: a file of the local copy was overwritten: the upload fails by name, and is right once the file is."""
    (stem,) = local_scene.save(100)
    victim = local_scene.tier.data_dir(stem) / "b.bin"
    right = victim.read_bytes()
    victim.write_bytes(b"X" * len(right))
    done = drain(local_scene.tier, local_scene.run)
    assert done.pending == (stem,)
    assert isinstance(done.errors[stem], (SourceChangedError, IntegrityError))
    assert "b.bin" in str(done.errors[stem])
    assert local_scene.manifests() == []
    victim.write_bytes(right)
    assert drain(local_scene.tier, local_scene.run).committed == (stem,)


def test_a_source_that_changed_is_not_tried_again_and_again(local_scene: Scene) -> None:
    """One damaged save is one failure, however often others are uploaded; it stays pending, and the others are committed."""
    (spoilt,) = local_scene.save(100)
    (local_scene.tier.data_dir(spoilt) / "b.bin").write_bytes(b"X" * 4)
    uploader = local_scene.new_uploader(local_scene.run, pause_s=0.01)
    uploader.notify()
    wait_until(lambda: uploader.status().failures == 1)
    for number, step in enumerate((200, 300, 400), start=1):
        local_scene.save(step)
        uploader.notify()
        wait_until(lambda number=number: len(local_scene.manifests()) == number)  # type: ignore[misc]
    assert uploader.status().failures == 1
    assert uploader.close(DEADLINE_S) == [spoilt]
    assert uploader.status().failures == 1


# --- order, and several at once -------------------------------------------------------------------------------------------


def test_the_queue_goes_newest_first(scene: Scene) -> None:
    """While 100 is on its way 200, 300 and 400 are saved: then 400, 300, 200."""
    gate = scene.faulty.add(StoreFault(verb="put_file", hold=True))
    (first,) = scene.save(100)
    scene.uploader.notify()
    assert gate.reached.wait(DEADLINE_S)
    waiting = []
    for step in (200, 300, 400):
        waiting += scene.save(step)
        scene.uploader.notify()
    status = scene.uploader.status()
    assert status.uploading == first
    assert list(status.pending) == [*reversed(waiting), first]
    gate.release()
    assert scene.uploader.close(DEADLINE_S) == []
    commits = [call.path for call in scene.faulty.calls("pipe_file") if "/manifests/" in call.path]
    order = [first, *reversed(waiting)]
    assert [path.rsplit("/", 1)[1] for path in commits] == [f"{stem}.json" for stem in order]
    assert scene.settled == order


def test_two_processes_drain_one_tier_at_once(scene: Scene) -> None:
    """While one has a save in hand another one waits for it and says so; there is one upload."""
    gate = scene.faulty.add(StoreFault(verb="put_file", skip=1, hold=True))
    (stem,) = scene.save(100)
    scene.uploader.notify()
    assert gate.reached.wait(DEADLINE_S)
    command = [sys.executable, "-m", "ckptmgr.cli.main", "drain", str(scene.tier.root), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as other:
        assert other.stderr is not None
        assert "is being uploaded by another process: waiting for it" in other.stderr.readline()
        assert scene.manifests() == []
        gate.release()
        said, _ = other.communicate(timeout=DEADLINE_S)
    assert (other.returncode, json.loads(said)["pending"]) == (0, [])
    assert scene.uploader.close(DEADLINE_S) == []
    assert len(scene.faulty.calls("put_file")) == 2
    assert scene.manifests() == [str(stem)]
    assert scene.state_of(stem) == "uploaded"


def test_a_save_that_another_process_had_in_hand_is_looked_at_again(local_scene: Scene) -> None:
    """The other process dies without a commit: the uploader takes the save up by itself."""
    (stem,) = local_scene.save(100)
    done = threading.Event()
    uploader = local_scene.new_uploader(local_scene.run, pause_s=0.01, committed=lambda stem: done.set())
    with locks.exclusive(local_scene.run.uuid, stem, "upload") as free:
        assert free
        (newer,) = local_scene.save(200)
        uploader.notify()
        assert done.wait(DEADLINE_S)
        # The newer one is settled, and nothing else can be while the lock is held.
        done.clear()
    assert done.wait(DEADLINE_S)
    assert uploader.close(DEADLINE_S) == []
    assert local_scene.manifests() == [str(stem), str(newer)]


def test_a_save_that_was_pruned_before_its_upload_ended_is_not_called_committed(local_scene: Scene) -> None:
    """A late retry finds the closing record: dropped, counted as neither committed nor pending, and stays closed."""
    (stem,) = local_scene.save(100)
    local_scene.faulty.add(StoreFault(verb="pipe_file", path="*/manifests/*", when="after", error=denied))
    assert drain(local_scene.tier, local_scene.run).pending == (stem,)
    assert drive(prune(stem, closed_at=None), StoreDriver(local_scene.run))
    done = drain(local_scene.tier, local_scene.run)
    assert (done.committed, done.pending) == ((), ())
    assert local_scene.state_of(stem) == "dropped"
    assert local_scene.store.keys("run/checkpoints/") == []
    assert json.loads(local_scene.store.get(f"run/manifests/{stem}.json"))["closed"] == "pruned"
