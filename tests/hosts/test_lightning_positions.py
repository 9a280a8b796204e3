"""Lightning's Trainer, in this process: resumed from every step of an epoch, and nothing is saved in the middle of one."""

from __future__ import annotations

import logging
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr.core.errors import DriftError
from ckptmgr.core.policies import Best, EveryNSteps
from ckptmgr.core.retention import KeepLast
from ckptmgr.training import ranks
from ckptmgr.training.manager import CheckpointManager

# What Lightning does is not ours to mend.
pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.timeout(600),
]
EPOCHS = 2


@pytest.fixture(scope="session", autouse=True)
def _needs_transformers() -> None:
    """In place of that for the tests of the other hosts."""
    if find_spec("lightning") is None:
        pytest.skip("lightning is not installed; CI runs these tests in an environment of their own")


class Rows(torch.utils.data.Dataset[Any]):
    """Rows that draw from the main generators."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return index, torch.full((4,), index / 16) + 0.1 * torch.randn(4) + 0.1 * random.random()


class Trainings:
    """Makes trainings that all do the same, on one run. Each rank draws random numbers of its own.

    Attributes:
        callback: of the last one.
        failures: how many saves are to fail.
    """

    def __init__(self, folder: Path, *, batches: int, accumulation: int, evaluate_every: int | None, **options: Any):
        self.folder, self.batches = folder, batches
        self.options = {
            "devices": 1,
            "accumulate_grad_batches": accumulation,
            "val_check_interval": evaluate_every,
            **options,
        }
        self.callback: Any = None
        self.failures = 0

    def manager(self, save: Any) -> CheckpointManager:
        return CheckpointManager(
            self.folder / "store/run",
            local_dir=self.folder / "disk",
            save=save,
            keep_local=KeepLast(100),
            transfer="thread",
        )

    def run(
        self,
        save: Any = None,
        *,
        resume: int | str | None = None,
        ckpt_path: Any = None,
        callbacks: Sequence[Any] = (),
        **how: Any,
    ) -> dict[str, Any]:
        """Train until the end; without `save`, without anything of ours. What it computed, by step."""
        import lightning  # type: ignore[import-not-found, unused-ignore]

        from ckptmgr.callbacks.lightning import LightningCallback

        facts: dict[str, Any] = {}
        lightning.seed_everything(3 + ranks.rank(), verbose=False)

        class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
            def __init__(self) -> None:
                super().__init__()
                self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
                self.seen: list[Any] = []

            def training_step(self, batch: Any, index: int) -> Any:
                loss = self.net(batch[1]).square().mean()
                self.seen.append((batch[0].tolist(), float(loss).hex()))
                return loss

            def validation_step(self, batch: Any, index: int) -> None:
                self.log("val_loss", self.net(batch[1]).square().mean())

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
                schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
                return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        class Journal(lightning.Callback):  # type: ignore[misc, unused-ignore]
            def __init__(self) -> None:
                self.step = 0

            def on_train_start(self, trainer: Any, module: Any) -> None:
                self.step = trainer.global_step

            def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
                if trainer.global_step != self.step:
                    self.step = trainer.global_step
                    facts[f"{self.step} batches"], module.seen = module.seen, []
                    facts[f"{self.step} weights"] = [each.tolist() for each in module.state_dict().values()]
                    moments = trainer.optimizers[0].state_dict()["state"].values()
                    facts[f"{self.step} optimizer"] = [each["exp_avg_sq"].tolist() for each in moments]
                    facts[f"{self.step} random"] = (torch.get_rng_state().tolist(), random.getstate())

            def on_validation_end(self, trainer: Any, module: Any) -> None:
                name = f"{trainer.global_step} val_loss after {len(module.seen)}"
                facts[name] = float(trainer.callback_metrics["val_loss"])

        ours: list[Any] = []
        path = ckpt_path
        if save is not None:
            manager = self.manager(save)
            self.callback = LightningCallback(manager, save_at_end=False, **how)
            ours = [self.callback]
            path = ckpt_path or (None if resume is None else manager.resume_path(str(resume)))
        trainer = lightning.Trainer(
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=save is not None,
            default_root_dir=self.folder,
            max_epochs=EPOCHS,
            num_sanity_val_steps=0,
            callbacks=[Journal(), *ours, *callbacks],
            **self.options,
        )
        train: Any = torch.utils.data.DataLoader(Rows(2 * self.batches), batch_size=2, shuffle=True)
        evaluate: Any = torch.utils.data.DataLoader(Rows(4), batch_size=2)
        trainer.fit(Module(), train, evaluate, ckpt_path=path)
        assert not ours or self.callback.failures == self.failures
        return facts


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    yield
    torch.set_num_threads(threads)


def differing(whole: dict[str, Any], resumed: dict[str, Any], first: int) -> list[str]:
    """What `resumed`, which begins with step `first`, did not compute as `whole` did, or not at all."""
    expected = {name for name in whole if name.endswith("weights") and int(name.split()[0]) >= first}
    return sorted(name for name in expected | resumed.keys() if whole.get(name) != resumed.get(name))


def sweep(
    folder: Path, case: tuple[int, int, int | None], steps: Callable[[int, int], Iterator[int]], save: Any
) -> None:
    """A training that saves as `save` says, equal to one without anything of ours; resumed from what it saved of `steps`, each goes on as that did."""
    batches, accumulation, evaluate_every = case
    trainings = Trainings(folder, batches=batches, accumulation=accumulation, evaluate_every=evaluate_every)
    whole = trainings.run()
    assert trainings.run(save) == whole
    per_epoch = -(-batches // accumulation)
    last = EPOCHS * per_epoch
    saved = {manifest.step for manifest in trainings.manager(save).list()}
    # From the last one down: each begins a lineage of its own, in which later steps are none.
    wrong = {}
    for step in sorted(saved.intersection(steps(per_epoch, last)), reverse=True):
        found = differing(whole, trainings.run(EveryNSteps(last + 1), resume=step), step + 1)
        if found or trainings.callback.proof == "different":
            wrong[step] = found or "the first batch"
    assert saved
    assert wrong == {}, f"of {last} steps, {per_epoch} in an epoch; saved: {sorted(saved)}"


def edges(per_epoch: int, last: int) -> Iterator[int]:
    """With two, one and no steps left of the first epoch, and with one left of the second."""
    yield from range(max(per_epoch - 2, 1), per_epoch + 1)
    yield 2 * per_epoch - 1


def all_of_them(per_epoch: int, last: int) -> Iterator[int]:
    yield from range(1, last)


# Batches of an epoch, accumulation, batches from one evaluation to the next.
USUAL = [(7, 1, None), (7, 2, 3), (7, 3, 2), (8, 3, 7), (8, 2, None)]
CASES = list(product((7, 8), (1, 2, 3), (1, 2, 3, 7, None)))
EVALUATIONS = Best("val_loss", k=100)


@pytest.mark.parametrize("case", USUAL, ids=str)
def test_the_edges_of_an_epoch(tmp_path: Path, case: tuple[int, int, int | None]) -> None:
    sweep(tmp_path, case, edges, EveryNSteps(1) | EVALUATIONS)


@pytest.mark.parametrize("case", [(7, 2, 3), (7, 3, 2), (8, 3, 7)], ids=str)
def test_after_each_evaluation(tmp_path: Path, case: tuple[int, int, int | None]) -> None:
    """Also where it is between two micro-batches."""
    sweep(tmp_path, case, all_of_them, EVALUATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("save", [EveryNSteps(1) | EVALUATIONS, EVALUATIONS], ids=["steps", "evaluations"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_position(tmp_path: Path, case: tuple[int, int, int | None], save: Any) -> None:
    sweep(tmp_path, case, all_of_them, save)


class TestBetweenMicroBatches:
    """8 batches an epoch, 3 a step, evaluated after the 7th: step 2 is finished, and step 3 begun."""

    @pytest.fixture
    def trainings(self, tmp_path: Path) -> Trainings:
        return Trainings(tmp_path, batches=8, accumulation=3, evaluate_every=7)

    def test_an_evaluation_is_decided_on_at_the_next_edge(self, trainings: Trainings) -> None:
        """Best by its metrics, with the step that was under way; and that goes on exactly."""
        whole = trainings.run()
        trainings.run(Best("val_loss", k=2))
        manifests = trainings.manager(Best("val_loss")).list()
        assert manifests[0].step == 3
        assert manifests[0].metrics["val_loss"] == whole["2 val_loss after 1"]
        assert manifests[0].reasons == ("best:val_loss",)
        assert differing(whole, trainings.run(EveryNSteps(100), resume=3), 4) == []

    def test_a_notice_is_heeded_at_the_next_edge(self, trainings: Trainings) -> None:
        """SIGTERM in that evaluation: step 3 is finished, saved, and gone on from."""
        import lightning

        class Terminate(lightning.Callback):  # type: ignore[misc, unused-ignore]
            def on_validation_batch_start(self, *_: Any) -> None:
                os.kill(os.getpid(), signal.SIGTERM)

            def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
                trainer.callbacks.remove(self)

        whole = trainings.run()
        with pytest.raises(SystemExit) as ended:
            trainings.run(EveryNSteps(100), callbacks=[Terminate()])
        assert ended.value.code == 143
        assert [manifest.step for manifest in trainings.manager(EveryNSteps(100)).list()] == [3]
        assert differing(whole, trainings.run(EveryNSteps(100), resume="latest"), 4) == []

    def test_a_save_of_lightning_is_warned_of_and_so_is_its_resume(
        self, trainings: Trainings, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        from lightning.pytorch.callbacks import ModelCheckpoint  # type: ignore[import-not-found, unused-ignore]

        own = ModelCheckpoint(dirpath=tmp_path / "own", save_on_train_epoch_end=False, filename="{step}", save_top_k=-1)
        trainings.run(EveryNSteps(100), callbacks=[own])
        assert (
            "step 2 is saved between micro-batches (ModelCheckpoint): what 1 of them have added to step 3"
            in caplog.text
        )
        caplog.clear()
        other = Trainings(tmp_path / "other", batches=8, accumulation=3, evaluate_every=7)
        other.run(EveryNSteps(100), ckpt_path=tmp_path / "own/step=2.ckpt")
        assert (
            "the checkpoint of step 2 was made between micro-batches: what the 1 before it had added to step 3"
            in caplog.text
        )

    def test_an_evaluation_that_ends_training(self, trainings: Trainings, caplog: pytest.LogCaptureFixture) -> None:
        """Lightning leaves the step under way undone; the evaluation is decided on, and what is lost is said."""
        from lightning.pytorch.callbacks import EarlyStopping  # type: ignore[import-not-found, unused-ignore]

        def stop() -> Any:
            return EarlyStopping("val_loss", stopping_threshold=1e9)

        trainings.run(Best("val_loss"), callbacks=[stop()])
        assert [manifest.step for manifest in trainings.manager(Best("val_loss")).list()] == [2]
        assert "step 2 is saved between micro-batches (the end of training" in caplog.text
        caplog.clear()
        assert trainings.run(Best("val_loss"), resume="latest", callbacks=[stop()]) == {}
        assert "already stopped" in caplog.text
        assert "between micro-batches" not in caplog.text

    def test_step_edges_are_not_warned_of(self, trainings: Trainings, caplog: pytest.LogCaptureFixture) -> None:
        trainings.run(EveryNSteps(1))
        trainings.run(EveryNSteps(100), resume=2)
        assert "between micro-batches" not in caplog.text


def test_what_only_lightning_knows_is_refused_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`resume_path()` comes before the ranks and the loaders: what Lightning says of them then is compared before the first step."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    made = Trainings(tmp_path, batches=4, accumulation=1, evaluate_every=None)
    made.run(EveryNSteps(2))
    made.options["accumulate_grad_batches"] = 2
    monkeypatch.setenv("CKPTMGR_REFUSE_DRIFT", "accumulation world_size dataset_fingerprint")
    with pytest.raises(DriftError, match="accumulation: 1 in the checkpoint, 2 now"):
        made.run(EveryNSteps(2), resume=2)
    made.callback.manager.close()
    monkeypatch.setenv("CKPTMGR_REFUSE_DRIFT", "world_size")
    made.run(EveryNSteps(2), resume=2)
    assert "changed: accumulation: 1 in the checkpoint, 2 now" in caplog.text
    assert "changed: world_size" not in caplog.text
