"""What LogCallback writes, read back by TensorBoard's own reader, and from the file of a Weights & Biases run that is offline."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(
        find_spec("tensorboard") is None or find_spec("wandb") is None,
        reason="tensorboard and wandb are not installed; CI runs these tests beside transformers 5.19",
    ),
    # Not ours: what these libraries have to say about each other.
    pytest.mark.filterwarnings("default"),
]

SCRIPT = Path(__file__).with_name("train_logged.py")
MARK = "CKPTMGR_TEST_MARK"
Values = dict[tuple[str, int], Any]
Train = Callable[..., int]


@dataclass
class Written:
    """What a directory of logs holds, by tag and step; of several values the later one."""

    jsonl: Values
    tensorboard: Values
    wandb: Values

    @classmethod
    def of(cls, out: Path) -> Written:
        return cls(from_jsonl(out / "log.jsonl"), from_tensorboard(out / "tensorboard"), from_wandb(out / "wandb"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "logs"


@pytest.fixture
def train(out: Path) -> Train:
    """Runs the training to its end, or to its kill; returns the exit code. Whatever process it has started is gone then."""

    def run(*options: object) -> int:
        out.mkdir(exist_ok=True)
        mark = uuid.uuid4().hex
        env = {
            **os.environ,
            MARK: mark,
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "WANDB_ERROR_REPORTING": "false",
        }
        command = [sys.executable, str(SCRIPT), str(out), *map(str, options)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150, check=False)
        print(done.stdout, done.stderr)
        wait_for_end(mark)
        return done.returncode

    return run


def wait_for_end(mark: str) -> None:
    """Wait for the end of all processes with `mark` in their environment."""
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(FileNotFoundError, PermissionError, ProcessLookupError):
            if f"{MARK}={mark}".encode() in place.read_bytes():
                process = os.pidfd_open(int(place.parent.name))
                ended, _, _ = select.select([process], [], [], 60)
                os.close(process)
                assert ended, f"{(place.parent / 'cmdline').read_text()} is left"


def from_jsonl(path: Path) -> Values:
    """Tags are as the other two have them."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    found: Values = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line, parse_constant=refuse)
        for name, value in record.items():
            if name in ("at", "host", "rank", "kind", "step", "epoch"):
                continue
            tag = f"eval/{name[5:]}" if name.startswith("eval_") else f"{record['kind']}/{name}"
            found[tag, record["step"]] = value["counts"] if isinstance(value, dict) else float(value)
    return found


def from_tensorboard(directory: Path) -> Values:
    accumulators = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    everything = {"scalars": 0, "histograms": 0}
    reader = accumulators.EventAccumulator(str(directory), size_guidance=everything).Reload()
    tags = reader.Tags()
    scalars = {(tag, each.step): each.value for tag in tags["scalars"] for each in reader.Scalars(tag)}
    histograms = {
        (tag, each.step): [int(count) for count in each.histogram_value.bucket]
        for tag in tags["histograms"]
        for each in reader.Histograms(tag)
    }
    return {**scalars, **histograms}


def from_wandb(directory: Path) -> Values:
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    found: Values = {}
    for path in sorted(directory.glob("offline-run-*/*.wandb")):
        for data in blocks_of(path.read_bytes()):
            record = records.Record.FromString(data)
            if record.WhichOneof("record_type") != "history":
                continue
            row = {tuple(item.nested_key) or (item.key,): json.loads(item.value_json) for item in record.history.item}
            for (tag, *part), value in row.items():
                if "/" in tag and part in ([], ["values"]):
                    found[tag, row["global_step",]] = value if part else float(value)
    return found


def blocks_of(data: bytes) -> Iterator[bytes]:
    """The records of a W&B file: a log in blocks of 32 KiB, as LevelDB writes them, after a header of 7 bytes. A last one that is cut off is left out."""
    assert data.startswith(b":W&B")
    at, whole = 7, b""
    while at + 7 <= len(data):
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768


def same(found: Values, expected: Values) -> None:
    """Equal but for what a float32 loses."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-6, nan_ok=True), key


def test_all_sinks_tell_the_same(out: Path, train: Train) -> None:
    """Losses, evaluations, rates, norms, histograms, and what is not finite; and nothing goes on running afterwards."""
    assert train() == 0
    told = Written.of(out)
    steps = {tag: sorted(step for each, step in told.jsonl if each == tag) for tag, _ in told.jsonl}
    assert steps["log/loss"] == steps["step/grad_norm"] == steps["step/learning_rate"] == [2, 4, 6, 8]
    assert steps["eval/loss"] == [4, 8]
    assert steps["step/grad_log10"] == [3, 6]
    assert math.isnan(told.jsonl["log/loss", 6])
    assert (told.jsonl["log/high", 6], told.jsonl["log/low", 6]) == (math.inf, -math.inf)
    assert all(sum(told.jsonl["step/grad_log10", step]) == 5 for step in (3, 6))
    same(told.tensorboard, told.jsonl)
    same(told.wandb, told.jsonl)


def test_a_training_that_was_killed_and_resumed_is_one_curve(out: Path, train: Train) -> None:
    """Steps that come again are in each sink once, as the resumed training had them; of W&B, its process takes the last seconds along."""
    assert train("--kill-after", 7) == -signal.SIGKILL
    before = Written.of(out)
    assert ("log/loss", 6) in before.jsonl
    assert train("--resume", out / "trainer" / "checkpoint-4") == 0
    told = Written.of(out)
    assert sorted(step for tag, step in told.jsonl if tag == "log/loss") == [2, 4, 6, 8]
    same(told.tensorboard, told.jsonl)
    resumed = {(tag, step): value for (tag, step), value in told.jsonl.items() if step > 4}
    same({key: value for key, value in told.wandb.items() if key[1] > 4}, resumed)
