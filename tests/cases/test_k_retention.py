"""Cases of retention and save policies: what is saved when, and what stays."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr.backends.base import Backend
from ckptmgr.callbacks.base import Callback
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.layout import Stem
from ckptmgr.core.policies import Best, Evaluated, EveryNEpochs, EveryNSteps, StepEnded
from ckptmgr.core.retention import KeepBest, KeepLast
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.push import push
from ckptmgr.testing.faulty import FaultyBackend
from ckptmgr.testing.stores import Store
from ckptmgr.trainer import Trainer, TrainingArguments
from ckptmgr.training.manager import CheckpointManager
from ckptmgr.transfer.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("uploads_in_a_thread")

Cli = Callable[..., subprocess.CompletedProcess[str]]
Tree = Callable[[str, Mapping[str, bytes]], Path]
Ask = Callable[..., Any]

DEADLINE_S = 60.0


def toy_trainer(steps_per_epoch: int, arguments: TrainingArguments, *callbacks: Any) -> Trainer:
    """A trainer of one weight, with as many batches per epoch as steps."""
    model = torch.nn.Linear(1, 1)
    batches = [torch.ones(1, 1)] * steps_per_epoch
    return Trainer(
        model,
        arguments,
        train_dataloader=batches,
        eval_dataloader=batches[:1],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss_fn=lambda model, batch: model(batch).square().mean(),
        callbacks=callbacks,
    )


@pytest.mark.parametrize(
    ("style", "first"),
    [("checkpoint_{}", 0), ("global_step{}", 8), ("iter_{:07}", 8)],
    ids=["hf", "deepspeed", "megatron"],
)
def test_k017_the_last_three_are_the_highest_numbers(
    store: Store, ask: Ask, tree: Tree, style: str, first: int
) -> None:
    """Numbers count as numbers, also behind an underscore or zeros: 9, 10 and 11 remain, not 8."""
    url = f"{store.url}/run"
    run = RunDirectory.open_or_create(url)
    for number in range(first, 11):
        push(tree(style.format(number), {"model.bin": b"%d" % number}), run)
    ask("push", tree(style.format(11), {"model.bin": b"11"}), url)
    done = ask("prune", url, "--keep-last", 3, "--yes")
    assert [item["step"] for item in done["delete"]] == list(range(first, 9))
    kept = [item["id"] for item in done["keep"]]
    assert store.snapshot("run/checkpoints/") == {
        f"run/checkpoints/{stem}/model.bin": b"%d" % number for stem, number in zip(kept, (9, 10, 11), strict=True)
    }
    assert [row["step"] for row in ask("ls", url)["checkpoints"]] == [9, 10, 11]


def test_k038_steps_count_over_the_whole_run(store: Store, ask: Ask, tmp_path: Path) -> None:
    """Every 120 steps of epochs of 110, no metric: 120 and 240, and the end of training as documented."""
    url = f"{store.url}/run"
    manager = CheckpointManager(url, local_dir=tmp_path / "disk", save=EveryNSteps(120))
    result = toy_trainer(110, TrainingArguments(num_train_epochs=3), SaveModelCallback(manager)).train()
    assert result.global_step == 330
    assert [(row["step"], row["reasons"]) for row in ask("ls", url)["checkpoints"]] == [
        (120, ["every_n_steps:120"]),
        (240, ["every_n_steps:120"]),
        (330, ["train_end"]),
    ]
    assert len(store.keys("run/manifests/")) == 3


class StopOnSigterm(Callback):
    """What a job script does about a preemption notice: at step 100 the platform sends SIGTERM; training ends at that step."""

    def __init__(self, at_step: int) -> None:
        self._at_step = at_step
        self._told = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._told = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._at_step:
            os.kill(os.getpid(), signal.SIGTERM)
        if self._told:
            control.should_save = control.should_training_stop = True


@pytest.fixture
def _sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_sigterm")
def test_k096_several_triggers_of_one_step_make_one_save(store: Store, ask: Ask, tmp_path: Path) -> None:
    """Every 100 steps, the best metric, the end of an epoch and SIGTERM, all at step 100: one checkpoint with all reasons."""
    url = f"{store.url}/run"
    behind: list[FaultyBackend] = []

    def watched(backend: Backend) -> Backend:
        behind.append(FaultyBackend(backend))
        return behind[-1]

    policy = EveryNSteps(100) | Best("eval_loss", mode="min") | EveryNEpochs(1)
    manager = CheckpointManager(url, local_dir=tmp_path / "disk", save=policy, wrap_backend=watched)
    arguments = TrainingArguments(num_train_epochs=3, eval_steps=100)
    trainer = toy_trainer(100, arguments, StopOnSigterm(100), SaveModelCallback(manager))
    assert trainer.train().global_step == 100

    (row,) = ask("ls", url)["checkpoints"]
    assert row["step"] == 100
    assert set(row["reasons"]) == {"every_n_steps:100", "best:eval_loss", "every_n_epochs:1", "train_end"}
    assert len(row["reasons"]) == 4
    assert store.keys("run/manifests/") == [f"run/manifests/{row['id']}.json"]
    calls = [call for backend in behind for call in backend.log]
    sent = [call.path.rsplit("/run/", 1)[1] for call in calls if call.verb == "put_file"]
    assert sorted(f"run/{path}" for path in sent) == store.keys("run/checkpoints/")
    assert len(sent) == row["files"]
    assert len([call for call in calls if call.verb == "pipe_file" and "/manifests/" in call.path]) == 1


# --- K009 -----------------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The end of a process, which nothing handles."""


