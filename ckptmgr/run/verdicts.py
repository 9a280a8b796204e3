"""What the doctor says: one verdict per question."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ckptmgr.core.errors import CkptmgrError, ConfigError

Level = Literal["ok", "warning", "problem", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One question's answer.

    Attributes:
        check: its name, for scripts.
        level: `ok`; `warning`: works, but not as well as it could; `problem`: the store cannot be used like this; `unknown`: could not be found out.
        text: what was found.
        advice: what to do; "" if nothing.
        seconds: that the answer took; None where that says nothing.
        facts: what was found, for scripts.
    """

    check: str
    level: Level
    text: str
    advice: str = ""
    seconds: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def judged(check: str, call: Callable[[], Verdict], *, refused: Level = "problem") -> Verdict:
    """The verdict of `call`, with the time it took; what the store refused is one too.

    Args:
        refused: the level of a refusal: whether the store can be used without what was asked for.

    Raises:
        ConfigError: from `call`.
    """
    started = time.monotonic()
    try:
        return replace(call(), seconds=time.monotonic() - started)
    except ConfigError:
        raise
    except CkptmgrError as error:
        found = Verdict(check=check, level=refused, text=error.message, advice=error.hint)
    except Exception as error:  # noqa: BLE001 - one question that we fail to ask must not hide the answers to the others
        found = Verdict(
            check=check, level="unknown", text=f"{type(error).__name__}: {error}", advice="please report it"
        )
    return replace(found, seconds=time.monotonic() - started)
