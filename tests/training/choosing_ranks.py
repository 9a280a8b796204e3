"""What two ranks do in the tests of `test_choosing.py`: each function is one scenario, called on both, with a directory of its own."""

from __future__ import annotations

import os
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

from ckptmgr.backends.base import Backend
from ckptmgr.backends.wrap import WrappedBackend
from ckptmgr.callbacks import SaveModelCallback
from ckptmgr.core.conditions import Conditions
from ckptmgr.core.errors import ConflictError
from ckptmgr.core.retention import KeepLast
from ckptmgr.core.selectors import parse_selector
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.resume import resume
from ckptmgr.testing.faulty import FaultyBackend, StoreFault, denied
from ckptmgr.trainer import Trainer, TrainingArguments
from ckptmgr.training import agreeing, choosing
from ckptmgr.training import state as training_state
from ckptmgr.training.manager import CheckpointManager
from ckptmgr.training.ranks import any_rank, rank
from ckptmgr.training.resuming import newest

T = TypeVar("T")
OFFSETS = 20
Usage = namedtuple("Usage", "total used free")


def run(root: str) -> dict[str, Any]:
    """Every scenario; what this rank saw in each."""
    found = {}
    for scenario in (
        commits_meanwhile,
        new_run,
        fails_on_rank_0,
        foreign_errors,
        fails_on_rank_1,
        one_path,
        another_machine,
        another_machine_is_full,
        another_machine_waits_for_uploads,
        another_machine_and_no_upload,
        only_on_this_machine,
        rewound_on_each_machine,
        takes_long,
        restarted,
        told_differently,
        trainer_fails_on_rank_1,
        callback_fails_on_rank_0,
    ):
        folder = Path(root, scenario.__name__)
        folder.mkdir(exist_ok=True)
        dist.barrier()
        found[scenario.__name__] = scenario(folder)
    return found


# --- what scenarios share -----------------------------------------------------------------------------------------------------


class Bits:
    """A piece whose bits tell which step it is of."""

    def __init__(self, step: int = 0) -> None:
        torch.manual_seed(step)
        self.weights = torch.rand(64)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]

    @property
    def hex(self) -> str:
        return self.weights.numpy().tobytes().hex()


class Watched(WrappedBackend):
    """Calls `after` with the number of each call of the store, when it is done."""

    def __init__(self, inner: Backend, after: Callable[[int], None]) -> None:
        super().__init__(inner)
        self._after, self._calls = after, 0

    def _around(self, verb: str, path: str, call: Callable[[], T]) -> T:
        result = call()
        self._calls += 1
        self._after(self._calls)
        return result


def manager(folder: Path, tier: str = "tier", **options: Any) -> CheckpointManager:
    return CheckpointManager(folder / "store" / "run", local_dir=folder / tier, transfer="thread", **options)


def save(folder: Path, *steps: int) -> None:
    """Rank 0 saves these steps in a new run, and uploads them."""
    if rank() == 0:
        saving = manager(folder, keep_local=KeepLast(9), on_save_error="raise")
        for step in steps:
            saving.save(step, {"bits": Bits(step)}, wait=True)
        report = saving.close()
        assert (report.committed, report.exit_code) == (len(steps), 0), report
    dist.barrier()


def alone(action: Callable[[], T]) -> T:
    """Have rank 0 do what is a collective otherwise, for itself."""
    with (
        mock.patch("ckptmgr.training.choosing.can_agree", return_value=False),
        mock.patch("ckptmgr.training.agreeing.can_agree", return_value=False),
    ):
        return action()


def error_of(action: Callable[[], object]) -> list[str]:
    """The class and the message of what `action` raises."""
    try:
        got = action()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return [type(error).__name__, str(error)]
    return ["nothing was raised", repr(got)]


def restored(manager: CheckpointManager, selector: str = "latest") -> dict[str, Any]:
    bits = Bits()
    found = manager.restore({"bits": bits}, selector)
    return {"bits": bits.hex, "step": found and found.step, "skipped": found and [list(each) for each in found.skipped]}