@pytest.mark.parametrize(("crash_at", "saved"), [(505, []), (515, [510])], ids=["at 505", "at 515"])
def test_k009_what_a_run_was_resumed_from_belongs_to_another_run(
    store: Store, ask: Ask, cli_here: Cli, tmp_path: Path, crash_at: int, saved: list[int]
) -> None:
    """B goes on from A's best, keeps one best of its own, and dies before or after its first save: A keeps every byte, B writes and removes nothing outside
    its own prefix, and both can be resumed."""
    behind: list[FaultyBackend] = []
    pause = threading.Event()

    def watched(backend: Backend) -> Backend:
        behind.append(FaultyBackend(backend))
        return behind[-1]

    def train(name: str, steps: range, start: Path | None = None, *, crash: bool = False) -> None:
        """Train and evaluate, worse with each step; a plain loop, for its speed."""
        with CheckpointManager(
            f"{store.url}/{name}",
            local_dir=tmp_path / f"disk-{name}",
            save=EveryNSteps(10) | Best("eval_loss", mode="min"),
            keep=KeepBest("eval_loss", mode="min", k=1),
            keep_local=KeepLast(1),
            wrap_backend=watched if name == "B" else None,
            transfer="thread",
        ) as manager:
            manager.begin(resume_from=start)
            for step in steps:
                if crash and step == crash_at + 1:
                    raise Crash
                if why := manager.should_save(StepEnded(step=step)):
                    metrics = {"eval_loss": step / 1000}
                    why += manager.should_save(Evaluated(step=step, metrics=metrics))
                    manager.save(step, {"step": step}, metrics=metrics, reasons=why)
                    assert manager.wait_saved(DEADLINE_S)
                    until = time.monotonic() + DEADLINE_S
                    # Each before the next: what retention would remove at once is not sent, and it is to remove something.
                    while manager.status().uploads.pending and time.monotonic() < until:
                        pause.wait(0.01)

    def listed(name: str) -> list[int]:
        return [row["step"] for row in ask("ls", f"{store.url}/{name}")["checkpoints"]]

    train("A", range(500, 501))
    (best,) = ask("ls", f"{store.url}/A")["checkpoints"]
    assert (best["step"], "best:eval_loss" in best["reasons"]) == (500, True)
    before = store.snapshot("A/")

    start = Path(ask("resume", f"{store.url}/A", "best:eval_loss", "--to", tmp_path / "from-A")["path"])
    with pytest.raises(Crash):
        train("B", range(501, 600), start, crash=True)
    assert store.snapshot("A/") == before
    assert (listed("A"), listed("B")) == ([500], saved)

    if saved:
        start = Path(ask("resume", f"{store.url}/B", "--to", tmp_path / "from-B")["path"])
    else:
        assert cli_here("resume", f"{store.url}/B").returncode == 3
        start = Path(ask("resume", f"{store.url}/A", "--to", tmp_path / "again")["path"])
    train("B", range(516, 541), start)
    # The best, which is the first, and the newest.
    assert listed("B") == [*(saved or [520]), 540]
    assert ask("resume", f"{store.url}/B", "--to", tmp_path / "last")["step"] == 540
    assert store.snapshot("A/") == before
    looks = ("info", "find", "ls", "cat_file", "get_file", "stored_crc")
    changes = [call for each in behind for call in each.log if call.verb not in looks]
    assert {"put_file", "pipe_file"} < {call.verb for call in changes}
    assert [call for call in changes if not call.path.startswith(store.at("B"))] == []


