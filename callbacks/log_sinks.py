"""Where records of a training go: a file of JSON lines, TensorBoard, Weights & Biases. What is not installed is imported by nobody.

A record is a mapping with `at` (UTC, ISO 8601 with milliseconds and `Z`), `host`, `rank`, `kind`, `step` first, as on every node, then `epoch` and the values.
Values are numbers, or a `Histogram`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ckptmgr.core.errors import ConfigError, MissingExtraError
from ckptmgr.core.manifest import encode_metric
from ckptmgr.run.identity import host_name, utc_stamp
from ckptmgr.training import ranks
from ckptmgr.transfer.metrics import append_line

_log = logging.getLogger(__name__)

#: What says where a record comes from, and is no value of its own.
LABELS = ("at", "host", "rank", "kind", "step", "epoch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How many values there are between `edges[i]` and `edges[i + 1]`: one more edge than counts."""

    edges: Sequence[float]
    counts: Sequence[int]


class Sink(Protocol):
    """Takes records. Called by one thread; what `write` raises is counted, and costs that record."""

    def begin(self, step: int) -> None:
        """Training begins, or goes on, after `step`. Called before the first record; a sink may be begun again after `close`."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Keep a record. Never waits for a network."""

    def close(self) -> None:
        """Nothing more comes."""


def labels(kind: str, step: int) -> dict[str, Any]:
    """The beginning of a record, in the one form of all nodes."""
    return {"at": utc_stamp(), "host": host_name(), "rank": ranks.rank(), "kind": kind, "step": step}