class OnAnotherMachine:
    """Rank 1 with another host name, and without a sight of what rank 0 has put on disk."""

    def __init__(self, folder: Path) -> None:
        is_here = choosing._File.is_here
        mine = os.fspath(folder / f"tier-{rank()}")
        self._patches: list[Any] = [
            mock.patch.object(choosing, "host_name", return_value=f"host-{rank()}"),
            mock.patch.object(choosing._File, "is_here", lambda file: mine in file.path and is_here(file)),
        ]

    def __enter__(self) -> None:
        for patch in self._patches:
            patch.start()

    def __exit__(self, *error: object) -> None:
        for patch in self._patches:
            patch.stop()


# --- scenarios ----------------------------------------------------------------------------------------------------------------


def commits_meanwhile(folder: Path) -> list[dict[str, Any]]:
    """Step 300 is committed after rank 0's first, second, … request; rank 1, if it should look at the store, only sees it committed."""
    save(folder, 100, 200, 300)
    events = dist.FileStore(os.fspath(folder / "events"), 2)  # type: ignore[attr-defined, unused-ignore]
    events.set_timeout(timedelta(seconds=30))
    manifests = folder / "store" / "run" / "manifests"
    (manifest,) = manifests.glob("*-000000000300-*")
    aside = folder / manifest.name
    # How many requests a choice takes, on rank 0, once manifests are cached: the commits are spread over them.
    restored(manager(folder, "caching"))
    requests = [0]
    restored(manager(folder, "counted", wrap_backend=lambda inner: Watched(inner, requests.append)))
    found, choose = [], choosing.Chooser._find
    for offset in range(OFFSETS):
        dist.barrier()
        if rank() == 0:
            manifest.rename(aside)
        dist.barrier()

        def after(calls: int, offset: int = offset) -> None:
            if rank() == 1:
                events.wait([f"{offset}"])
            elif calls == 1 + offset * requests[-1] // OFFSETS:
                commit(offset)

        def commit(offset: int) -> None:
            if aside.exists():
                aside.rename(manifest)
                events.set(f"{offset}", "committed")

        def find(*arguments: Any, offset: int = offset, **options: Any) -> Any:
            try:
                return choose(*arguments, **options)
            finally:
                if rank() == 0:  # a choice may take fewer requests than another
                    commit(offset)

        def wrap(inner: Backend, after: Callable[[int], None] = after) -> Backend:
            return Watched(inner, after)

        with mock.patch.object(choosing.Chooser, "_find", find):
            found.append(restored(manager(folder, f"fresh-{offset}", wrap_backend=wrap)))
    return found


def new_run(folder: Path) -> list[Any]:
    """Nothing is there, for nobody; then a first save of rank 0's."""
    with manager(folder, f"tier-{rank()}") as fresh:
        found = [fresh.restore({"bits": Bits()}), fresh.resume_path()]
        fresh.save(1, {"bits": Bits(1)})
    return [*found, (folder / "tier-1").exists()]


def fails_on_rank_0(folder: Path) -> dict[str, Any]:
    """In every place where it may fail before, and after, the other one waits for it."""
    save(folder, 100)

    def refusing(inner: Backend) -> Backend:
        backend = FaultyBackend(inner)
        backend.add(StoreFault(error=denied, times=None, path="*manifests*"))
        return backend

    def begun() -> None:
        if rank() == 0:
            busy = manager(folder)
            alone(lambda: busy.restore({"bits": Bits()}))
            busy.begin()
            try:
                busy.restore({"bits": Bits()})
            finally:
                busy.close()
        else:
            manager(folder).restore({"bits": Bits()})

    damaged = folder / "damaged"
    if rank() == 0:
        shutil.copytree(folder / "store", damaged / "store")
        for path in (damaged / "store" / "run" / "checkpoints").rglob("bits*"):
            path.write_bytes(b"x" * path.stat().st_size)
    dist.barrier()
    bits = Bits()
    wrong: Any = [] if rank() == 0 else {"bits": bits}
    return {
        "store": error_of(lambda: manager(folder, "new", wrap_backend=refusing).restore({"bits": bits})),
        "path": error_of(lambda: manager(folder, "new", wrap_backend=refusing).resume_path()),
        "selector": error_of(lambda: manager(folder).restore({"bits": bits}, "whatever" if rank() == 0 else "100")),
        "not found": error_of(lambda: manager(folder).restore({"bits": bits}, "150")),
        "damaged": error_of(lambda: manager(damaged).restore({"bits": bits})),
        "state": error_of(lambda: manager(folder).restore(wrong)),
        "begun": error_of(begun),
        "untouched": bits.hex == Bits().hex,
    }


