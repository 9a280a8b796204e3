"""SIGKILL, and errors, at every system call that a local commit, an upload, and the removal of a local copy make.

strace delivers them: `traced.py` forks one process for each, strace attaches to it, and the n-th call of a name is hit before it takes effect. Which
calls there are comes from a run that nothing happens to. Without strace, or where tracing is refused, these tests are skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckptmgr.backends.atomic import find_temps, is_temp
from ckptmgr.core import layout
from ckptmgr.core.layout import PARTIAL, Stem
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.outcomes import files_in
from ckptmgr.transfer.drain import drain

if TYPE_CHECKING:
    from tests.faults.conftest import Call, Ended, Tracer

LocalSave = Callable[..., Stem]

FILES = {"model.bin": "weights " * 1000, "sub/optimizer.bin": "momenta " * 9, "state.json": "{}"}
BYTES = {name: text.encode() for name, text in FILES.items()}
NEW = Stem(1, 200, 2, "0123abcd")
MOST_CALLS = 1000


class Scene:
    """A run in a local store, its local tier with one earlier save, and the state of both as it was: `again` brings it back."""

    def __init__(self, folder: Path, local_save: LocalSave, *, earlier: int) -> None:
        self._now, self._then = folder / "now", folder / "then"
        self.url, self.root = (self._now / "store" / "run").as_uri(), self._now / "disk"
        self.locks = self._now / "locks"
        self.locks.mkdir(parents=True)
        run = RunDirectory.open_or_create(self.url)
        tier = LocalTier.open_or_create(self.root, uuid=run.uuid)
        self.truth = {local_save(tier, run, 100 + n, BYTES): BYTES for n in range(earlier)}
        self.keep()

    def keep(self) -> None:
        """What there is now is what `again` brings back."""
        shutil.rmtree(self._then, ignore_errors=True)
        shutil.copytree(self._now, self._then)

    def again(self) -> None:
        shutil.rmtree(self._now)
        shutil.copytree(self._then, self._now)

    @property
    def tier(self) -> LocalTier:
        return LocalTier.open(self.root)

    @property
    def run(self) -> RunDirectory:
        return RunDirectory.open(self.url)

    def job(self, do: str, **details: Any) -> dict[str, Any]:
        """A job for `traced.py` in this scene."""
        return {"do": do, "tier": str(self.root), "url": self.url, "locks": str(self.locks), **details}

    def commit(self) -> dict[str, Any]:
        """The job that commits `NEW`."""
        return self.job("commit", stem=str(NEW), files=FILES)

    def local(self) -> set[Stem]:
        """The checkpoints of the tier; each is whole, and each is in the queue or confirmed in the store."""
        tier = self.tier
        found = self.whole(tier.run)
        waiting = {manifest.stem for manifest, _ in tier.pending(self.url)}
        assert found <= waiting | tier.uploaded()
        assert tier.uploaded() <= self.remote()
        return found

    def remote(self) -> set[Stem]:
        """The checkpoints of the store; each is whole."""
        return self.whole(self.run)

    def whole(self, run: RunDirectory) -> set[Stem]:
        """The checkpoints of a run directory, each of which must have all its bytes."""
        history = run.history()
        assert history.broken == {}
        for stem in history.manifests:
            found = files_in(Path(run.path(layout.data_prefix(stem))))
            # What a killed upload was writing stays beside it in a local store until gc; no listing of ours shows it.
            found = {name: data for name, data in found.items() if not is_temp(name.rsplit("/", 1)[-1])}
            assert found == (self.truth | {NEW: BYTES})[stem], "torn"
        return set(history.manifests)

    def cleaned(self, *, named: Sequence[Stem] = ()) -> None:
        """The next start: what is there is there with its journal, and nothing else is, but for the journals of those `named`."""
        self.tier.clean()
        kept = self.local()
        # What a process notes of itself lies beside these.
        kinds = (layout.CHECKPOINTS, layout.MANIFESTS, layout.UPLOADS)
        files = {name for name in files_in(self.root) if name.partition("/")[0] in kinds}
        assert files == {
            *(layout.manifest_key(stem) for stem in kept),
            *(layout.upload_key(stem) for stem in [*kept, *named]),
            *(f"{layout.data_prefix(stem).rstrip('/')}/{name}" for stem in kept for name in FILES),
        }
        assert {path.name for path in (self.root / layout.CHECKPOINTS).glob("*")} == {str(stem) for stem in kept}
        assert list(find_temps(self.root)) == []


@pytest.fixture
def scene(local_save: LocalSave, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Scene]:
    """One earlier save, unless the test asks for another number of them. In memory where there is room, for it is made anew a thousand times."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ckptmgr-scene-", dir=memory) as folder:
        scene = Scene(Path(folder), local_save, earlier=getattr(request, "param", 1))
        monkeypatch.setenv("CKPTMGR_LOCK_DIR", str(scene.locks))
        yield scene