class JsonlSink:
    """Appends each record as one line of JSON, in a single write; what is not finite is "NaN", "Infinity" or "-Infinity", as in `metrics.jsonl`.

    A resumed training goes on in the same file: where a step is in it twice, the later one counts. A line that a full disk has cut off is ended before
    the next one. Keeps nothing open, so that the file may be rotated by others.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def begin(self, step: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, record: Mapping[str, Any]) -> None:
        plain = {name: _plain(value) for name, value in record.items()}
        append_line(self.path, json.dumps(plain, allow_nan=False).encode())

    def close(self) -> None:
        pass


class TensorBoardSink:
    """Event files for TensorBoard, written by a thread of its own; a kill may cost what it has not written yet. What was written beyond the step of a
    resume is hidden.

    Tags: `eval_loss` is `eval/loss`; any other name is below the kind of its record, such as `train/loss`.

    Args:
        directory: for the event files.
        options: of `torch.utils.tensorboard.SummaryWriter`.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str], **options: Any) -> None:
        self.directory = Path(directory)
        self._options = options
        self._make: Callable[..., Any] = _imported("torch.utils.tensorboard", "tensorboard", "SummaryWriter")
        self._writer: Any = None

    def begin(self, step: int) -> None:
        self._writer = self._make(str(self.directory), purge_step=step + 1 if step else None, **self._options)

    def write(self, record: Mapping[str, Any]) -> None:
        step = record["step"]
        for name, value in _values(record):
            if isinstance(value, Histogram):
                self._add_histogram(_tag(record, name), value, step)
            else:
                self._writer.add_scalar(_tag(record, name), value, step)

    def _add_histogram(self, tag: str, histogram: Histogram, step: int) -> None:
        middles = [(low + high) / 2 for low, high in zip(histogram.edges, histogram.edges[1:], strict=False)]
        self._writer.add_histogram_raw(
            tag,
            min=histogram.edges[0],
            max=histogram.edges[-1],
            num=sum(histogram.counts),
            sum=sum(count * middle for count, middle in zip(histogram.counts, middles, strict=True)),
            sum_squares=sum(count * middle**2 for count, middle in zip(histogram.counts, middles, strict=True)),
            bucket_limits=list(histogram.edges[1:]),
            bucket_counts=list(histogram.counts),
            global_step=step,
        )

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class WandbSink:
    """A run of Weights & Biases: the one that is active, or one of its own, which it finishes. W&B sends in a process of its own.

    Values are plotted against `global_step`, not W&B's own counter, which does not go back: so a run may be resumed from an earlier step. Offline, W&B
    writes its file every 15 s and at the end, so that a kill costs up to so much; and each start is a directory of its own.

    Args:
        options: of `wandb.init`, such as project, name, id, resume, mode.

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._init: Callable[..., Any] = _imported("wandb", "wandb", "init")
        self._run: Any = None
        self._is_ours = False

    def begin(self, step: int) -> None:
        active = _imported("wandb", "wandb", "run")
        self._is_ours = active is None
        self._run = self._init(**self._options) if active is None else active
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")

    def write(self, record: Mapping[str, Any]) -> None:
        told = {_tag(record, name): self._shown(value) for name, value in _values(record)}
        self._run.log({**told, "global_step": record["step"]})

    def _shown(self, value: Any) -> Any:
        if not isinstance(value, Histogram):
            return value
        make = _imported("wandb", "wandb", "Histogram")
        return make(np_histogram=(list(value.counts), list(value.edges)))

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None and self._is_ours:
            run.finish()


_MAKERS: dict[str, Callable[..., Sink]] = {"jsonl": JsonlSink, "tensorboard": TensorBoardSink, "wandb": WandbSink}


def sink_of(owner: str, spec: Any, directory: Path, *, suffix: str = "") -> Sink:
    """The sink that a configuration names.

    Args:
        spec: "jsonl", "tensorboard" or "wandb"; a mapping with one of these as its only key, and its options as the value; or a sink.
        directory: where `log.jsonl` and `tensorboard` lie, unless the options say otherwise.
        suffix: of the file's name, for a rank other than the main one.

    Raises:
        ConfigError: it is none of these, or its options are wrong.
    """
    if hasattr(spec, "write") and hasattr(spec, "close"):
        return spec  # type: ignore[no-any-return]
    pairs = list(spec.items()) if isinstance(spec, Mapping) else [(spec, {})]
    name, options = pairs[0] if len(pairs) == 1 else (spec, {})
    if not isinstance(name, str) or name not in _MAKERS or not isinstance(options or {}, Mapping):
        raise ConfigError(
            f"{owner}: there is no sink {spec!r}", hint=f"use {', '.join(map(repr, _MAKERS))}, or {{name: {{options}}}}"
        )
    given = dict(options or {})
    if name == "jsonl":
        given.setdefault("path", directory / f"log{suffix}.jsonl")
    elif name == "tensorboard":
        given.setdefault("directory", directory / "tensorboard")
    try:
        return _MAKERS[name](**given)
    except TypeError as error:
        raise ConfigError(f"{owner}: sink {name}: {error}", hint="see ckptmgr.callbacks.log_sinks") from error


class Guarded:
    """A sink whose failures cost its records and nothing else: said at the first one, and when it works again.

    Attributes:
        failures: calls that failed.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.failures = 0
        self._is_failing = False

    def begin(self, step: int) -> None:
        """As the sink's own; never raises."""
        with self._counted():
            self.sink.begin(step)

    def write(self, record: Mapping[str, Any]) -> None:
        """As the sink's own; never raises."""
        with self._counted():
            self.sink.write(record)
            if self._is_failing:
                _log.info("%s takes records again, after %d failures", type(self.sink).__name__, self.failures)
                self._is_failing = False

    def close(self) -> None:
        """As the sink's own; never raises."""
        with self._counted():
            self.sink.close()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - libraries of others; a log is not worth a training
            self.failures += 1
            if not self._is_failing:
                why = str(error) if isinstance(error, OSError) else repr(error)  # with the path
                _log.warning("%s does not take records, training goes on: %s", type(self.sink).__name__, why)
            self._is_failing = True


def _values(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name not in LABELS and (is_number or isinstance(value, Histogram)):
            yield name, value


def _tag(record: Mapping[str, Any], name: str) -> str:
    return f"eval/{name[5:]}" if name.startswith("eval_") else f"{record['kind']}/{name}"


def _plain(value: Any) -> Any:
    if isinstance(value, Histogram):
        return {"edges": list(value.edges), "counts": list(value.counts)}
    if isinstance(value, float) and not math.isfinite(value):
        return encode_metric(value)
    return value


def _imported(module: str, package: str, name: str) -> Any:
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{package} is not installed, and logs shall go there", hint=f"pip install {package}", extra=package
        ) from error
    return getattr(found, name)
