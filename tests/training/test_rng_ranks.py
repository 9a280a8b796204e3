"""The random states of several ranks, restored on as many, on more and on fewer. Real ranks are in tests/test_trainer_ranks_rng.py."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptmgr.core.errors import IncompatibleStateError
from ckptmgr.training import rank_rng
from ckptmgr.training.rng import capture_rng
from ckptmgr.training.state import capture, restore, write

As = Callable[[int, int], None]


def seed(number: int) -> None:
    random.seed(number), np.random.seed(number), torch.manual_seed(number)


def numbers(after_seed: int | None = None) -> tuple[float, float, float]:
    if after_seed is not None:
        seed(after_seed)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> As:
    """This process becomes rank `rank` of `world`, as torchrun would say it."""

    def become(rank: int, world: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))

    return become


@pytest.fixture
def of_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, become: As) -> Path:
    """A checkpoint of three ranks; rank r had been seeded with r."""

    def gather_bytes(mine: bytes) -> list[bytes]:
        files = [mine]
        for rank in (1, 2):
            seed(rank)
            torch.save(capture_rng(), file := io.BytesIO())
            files.append(file.getvalue())
        seed(0)
        return files

    become(0, 3)
    monkeypatch.setattr(rank_rng, "can_agree", lambda: True)
    monkeypatch.setattr(rank_rng, "gather_bytes", gather_bytes)
    seed(0)
    rank_rng.gather_rng()
    write(capture({"a": 1}), tmp_path)
    return tmp_path


@pytest.mark.parametrize("rank", range(3))
def test_each_of_as_many_ranks_gets_its_own(rank: int, of_three: Path, become: As) -> None:
    """From the same files, which load with torch alone."""
    torch.load(of_three / "rng.pt", weights_only=True)
    expected = numbers(rank)
    become(rank, 3)
    seed(99)
    assert restore(of_three, {"a": 0}).notes == ()
    assert numbers() == expected


def test_fewer_ranks_get_theirs_and_a_note(of_three: Path, become: As) -> None:
    """One process among them, whose states are those of rank 0."""
    for rank, world in ((1, 2), (0, 1)):
        expected = numbers(rank)
        become(rank, world)
        seed(99)
        said = f"the random states of 3 ranks were saved, and those of the first {world} restored"
        assert restore(of_three, {"a": 0}).notes == (said,)
        assert numbers() == expected


@pytest.mark.parametrize(("world", "who"), [(4, "rank 3"), (5, "ranks 3 to 4")])
def test_a_rank_that_was_not_there_keeps_what_it_has(world: int, who: str, of_three: Path, become: As) -> None:
    """Two ranks with the same random numbers would train on the same noise; all ranks are told."""
    expected = numbers(77)
    become(3, world)
    seed(77)
    said = (f"the random states of 3 ranks were saved: {who} of {world} keep their own",)
    assert restore(of_three, {"a": 0}).notes == said
    assert numbers() == expected
    become(1, world)
    assert restore(of_three, {"a": 0}).notes == said
    assert numbers() == numbers(1)


def test_what_was_gathered_serves_one_save(of_three: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A later one, at another moment, does not get old states; one that comes too late says so."""
    write(capture({"a": 1}), tmp_path / "next")
    assert "ranks" not in torch.load(tmp_path / "next" / "rng.pt", weights_only=True)
    assert caplog.text == ""
    rank_rng.gather_rng()
    torch.rand(())
    write(capture({"a": 1}), tmp_path / "late")
    assert "ranks" not in torch.load(tmp_path / "late" / "rng.pt", weights_only=True)
    assert "between gather_rng() and the save" in caplog.text


def test_gathering_draws_nothing_and_is_nothing_alone(of_three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of one process is the same with it as without."""
    monkeypatch.setattr(rank_rng, "can_agree", lambda: False)
    expected = numbers(5)
    seed(5)
    rank_rng.gather_rng()
    assert "ranks" not in capture({}).pieces["rng"]
    assert numbers() == expected


def test_states_that_cannot_be_read_are_an_error_of_ours(of_three: Path) -> None:
    """Not one of pickle."""
    states: dict[str, Any] = torch.load(of_three / "rng.pt", weights_only=True)
    states["ranks"][0] = states["ranks"][0][:100]
    torch.save(states, of_three / "rng.pt")
    with pytest.raises(IncompatibleStateError, match="rank 0 in the checkpoint cannot be read") as caught:
        restore(of_three, {"a": 0})
    assert caught.value.piece == "rng"  # type: ignore[attr-defined]