def killed_at_each_call(tracer: Tracer, scene: Scene, job: dict[str, Any]) -> Iterator[Ended]:
    """The job killed at its 1st, 2nd, … system call, each time from the same beginning; the last one is not killed at all."""
    whole = tracer(job)
    assert whole.said == ["acknowledged"]
    assert whole.calls[-1].line.startswith("access"), "the end of the window was not seen"
    assert len(whole.calls) < MOST_CALLS
    for call in whole.calls:
        scene.again()
        ended = tracer(job, f"-etrace={call.name}", f"-einject={call.name}:signal=SIGKILL:when={call.nth}")
        assert ended.killed, f"not reached: {call}"
        assert ended.said == []
        yield ended
    scene.again()
    yield tracer(job)


# --- SIGKILL ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scene",
    [pytest.param(0, id="first", marks=pytest.mark.slow), pytest.param(1, id="second")],
    indirect=True,
)
def test_a_save_killed_at_every_system_call_is_there_whole_or_not_at_all(tracer: Tracer, scene: Scene) -> None:
    """Also the earlier save is untouched, what was acknowledged is there, and the next start leaves nothing of the rest."""
    outcomes = []
    for ended in killed_at_each_call(tracer, scene, scene.commit()):
        there = scene.local()
        assert there - {NEW} == set(scene.truth)
        scene.cleaned()
        assert scene.local() == there
        outcomes.append((ended.said == ["acknowledged"], NEW in there))
    assert outcomes[0] == (False, False)
    assert outcomes[-1] == (True, True)
    # Once it is there a later kill does not take it away.
    assert outcomes == sorted(outcomes, key=lambda outcome: outcome[1])
    assert (False, True) in outcomes


def test_an_upload_killed_at_every_system_call_ends_as_one_commit(tracer: Tracer, scene: Scene) -> None:
    """From pending to uploading, confirmed and uploaded: the local copy stays, the store never shows a torn one, the next drain ends it."""
    (stem,) = scene.truth
    seen = []
    for ended in killed_at_each_call(tracer, scene, scene.job("upload")):
        assert scene.local() == {stem}
        entry = scene.tier.journal.read(stem)
        assert entry is not None
        seen.append(f"{entry.state}, {len(entry.confirmed)} confirmed, {'' if scene.remote() else 'not '}committed")
        if ended.said == ["acknowledged"]:
            assert entry.state == "uploaded"
        done = drain(scene.tier, scene.run)
        assert (done.pending, done.errors) == ((), {})
        assert scene.local() == scene.remote() == {stem} == scene.tier.uploaded()
        scene.cleaned()
    # Every transition was seen, each only after the one before it.
    assert list(dict.fromkeys(seen)) == [
        "pending, 0 confirmed, not committed",
        *(f"uploading, {n} confirmed, not committed" for n in range(len(FILES) + 1)),
        f"uploading, {len(FILES)} confirmed, committed",
        f"uploaded, {len(FILES)} confirmed, committed",
    ]
    assert seen == sorted(seen, key=list(dict.fromkeys(seen)).index)


@pytest.mark.parametrize("scene", [2], indirect=True)
def test_a_removal_killed_at_every_system_call_leaves_it_whole_or_gone(tracer: Tracer, scene: Scene) -> None:
    """Never a manifest without its data, and never the only copy: the store has it, and the other one stays."""
    victim, other = sorted(scene.truth)
    drain(scene.tier, scene.run)
    scene.keep()
    outcomes = []
    for ended in killed_at_each_call(tracer, scene, scene.job("remove", stem=str(victim))):
        there = scene.local()
        assert there | {victim} == {victim, other}
        assert scene.remote() == {victim, other}
        scene.cleaned()
        assert scene.local() == there
        outcomes.append((ended.said == ["acknowledged"], victim in there))
    assert outcomes[0] == (False, True)
    assert outcomes[-1] == (True, False)
    assert outcomes == sorted(outcomes, key=lambda outcome: not outcome[1])


