"""`doctor`: is this store fit for checkpoints, from here and with these credentials?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptmgr.cli.command import Command
from ckptmgr.cli.looking import Json
from ckptmgr.cli.output import count, emit, emit_json, one_line

if TYPE_CHECKING:
    from ckptmgr.run.verdicts import Verdict

_LOCAL_DIR_ENV = "CKPTMGR_LOCAL_DIR"
_EPILOG = """\b
Examples:
  ckptmgr doctor s3://bucket/exp
  ckptmgr doctor s3://bucket/exp --size 10GiB --grace 120s
  ckptmgr doctor oss://bucket/exp --json

What it writes lies under STORE/.ckptmgr-doctor-..., some 45 MiB at most, and is removed at the end. Levels: ok; warning: works, with something to
know; problem: cannot be used like this; unknown: could not be found out.

Exit codes: 0 the store can be used; 2 configuration; 4 it cannot be used, or could not be reached."""


def register(app: typer.Typer) -> None:
    app.command("doctor", cls=Command, epilog=_EPILOG, short_help="Try out a store, and say what to do.")(doctor)


def doctor(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A store, a run, or where one is to be.")],
    size: Annotated[
        str | None,
        typer.Option(
            "--size", metavar="SIZE", help="Of a checkpoint, such as 10GiB; default: that of the newest there."
        ),
    ] = None,
    grace: Annotated[
        str, typer.Option("--grace", metavar="TIME", help="From the notice that a machine is taken to its end.")
    ] = "120s",
    as_json: Json = False,
) -> None:
    """Try out a store from this machine: credentials, clock, every kind of request, speed, and what the bucket does by itself."""
    from ckptmgr.backends.registry import normalize_url
    from ckptmgr.core.errors import ConfigError
    from ckptmgr.core.units import parse_duration, parse_size
    from ckptmgr.run.doctor import Question, examine

    size_bytes = None if size is None else parse_size(size)
    if size is not None and not size_bytes:
        raise ConfigError(f"--size {size!r} is not a size", hint="give for instance --size 10GiB")
    grace_s = parse_duration(grace)
    if not grace_s:
        raise ConfigError(f"--grace {grace!r} is not a length of time", hint="give for instance --grace 120s")
    local_dir = os.environ.get(_LOCAL_DIR_ENV)
    question = Question(
        url=store,
        size_bytes=size_bytes,
        grace_s=grace_s,
        saving_s=None if not local_dir else _saving_s(Path(local_dir)),
        local_dir=None if not local_dir else Path(local_dir),
    )
    found: list[Verdict] = []
    # Closed also at Ctrl-C, so that nothing stays in the store.
    with contextlib.closing(examine(question)) as verdicts:  # type: ignore[type-var]
        for verdict in verdicts:
            found.append(verdict)
            if not as_json:
                emit(_line(verdict))
    problems = sum(verdict.level == "problem" for verdict in found)
    if as_json:
        emit_json({"store": normalize_url(store), "usable": not problems, "verdicts": [_json(one) for one in found]})
    else:
        emit(f"{normalize_url(store)}: {_summary(found)}")
    if problems:
        raise typer.Exit(4)


def _line(verdict: Verdict) -> str:
    seconds = verdict.seconds
    took = "" if seconds is None else f" ({seconds * 1000:.0f} ms)" if seconds < 0.9995 else f" ({seconds:.1f} s)"
    advice = f" - {verdict.advice}" if verdict.advice else ""
    return one_line(f"{verdict.level:<8} {verdict.check:<14} {verdict.text}{took}{advice}")


def _summary(found: Iterable[Verdict]) -> str:
    levels = [verdict.level for verdict in found]
    counts = [count(levels.count(level), level) for level in ("problem", "warning") if level in levels]
    verdict = "cannot be used like this" if "problem" in levels else "can be used"
    return ", ".join([verdict, *counts])


def _json(verdict: Verdict) -> dict[str, Any]:
    return {
        "check": verdict.check,
        "level": verdict.level,
        "text": verdict.text,
        "advice": verdict.advice,
        "seconds": verdict.seconds,
        **({"facts": dict(verdict.facts)} if verdict.facts else {}),
    }


def _saving_s(tier: Path) -> float | None:
    """p95 of how long saves of this machine took until they were on its disk; None without any."""
    from ckptmgr.core.errors import ConfigError
    from ckptmgr.transfer.metrics import read_metrics

    with contextlib.suppress(ConfigError, OSError):
        saves = (record for record in read_metrics(tier) if record.get("kind") == "save")
        times = sorted(sum(_number(record.get(name)) for name in ("stall_s", "write_s")) for record in saves)
        if times:
            return times[min(len(times) - 1, int(len(times) * 0.95))]
    return None


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