# --- K019 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", ["the newest is the oldest", "all equal"])
def test_k019_times_of_files_decide_nothing(store: Store, ask: Ask, tmp_path: Path, times: str) -> None:
    """400 to 1000, whose files say that 1000 is the oldest, or all the same: right after 1000 was saved, keep-last 3 takes exactly 400, in the store and in
    the local tier."""
    url, disk = f"{store.url}/run", tmp_path / "disk"
    places = [disk / "checkpoints", disk / "manifests", *([Path(store.at("run"))] if store.name == "local" else [])]

    def put_back(seconds: int) -> None:
        for place in places:
            for path in sorted(place.rglob("*"), reverse=True):
                os.utime(path, (seconds, seconds))

    def save(step: int, **options: Any) -> None:
        with CheckpointManager(url, local_dir=disk, transfer="thread", **options) as manager:
            if step > 400:
                manager.restore({})
            manager.save(step, {"step": step})

    for number, step in enumerate((400, 600, 800)):
        save(step, keep_local=KeepLast(9))
        put_back(2_000_000_000 - number * 1000)
    if times == "all equal":
        save(1000, keep_local=KeepLast(9))
        put_back(1_000_000_000)
        assert [each["step"] for each in ask("prune", url, "--keep-last", 3, "--yes")["delete"]] == [400]
    else:
        save(1000, keep=KeepLast(3), keep_local=KeepLast(3))
        assert sorted(Stem.parse(path.stem).step for path in (disk / "manifests").glob("*.json")) == [600, 800, 1000]
    assert [row["step"] for row in ask("ls", url)["checkpoints"]] == [600, 800, 1000]
    assert len({key.split("/")[2] for key in store.keys("run/checkpoints/")}) == 3


# --- K067 -----------------------------------------------------------------------------------------------------------------


def test_k067_a_slash_in_the_name_of_a_metric_makes_no_folder(
    store: Store, ask: Ask, cli_here: Cli, tmp_path: Path
) -> None:
    """`val/loss` in policies, retention, selectors and figures: three saves lie side by side and are found, pruning to one leaves no folder behind, and the
    figures are written."""
    url, disk, figures = f"{store.url}/run", tmp_path / "disk", tmp_path / "figures.prom"
    manager = CheckpointManager(
        url,
        local_dir=disk,
        save=Best("val/loss", mode="min", k=3),
        keep_local=KeepLast(9),
        prometheus=figures,
        transfer="thread",
    )
    with manager:
        for step, loss in ((100, 0.3), (200, 0.1), (300, 0.2)):
            why = manager.should_save(Evaluated(step=step, metrics={"val/loss": loss}))
            assert why
            manager.save(step, {"step": step}, metrics={"val/loss": loss}, reasons=why)
    rows = ask("ls", url)["checkpoints"]
    assert [(row["step"], row["metrics"]["val/loss"]) for row in rows] == [(100, 0.3), (200, 0.1), (300, 0.2)]
    levels = {key.count("/") for key in store.keys("run/checkpoints/")}
    assert levels == {len(("run", "checkpoints", "<id>"))}
    assert sorted({key.split("/")[2] for key in store.keys("run/checkpoints/")}) == [row["id"] for row in rows]
    assert sorted(path.name for path in (disk / "checkpoints").iterdir()) == [row["id"] for row in rows]
    assert ask("resume", url, "best:val/loss")["step"] == 200
    assert ask("resume", url, "worst:val/loss", "--to", tmp_path / "worst")["step"] == 100
    kept = ask("prune", url, "--keep-best", "val/loss:min:1", "--yes")
    assert [each["step"] for each in kept["delete"]] == [100]  # and the newest stays
    assert [row["step"] for row in ask("ls", url)["checkpoints"]] == [200, 300]
    if store.name == "local":
        assert sorted(path.name for path in Path(store.at("run/checkpoints")).iterdir()) == [
            row["id"] for row in rows[1:]
        ]
    records = read_metrics(disk / "metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "save"] == [100, 200, 300]
    assert "ckptmgr_" in figures.read_text()
    # A name that becomes part of a key may not have one.
    refused = cli_here("push", tmp_path / "worst", url, "--step", 400, "--tag", "val/loss")
    assert refused.returncode == 2, refused.stderr