@pytest.mark.parametrize("scene", [3], indirect=True)
def test_giving_up_a_save_killed_at_every_system_call_names_it_or_keeps_it(tracer: Tracer, scene: Scene) -> None:
    """The oldest of three makes room (I6): until the next start it is whole or named as given up; if it is whole, it then waits again."""
    victim, *others = sorted(scene.truth)
    size = sum(map(len, BYTES.values()))
    outcomes = []
    for ended in killed_at_each_call(tracer, scene, scene.job("evict", max_bytes=3 * size, incoming_bytes=size)):
        there = scene.whole(scene.tier.run)
        assert there | {victim} == {victim, *others}
        named = scene.tier.evicted()
        assert [entry.stem for entry in named] == ([] if victim in there else [victim])
        assert all(entry.error and entry.size_bytes == size for entry in named)
        scene.cleaned(named=[entry.stem for entry in named])
        assert {manifest.stem for manifest, _ in scene.tier.pending(scene.url)} == there
        outcomes.append((ended.said == ["acknowledged"], victim in there))
    assert outcomes[0] == (False, True)
    assert outcomes[-1] == (True, False)
    assert outcomes == sorted(outcomes, key=lambda outcome: not outcome[1])


# --- errors -----------------------------------------------------------------------------------------------------------------


def hit_by(tracer: Tracer, scene: Scene, job: dict[str, Any], error: str, *, lasting: bool) -> Iterator[Ended]:
    """The job with `error` as the answer to its 1st, 2nd, … change of the disk (and to all of that name that follow, if `lasting`)."""
    whole = tracer(job)
    assert whole.said == ["acknowledged"]
    for call in [call for call in whole.calls if call.is_change]:
        if lasting and call.name == "openat":
            continue  # it would hit what only reads, and the clean-up
        scene.again()
        when = f"{call.nth}{'+' if lasting else ''}"
        ended = tracer(job, f"-einject={call.name}:error={error}:when={when}")
        assert any("(INJECTED)" in found.line for found in ended.calls), f"not reached: {call}"
        yield ended


ERRORS = pytest.mark.parametrize(
    ("error", "lasting"),
    [
        pytest.param("ENOSPC", True, id="ENOSPC-for-good"),
        pytest.param("EIO", False, id="EIO-once"),
        pytest.param("ENOSPC", False, id="ENOSPC-once", marks=pytest.mark.slow),
        pytest.param("EIO", True, id="EIO-for-good", marks=pytest.mark.slow),
    ],
)


@ERRORS
def test_a_save_that_meets_an_error_fails_loudly_and_leaves_nothing(
    tracer: Tracer, scene: Scene, error: str, lasting: bool
) -> None:
    """A full disk, a broken one (rows 6 and 7): an error that says so, no checkpoint, the earlier one whole, and no fsync tried again."""
    name = {"ENOSPC": "DiskFullError", "EIO": "PermanentBackendError"}[error]
    for ended in hit_by(tracer, scene, scene.commit(), error, lasting=lasting):
        verdict, problem = ended.said
        assert verdict == "failed"
        assert problem.startswith(f"{name}: cannot "), problem
        assert scene.local() == set(scene.truth)
        assert synced_again(ended.calls) == []
        left = [path.name for path in (scene.root / layout.CHECKPOINTS).iterdir() if path.name.endswith(PARTIAL)]
        assert left == []
        scene.cleaned()


def synced_again(calls: Sequence[Call]) -> list[str]:
    """Files of a checkpoint whose fsync failed and was tried again: the kernel may have dropped the pages, and the second try succeeds."""
    synced = [
        (match[1], "(INJECTED)" in call.line)
        for call in calls
        if (match := re.match(r"f\w*sync\(\d+<(.*)>", call.line))
    ]
    return [
        path
        for n, (path, failed) in enumerate(synced)
        if failed and not Path(path).is_dir() and path in [later for later, _ in synced[n + 1 :]]
    ]


@ERRORS
def test_an_upload_that_meets_an_error_stays_pending(tracer: Tracer, scene: Scene, error: str, lasting: bool) -> None:
    """Whichever disk is full or broken, the tier's or the store's: the save is not torn, not lost, and goes up when it can."""
    (stem,) = scene.truth
    failed = 0
    for ended in hit_by(tracer, scene, scene.job("upload"), error, lasting=lasting):
        assert ended.said[0] == "failed"
        failed += 1
        assert scene.local() == {stem}
        done = drain(scene.tier, scene.run)
        assert (done.pending, done.errors) == ((), {})
        assert scene.local() == scene.remote() == {stem}
        scene.cleaned()
    assert failed