class Unfit(Bits):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("it does not fit")


class Foreign(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def foreign_errors(folder: Path) -> dict[str, Any]:
    """Exceptions of the user's; and different ones on both."""

    def fail(*errors: Exception | None) -> Callable[[], None]:
        def part() -> None:
            error = errors[rank()]
            if error is not None:
                raise error

        return part

    return {
        "one": error_of(lambda: agreeing.with_all_ranks(fail(None, KeyError("key")))),
        "unpicklable": error_of(lambda: agreeing.with_all_ranks(fail(None, Foreign("two", "words")))),
        "aside": error_of(lambda: agreeing.on_all_ranks(fail(ValueError("value"), None), aside=True)),
        "both": error_of(lambda: agreeing.with_all_ranks(fail(ConflictError("zero"), ConflictError("one")))),
        "afterwards": agreeing.on_all_ranks(rank),
    }


def fails_on_rank_1(folder: Path) -> dict[str, Any]:
    """It is told otherwise, or cannot load what rank 0 has loaded."""
    save(folder, 100)
    drifting = manager(folder, refuse_drift=["batch_size"])
    described = manager(folder, "described")
    described.describe(Conditions(batch_size=8))
    if rank() == 0:
        alone(lambda: described.restore({"bits": Bits()}))
        described.save(200, {"bits": Bits(200)})
        described.close()
    dist.barrier()
    drifting.describe(Conditions(batch_size=8 + rank()))
    bits = Bits() if rank() == 0 else Unfit()
    going_on = manager(folder, "third")
    found = {
        "drift": error_of(lambda: drifting.restore({"bits": Bits()})),
        "load": error_of(lambda: going_on.restore({"bits": bits})),
        # A program that goes on all the same starts from scratch.
        "restored": going_on.is_restored,
    }
    # None of it is left where the next one looks.
    return {**found, "again": restored(going_on)["step"]}


def one_path(folder: Path) -> dict[str, Any]:
    """Both load the same directory, which stays."""
    save(folder, 100)
    both = manager(folder)
    path = both.resume_path()
    assert path is not None
    found = {
        "path": os.fspath(path),
        "files": sorted(each.name for each in path.iterdir()),
        "restored": both.is_restored,
    }
    dist.barrier()
    restored(manager(folder, "other"))
    dist.barrier()
    left = folder / "other" / "resumed"
    return {**found, "left": sorted(each.name for each in left.iterdir()) if left.exists() else []}


def another_machine(folder: Path) -> dict[str, Any]:
    """Rank 1 has no sight of rank 0's disk."""
    save(folder, 100, 200)
    with OnAnotherMachine(folder):
        both = manager(folder, f"tier-{rank()}")
        path = both.resume_path()
        assert path is not None
        return {
            **restored(manager(folder, f"tier-{rank()}")),
            "path": os.fspath(path),
            "how": both._restoring.parent.how,
        }


def another_machine_is_full(folder: Path) -> dict[str, Any]:
    """No room for the checkpoint on rank 1's disk."""
    save(folder, 100)
    bits = Bits()
    full = mock.patch.object(shutil, "disk_usage", return_value=Usage(10, 10, 0))
    with OnAnotherMachine(folder):
        if rank() == 1:
            full.start()
        found = error_of(lambda: manager(folder, f"tier-{rank()}").restore({"bits": bits}))
        if rank() == 1:
            full.stop()
        dist.barrier()
        again = restored(manager(folder, f"tier-{rank()}"))
    return {"error": found, "untouched": bits.hex == Bits().hex, "again": again}


def waiting_on_rank_0(folder: Path, *stored: int, waiting: int) -> None:
    """A run with `stored` in the store and `waiting` only in rank 0's local tier, `tier-0`."""

    def refusing(inner: Backend) -> Backend:
        backend = FaultyBackend(inner)
        backend.add(StoreFault(error=denied, times=None, path=f"*{waiting:012d}*"))
        return backend

    if rank() == 0:
        with manager(folder, "tier-0", wrap_backend=refusing, keep_local=KeepLast(9)) as saving:
            for step in (*stored, waiting):
                saving.save(step, {"bits": Bits(step)}, wait=True)
    dist.barrier()


def another_machine_waits_for_uploads(folder: Path) -> dict[str, Any]:
    """The newest is only on rank 0's disk: it is uploaded first."""
    waiting_on_rank_0(folder, 100, waiting=200)
    with OnAnotherMachine(folder):
        return restored(manager(folder, f"tier-{rank()}"))


def another_machine_and_no_upload(folder: Path) -> dict[str, Any]:
    """The newest is only on rank 0's disk, and the store does not take it."""
    waiting_on_rank_0(folder, 100, waiting=200)

    def refusing(inner: Backend) -> Backend:
        backend = FaultyBackend(inner)
        backend.add(StoreFault(error=denied, times=None, verb="put_file"))
        backend.add(StoreFault(error=denied, times=None, verb="pipe_file", path="*000000000200*"))
        return backend

    with OnAnotherMachine(folder):
        found = restored(manager(folder, f"tier-{rank()}", wrap_backend=refusing))
        return {
            **found,
            "named": error_of(lambda: manager(folder, f"tier-{rank()}", wrap_backend=refusing).restore({}, "200")),
        }


def only_on_this_machine(folder: Path) -> dict[str, Any]:
    """Nothing but one save on rank 0's disk: no start from scratch, on nobody's part."""
    waiting_on_rank_0(folder, waiting=200)

    def refusing(inner: Backend) -> Backend:
        backend = FaultyBackend(inner)
        backend.add(StoreFault(error=denied, times=None, path="*000000000200*"))
        return backend

    def attempt(**options: Any) -> list[str]:
        return error_of(lambda: manager(folder, f"tier-{rank()}", wrap_backend=refusing, **options).resume_path())

    with OnAnotherMachine(folder):
        found = {"refused": attempt(), "new lineage": attempt(on_existing="new-lineage")}
    # One machine can.
    return {**found, "here": restored(manager(folder, "tier-0"))["step"]}


def rewound_on_each_machine(folder: Path) -> dict[str, Any]:
    """`ckptmgr resume RUN 100 -- COMMAND` on both: what it has put there is not fetched again."""
    save(folder, 100, 200)
    place = folder / f"tier-{rank()}-resumed" / "one"
    resumed = resume(RunDirectory.open(os.fspath(folder / "store" / "run")), parse_selector("100"), to=place)
    environment = {"CKPTMGR_RESUME_FROM": os.fspath(resumed.path), "CKPTMGR_RESUME_ATTEMPT": str(resumed.attempt)}
    with OnAnotherMachine(folder), mock.patch.dict(os.environ, environment):
        both = manager(folder, f"tier-{rank()}")
        found = both.resume_path()
        return {"own": found == place, "how": both._restoring.parent.how}


def takes_long(folder: Path) -> dict[str, Any]:
    """Rank 0's fetch takes longer than three rounds."""
    save(folder, 100)
    rounds: list[bool] = []
    enough = threading.Event()
    ask = any_rank

    def counted(flag: bool) -> bool:
        rounds.append(flag)
        if len(rounds) >= 8:
            enough.set()
        return ask(flag)

    def wrap(inner: Backend) -> Backend:
        return Watched(inner, lambda calls: None if enough.wait(30) else os.abort())

    with mock.patch.object(agreeing, "any_rank", counted), mock.patch.object(agreeing, "_ROUND_S", 0.01):
        found = restored(manager(folder, "new", wrap_backend=wrap))
    return {**found, "rounds": len(rounds)}


def restarted(folder: Path) -> dict[str, Any]:
    """COMMAND of `ckptmgr resume RUN -- COMMAND` starts its ranks again, after a save."""
    save(folder, 100)
    place = folder / "resumed"
    if rank() == 0:
        resume(RunDirectory.open(os.fspath(folder / "store" / "run")), parse_selector("latest"), to=place)
    dist.barrier()
    with mock.patch.dict(os.environ, {"CKPTMGR_RESUME_FROM": os.fspath(place)}):
        first = newest(place, manager(folder))
        if rank() == 0:
            following = manager(folder)
            alone(lambda: following.restore({"bits": Bits()}))
            following.save(200, {"bits": Bits(200)})
            following.close()
        dist.barrier()
        second = newest(place, manager(folder))
        by_one = newest(place, manager(folder) if rank() == 0 else None)
    assert second is not None
    bits = Bits()
    training_state.restore(second, {"bits": bits})
    return {
        "first": first == place,
        "second": os.fspath(second),
        "bits": bits.hex,
        "nobody": newest(place, None) == place,
        "by one": by_one == place,
        "nothing": newest(None, manager(folder)),
    }


def told_differently(folder: Path) -> dict[str, Any]:
    """Each rank is given a path of its own by its machine's start script."""
    save(folder, 100, 200)
    store = RunDirectory.open(os.fspath(folder / "store" / "run"))
    places = {step: folder / f"{step}-{rank()}" for step in (100, 200)}
    for step, place in places.items():
        resume(store, parse_selector(f"{step}"), to=place)
    other = places[100 if rank() == 0 else 200]
    return {
        "same": newest(places[100], None) == places[100],
        "different": error_of(lambda: newest(other, manager(folder, f"tier-{rank()}"))),
        "one has none": error_of(lambda: newest(other if rank() == 0 else None, None)),
    }


def a_trainer(steps: list[int], *callbacks: Any) -> Trainer:
    """Notes a step for each batch."""

    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> Any:
        steps.append(1)
        return model(batch).square().mean()

    model = torch.nn.Linear(2, 1)
    return Trainer(
        model,
        TrainingArguments(max_steps=2, logging_steps=None),
        train_dataloader=[torch.ones(1, 2)] * 2,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=loss_fn,
        callbacks=callbacks,
    )


def trainer_fails_on_rank_1(folder: Path) -> dict[str, Any]:
    """Its copy is damaged: no rank makes a step."""
    steps: list[int] = []
    if rank() == 0:
        with manager(folder) as saving:
            saving.save(1, a_trainer(steps).pieces())
    dist.barrier()
    place = folder / f"place-{rank()}"
    resumed = resume(RunDirectory.open(os.fspath(folder / "store" / "run")), parse_selector("latest"), to=place)
    if rank() == 1:
        (resumed.directory / "trainer.json").write_bytes(b"{")
    return {"error": error_of(lambda: a_trainer(steps).train(place)), "steps": len(steps)}


def callback_fails_on_rank_0(folder: Path) -> dict[str, Any]:
    """It cannot begin; or ranks have begun at different steps, as far as another trainer tells."""
    save(folder, 1)
    steps: list[int] = []
    saving = SaveModelCallback(manager(folder, f"tier-{rank()}"))
    found = {"begin": error_of(lambda: a_trainer(steps, saving).train())}
    apart = a_trainer(steps, SaveModelCallback(manager(folder, f"tier-{rank()}")))
    apart.state.global_step = rank()
    return {**found, "apart": error_of(apart.train), "steps": len(steps)}
