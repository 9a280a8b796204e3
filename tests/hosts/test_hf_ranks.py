"""transformers' Trainer with two ranks, interrupted and resumed: each goes on with its own samples and random states, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

RANKS = """
import logging
from pathlib import Path
join()
os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
sys.path.insert(0, "hosts")
import hf_trainings as hf

class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())

logging.getLogger("ckptmgr").addHandler(Lines(logging.WARNING))

def resumed(name, make_rows=hf.Rows, **options):
    # Two steps in an epoch; the machine goes after the first one of the third.
    made = hf.Trainings(Path(sys.argv[1]) / name, {"eval_steps": 2, **options}, make_rows)
    whole = made.run(save_every=None, out="whole")
    made.run(hf.crash("on_step_begin", 5), save_every=5)
    lines.clear()
    last = made.run(save_every=hf.STEPS, resume=True)
    steps = [int(name.split()[0]) for name in last.facts if name.endswith("weights")]
    return {
        "steps": steps, "batches": last.facts["6 batches"], "proof": made.callback.proof, "lines": list(lines),
        "differing": [name for name, value in last.facts.items() if whole.facts.get(name) != value],
    }

lines = []
found = {
    "augmentation": resumed("augmentation", lambda: hf.Rows(noise=True)),
    "order from the main generator": resumed("order", accelerator_config={"use_seedable_sampler": False}),
    "grouped by length": resumed("grouped", lambda: hf.Rows(lengths=True), train_sampling_strategy="group_by_length"),
    "workers": resumed("workers", dataloader_num_workers=1),
    "iterable": resumed("iterable", lambda: hf.make_stream(states=True)),
    "iterable without dispatch": resumed(
        "apart", lambda: hf.make_stream(states=True), accelerator_config={"dispatch_batches": False}
    ),
}
"""
MODULES = ("transformers.trainer", "transformers.models.llama.modeling_llama")
DATA = (
    "augmentation",
    "order from the main generator",
    "grouped by length",
    "workers",
    "iterable",
    "iterable without dispatch",
)


@pytest.fixture(scope="module")
def found(
    offline: None, in_two_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank saw of each training."""
    return in_two_ranks(RANKS, tmp_path_factory.mktemp("trainings"), modules=MODULES, deadline_s=500.0)


@pytest.mark.parametrize("data", DATA)
def test_resumed_is_as_uninterrupted(found: list[dict[str, Any]], data: str) -> None:
    """Losses, gradients' norms, weights, optimizer, batches and random states of the rest of the epoch and of later ones."""
    for rank in found:
        assert rank[data]["steps"] == list(range(6, 13))
        assert rank[data]["differing"] == []
        assert rank[data]["proof"] != "different", [(each[data]["proof"], each[data]["lines"]) for each in found]
    first, second = (rank[data] for rank in found)
    assert first["batches"] != second["batches"]
