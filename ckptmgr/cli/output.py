"""How the command line speaks: results on stdout, everything else on stderr, one line per error."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptmgr.core.redaction import without_secrets
from ckptmgr.core.units import size_text

#: In place of a file name.
STDOUT = "stdout"


def say(text: str) -> None:
    """A line for the reader, on stderr, without the credentials that a URL in it may carry."""
    print(one_line(without_secrets(text)), file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """A line that the reader should not miss, on stderr."""
    say(f"ckptmgr: warning: {text}")


def fail(text: str) -> None:
    """The one line of an error, on stderr."""
    say(f"ckptmgr: error: {text}")


@contextlib.contextmanager
def stdout_named() -> Iterator[None]:
    """Name stdout in an error of the operating system that the body meets by writing there; a reader that has gone keeps its own."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, STDOUT) from exc


def emit(text: str) -> None:
    """A result for a person or a pipe, on stdout."""
    with stdout_named():
        print(text, flush=True)


def emit_json(document: Mapping[str, Any], *, is_finite: bool = False) -> None:
    """The one document of `--json`, on stdout; strict JSON, so non-finite numbers must be encoded before.

    Args:
        is_finite: the caller vouches for that, which saves a long document nine tenths of its time.
    """
    import msgspec

    text = b""
    if is_finite:
        with contextlib.suppress(UnicodeEncodeError, OverflowError):
            text = msgspec.json.encode(document)
    # ASCII: it reads the same in every locale, and a file name that is not UTF-8 does not break it.
    options: dict[str, Any] = {"ensure_ascii": True, "allow_nan": False}
    if not text or not text.isascii():
        text = json.dumps(document, **options).encode()
    try:
        emit(msgspec.json.format(text, indent=2).decode())
    except msgspec.DecodeError:  # such a name
        emit(json.dumps(document, indent=2, **options))


def json_metrics(metrics: Mapping[str, float]) -> dict[str, float | str]:
    if all(map(math.isfinite, metrics.values())):
        return dict(metrics)
    from ckptmgr.core.manifest import encode_metric

    return {name: encode_metric(value) for name, value in metrics.items()}


def count(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def size(number: float) -> str:
    """`number` bytes for a reader."""
    return size_text(number)


def when(stamp: str | None) -> str:
    """An ISO 8601 stamp to the minute."""
    return "" if not stamp else stamp[:16].replace("T", " ")


def compact(value: float) -> str:
    """A metric for a reader."""
    return f"{value:.4g}"


def one_line(text: str) -> str:
    """`text` on one line and without control characters: what a store answered must not drive the terminal."""
    text = text.strip()
    if text.isprintable():
        return text
    joined = re.sub(r"\s*[\r\n]+\s*", " ", text)
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in joined)


@contextlib.contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """For the length of a `with` block, what this process and its children write on stdout goes to stderr: stdout is the document's."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while bytes move, where stderr is a terminal; yields what to call with the number of bytes of each block."""
    if not sys.stderr.isatty() or total == 0:
        yield lambda moved: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda moved: bar.advance(task, moved)
