"""Means over steps and ranks, and decisions that ranks share: alone, and with two real ranks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr.callbacks.averages import SampledMeans, is_main_process, main_process_decides, mean_over_ranks
from ckptmgr.core.errors import ConfigError

DEADLINE_S = 120.0

RANK = """
import json, os, sys
import torch
import torch.distributed as dist
from ckptmgr.callbacks.averages import SampledMeans, any_rank, is_main_process, main_process_decides, mean_over_ranks

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
calls = []
reduce = dist.all_reduce
dist.all_reduce = lambda *args, **options: (calls.append(1), reduce(*args, **options))[1]
means = SampledMeans("loss", "accuracy", "only_here", every=3)
samples, at = [], []
for step in range(1, 7):
    # Three pairs on rank 0, one on rank 1: each pair counts the same.
    means.add(loss=torch.tensor(float(step + rank)), accuracy=torch.tensor([1.0, 0.0, 1.0][: 3 - 2 * rank]))
    means.add(only_here=float("nan") if rank else 5)
    found = means.sample(step)
    if found:
        samples.append(found)
        at.append([step, len(calls), means.nonfinite])
one = mean_over_ranks({"a": rank, "b": torch.tensor([1.0, 2.0]) if rank else None})
decided = [any_rank(rank == 1), any_rank(False), main_process_decides(rank == 0), main_process_decides(rank == 1)]
print(json.dumps({"samples": samples, "at": at, "one": one, "decided": decided, "main": is_main_process()}))
sys.stdout.flush()
dist.destroy_process_group()
os._exit(0)  # gloo's threads may abort an interpreter that takes its time to end
"""


def test_two_ranks_meet_once_a_sample_and_find_the_same(tmp_path: Path) -> None:
    """One call for all values; every element counts; a rank that has no finite value takes part."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "file")], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    told = [json.loads(each.communicate(timeout=DEADLINE_S)[0]) for each in started]
    assert [each.pop("main") for each in told] == [True, False]
    assert told[0] == told[1]
    accuracy = (3 * 2 + 3 * 1) / (3 * 3 + 3 * 1)
    assert told[0]["samples"] == [
        {"loss": 2.5, "accuracy": accuracy, "only_here": 5.0},
        {"loss": 5.5, "accuracy": accuracy, "only_here": 5.0},
    ]
    assert told[0]["at"] == [[3, 1, 3], [6, 2, 3]]
    assert told[0]["one"] == {"a": 0.5, "b": 1.5}
    assert told[0]["decided"] == [True, False, True, False]


def test_alone_it_is_the_mean_over_steps_and_the_inputs_stay_as_they_are() -> None:
    means = SampledMeans("loss", every=2)
    loss = torch.tensor([1.0, 2.0], requires_grad=True)
    means.add(loss=loss)
    assert means.sample(1) is None
    means.add(loss=9)
    assert means.sample(2) == {"loss": 4.0}
    assert loss.tolist() == [1.0, 2.0]
    assert loss.requires_grad
    assert math.isnan(means.take()["loss"])
    assert mean_over_ranks({"a": 1, "b": torch.tensor(2.5)}) == {"a": 1.0, "b": 2.5}
    assert is_main_process()
    assert main_process_decides(True)
    assert not main_process_decides(False)


def test_what_is_not_finite_is_left_out_and_counted() -> None:
    means = SampledMeans("a", "b")
    means.add(a=torch.tensor([math.nan, 3.0, math.inf]), b=-math.inf)
    means.add(a=None, b=torch.tensor(math.nan))
    found = means.take()
    assert found["a"] == 3.0
    assert math.isnan(found["b"])
    assert means.nonfinite == 4
    means.take()
    assert means.nonfinite == 0


def test_low_precision_does_not_lose_small_values_and_booleans_are_numbers() -> None:
    means = SampledMeans("bf16", "flag")
    for _ in range(1000):
        means.add(bf16=torch.tensor(0.5, dtype=torch.bfloat16), flag=torch.tensor([True, False]))
    assert means.take() == {"bf16": 0.5, "flag": 0.5}


def test_a_resumed_window_equals_an_uninterrupted_one() -> None:
    def means() -> SampledMeans:
        return SampledMeans("a", "b", every=4)

    whole, first, second = means(), means(), means()
    values: list[Any] = [0.1, torch.tensor([0.2, 0.7]), math.nan, 0.4]
    for value in values:
        whole.add(a=value)
    for value in values[:2]:
        first.add(a=value)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for value in values[2:]:
        second.add(a=value)
    assert str(second.sample(4)) == str(whole.sample(4))
    assert second.nonfinite == whole.nonfinite == 1


@pytest.mark.parametrize(
    ("names", "options"),
    [((), {}), (("a", "a"), {}), (("a",), {"every": 0}), (("a",), {"every": 2.0})],
    ids=["no name", "twice", "zero", "no whole number"],
)
def test_arguments_that_make_no_sense(names: Any, options: Any) -> None:
    with pytest.raises(ConfigError, match=r"SampledMeans: .* - "):
        SampledMeans(*names, **options)


def test_an_unknown_name_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match="no 'los' - names: loss"):
        SampledMeans("loss").add(los=1.0)
