"""What a restore did, as JSON and as lines."""

from __future__ import annotations

import json

import torch

from ckptmgr.core.conditions import Drift
from ckptmgr.training.state import RestoreReport, piece_kinds

FULL = RestoreReport(
    restored=("model", "optimizer"),
    missing=("scaler",),
    unexpected=("ema",),
    changed=(Drift(what="pieces.optimizer", saved="torch.optim.sgd.SGD", now="torch.optim.adam.Adam"),),
    drift=(Drift(what="world_size", saved="2", now="4"),),
    values={"notes": {1: torch.ones(1)}},
    notes=("optimizer: lr is 0.1, as in the checkpoint, and not 0.2",),
)


def test_a_report_is_json() -> None:
    """All but the values, which are what the program asked for and may be anything."""
    assert json.loads(json.dumps(FULL.as_document())) == {
        "restored": ["model", "optimizer"],
        "missing": ["scaler"],
        "unexpected": ["ema"],
        "changed": [{"what": "pieces.optimizer", "saved": "torch.optim.sgd.SGD", "now": "torch.optim.adam.Adam"}],
        "drift": [{"what": "world_size", "saved": "2", "now": "4"}],
        "notes": ["optimizer: lr is 0.1, as in the checkpoint, and not 0.2"],
    }


def test_a_report_is_lines() -> None:
    """One for each thing that a person should know, and none for what is as it should be."""
    assert FULL.lines() == [
        "restored: model, optimizer",
        "not in the checkpoint, and not restored: scaler",
        "in the checkpoint, and not asked for: ema",
        "optimizer was a torch.optim.sgd.SGD in the checkpoint, and is a torch.optim.adam.Adam now",
        "changed: world_size: 2 in the checkpoint, 4 now",
        "optimizer: lr is 0.1, as in the checkpoint, and not 0.2",
    ]
    assert RestoreReport(restored=("model",)).lines() == ["restored: model"]
    assert RestoreReport(restored=()).lines() == ["nothing was restored"]


def test_the_kinds_of_pieces() -> None:
    """Those of objects; the name of the main module says how a program was started, and is left out."""
    own = type("Own", (torch.nn.Identity,), {"__module__": "__main__"})()
    assert piece_kinds({"model": torch.nn.Linear(1, 1), "own": own, "notes": {"a": 1}, "step": 3}) == {
        "model": "torch.nn.modules.linear.Linear",
        "own": "Own",
    }
