"""What training ran under is in each manifest, and compared, reported or refused before anything is loaded."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr.core.conditions import Conditions, Drift
from ckptmgr.core.errors import ConfigError, DriftError
from ckptmgr.run.tier import LocalTier
from ckptmgr.training.manager import CheckpointManager

Make = Callable[..., CheckpointManager]
SAVED = Conditions(batch_size=4, dataset_length=100, versions={"torch": "1.0.0", "elsewhere": "3.1"})


class Loader:
    """A piece that knows about its data, as `ResumableLoader` does."""

    def __init__(self, length: int) -> None:
        self.length = length

    def state_dict(self) -> dict[str, Any]:
        return {"at": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def conditions(self) -> Conditions:
        return Conditions(dataset_length=self.length)


def a_model() -> torch.nn.Linear:
    return torch.nn.Linear(2, 2)


@pytest.fixture
def saved(manager: Make) -> torch.nn.Linear:
    """The model of a run whose checkpoint at step 10 was made under SAVED."""
    model = a_model()
    with manager(transfer="thread") as saving:
        saving.describe(SAVED)
        saving.save(10, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    return model


def pieces(model: torch.nn.Module) -> dict[str, Any]:
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def test_a_manifest_says_what_training_ran_under(manager: Make) -> None:
    """World size, versions and classes without being told; what was described; what a piece says of itself."""
    with manager(transfer="thread") as saving:
        saving.describe(Conditions(batch_size=4))
        saving.describe(Conditions(accumulation=2))
        saving.save(10, {**pieces(a_model()), "data": Loader(100)})
    (manifest,) = manager().list()
    conditions = Conditions.of_document(manifest.conditions)
    assert (conditions.world_size, conditions.batch_size, conditions.accumulation) == (1, 4, 2)
    assert conditions.dataset_length == 100
    assert conditions.versions["torch"] == metadata.version("torch")
    assert conditions.versions.keys() >= {"python", "numpy"}
    assert conditions.pieces["model"].endswith(".Linear")
    assert conditions.pieces["optimizer"].endswith(".SGD")


def test_what_a_framework_wrote_has_conditions_too(manager: Make, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-10" / "model.bin").write_bytes(b"weights")
    with manager(transfer="thread") as saving:
        saving.describe(Conditions(batch_size=8))
        saving.take(10, tmp_path / "checkpoint-10")
    (manifest,) = manager().list()
    assert manifest.conditions["batch_size"] == 8
    assert manifest.conditions["versions"]["torch"] == metadata.version("torch")


def test_each_difference_is_in_the_report_and_in_the_log(
    manager: Make, saved: torch.nn.Linear, caplog: pytest.LogCaptureFixture
) -> None:
    model = a_model()
    with manager() as restoring, caplog.at_level(logging.INFO, logger="ckptmgr"):
        restoring.describe(Conditions(batch_size=2))
        restored = restoring.restore({"model": Wrapped(model), "data": Loader(120)}, strict=False)
    assert restored is not None
    assert restored.report.drift == (
        Drift(what="batch_size", saved="4", now="2"),
        Drift(what="dataset_length", saved="100", now="120"),
        Drift(what="versions.torch", saved="1.0.0", now=metadata.version("torch")),
    )
    (changed,) = restored.report.changed
    assert (changed.what, changed.saved.rpartition(".")[2]) == ("pieces.model", "Linear")
    assert changed.now.endswith("Wrapped")
    assert torch.equal(model.weight, saved.weight)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "changed: batch_size: 4 in the checkpoint, 2 now" in warned
    assert "not in the checkpoint, and not restored: data" in warned
    assert any(line.startswith("model was a ") for line in warned)
    assert restored.as_document()["report"]["drift"][0] == {"what": "batch_size", "saved": "4", "now": "2"}


class Unfit:
    """A piece that takes nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("optimizer of another kind")


class Wrapped:
    """A model inside another class."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)


@pytest.mark.parametrize("way", ["manager", "restore", "environment"])
def test_a_drift_that_is_refused_loads_nothing(
    manager: Make, saved: torch.nn.Linear, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both values are named, the state is untouched, and the run can still be restored without the rule."""
    if way == "environment":
        monkeypatch.setenv("CKPTMGR_REFUSE_DRIFT", "accumulation,batch_size")
    model = a_model()
    before = model.weight.clone()
    with manager(refuse_drift=["batch_size"] if way == "manager" else []) as restoring:
        restoring.describe(Conditions(batch_size=2))
        with pytest.raises(DriftError, match="batch_size: 4 in the checkpoint, 2 now") as refused:
            restoring.restore(pieces(model), refuse_drift=["batch_size"] if way == "restore" else [])
        assert refused.value.drift == (Drift(what="batch_size", saved="4", now="2"),)
        assert refused.value.exit_code == 7
        assert torch.equal(model.weight, before)
        assert not restoring.is_restored
    monkeypatch.delenv("CKPTMGR_REFUSE_DRIFT", raising=False)
    with manager() as restoring:
        assert restoring.restore(pieces(model)) is not None
    assert torch.equal(model.weight, saved.weight)


def test_a_refusal_does_not_fall_back_to_an_older_one(manager: Make, saved: torch.nn.Linear) -> None:
    """The newest was made under other conditions: an older one that fits is not what was asked for."""
    with manager(transfer="thread") as going_on:
        going_on.restore(pieces(a_model()))
        going_on.describe(Conditions(batch_size=2))
        going_on.save(20, pieces(a_model()))
    with manager(refuse_drift=["batch_size"]) as restoring:
        restoring.describe(Conditions(batch_size=4))
        with pytest.raises(DriftError, match="step 20"):
            restoring.restore(pieces(a_model()))


def test_resume_path_refuses_and_reports_too(
    manager: Make, saved: torch.nn.Linear, caplog: pytest.LogCaptureFixture
) -> None:
    with manager(refuse_drift="versions") as restoring, pytest.raises(DriftError, match=r"versions\.torch: 1\.0\.0"):
        restoring.resume_path()
    with manager() as restoring:
        assert restoring.resume_path() is not None
        noted = LocalTier.open(restoring.local_dir).restored()
    assert any("changed: versions.torch: 1.0.0" in record.getMessage() for record in caplog.records)
    assert noted is not None
    assert noted["report"]["drift"][0]["what"] == "versions.torch"


@pytest.mark.parametrize("told", [None, "1"])
def test_ranks_that_a_host_has_yet_to_start_are_no_drift(
    manager: Make, saved: torch.nn.Linear, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fit(ckpt_path=manager.resume_path())` asks before the host's ranks are there; what a launcher has set counts at once."""
    with manager(transfer="thread") as two_ranks:
        two_ranks.restore(pieces(a_model()))
        two_ranks.describe(Conditions(world_size=2))
        two_ranks.save(20, pieces(a_model()))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if told is not None:
        monkeypatch.setenv("WORLD_SIZE", told)
    with manager() as restoring:
        assert restoring.resume_path() is not None
        noted = LocalTier.open(restoring.local_dir).restored()
    assert noted is not None
    found = [drift["what"] for drift in noted["report"]["drift"]]
    assert ("world_size" in found) == (told is not None)


def test_what_cannot_be_compared_is_said_when_it_was_to_be_refused(
    manager: Make, saved: torch.nn.Linear, caplog: pytest.LogCaptureFixture
) -> None:
    """A rule that cannot be looked at must not pass for one that holds."""
    with manager(refuse_drift=["dataset_fingerprint", "versions.torch", "versions.elsewhere"]) as restoring:
        restoring.describe(Conditions(versions={"torch": "1.0.0"}))
        assert restoring.restore(pieces(a_model())) is not None
    said = [record.getMessage() for record in caplog.records if "cannot be compared" in record.getMessage()]
    assert [text.split("a drift of ")[1].split()[0] for text in said] == ["dataset_fingerprint", "versions.elsewhere"]


def test_a_misspelled_rule_is_a_mistake(manager: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'batchsize' is no drift"):
        manager(refuse_drift=["batchsize"])
    with pytest.raises(ConfigError, match=r"'versions\.' is no drift"):
        manager().restore({}, refuse_drift=["versions."])
    monkeypatch.setenv("CKPTMGR_REFUSE_DRIFT", "world")
    with pytest.raises(ConfigError, match="'world' is no drift"):
        manager()


def test_the_last_restore_is_noted_in_the_local_tier(manager: Make, saved: torch.nn.Linear) -> None:
    """`ckptmgr status` shows it; a restore that fails leaves the note of the one before."""
    with manager() as restoring:
        restoring.describe(Conditions(batch_size=2))
        restored = restoring.restore(pieces(a_model()))
        assert restored is not None
        with pytest.raises(Exception, match="of another kind"):
            restoring.restore({"model": Unfit()})
    noted = LocalTier.open(restoring.local_dir).restored()
    assert noted is not None
    assert noted["restored_at"].endswith("Z")
    assert json.loads(json.dumps(restored.as_document())).items() <= noted.items()


def test_a_piece_that_cannot_say_its_conditions_fails_no_save(
    manager: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Loader) -> Conditions:
        raise RuntimeError("no idea")

    monkeypatch.setattr(Loader, "conditions", broken)
    with manager(transfer="thread") as saving:
        assert saving.save(10, {"data": Loader(1)}, wait=True) is not None
    assert any("conditions of 'data' are unknown" in record.getMessage() for record in caplog.records)
