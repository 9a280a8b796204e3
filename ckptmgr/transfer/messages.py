"""What the trainer and its transfer process say to each other. Pickled, over a socket pair that nobody else has."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ckptmgr.backends.base import Backend
from ckptmgr.backends.retry import RetryPolicy
from ckptmgr.core.errors import CkptmgrError, UploadError
from ckptmgr.core.layout import Stem
from ckptmgr.core.records import RunRecord
from ckptmgr.transfer.tidying import Retention

# --- to the transfer process ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The first message: what to replicate, where to.

    Attributes:
        url: the run in the store; `record` is its run.json, so that nothing is asked of the store to begin with.
        local_dir: the local tier.
        attempt: the trainer's; retention is done in its name.
        wrap_backend: puts a backend around the store's; by reference, so it must be importable.
        linger_s: how long to go on when the trainer is gone.
        pause_s: how long a failure that may pass keeps the queue waiting.
        log_level: of the trainer's logger `ckptmgr`.
        labels: of the records that the process appends to the tier's metrics once the trainer is gone.
    """

    url: str
    record: RunRecord
    local_dir: str
    attempt: int
    retention: Retention
    retry: RetryPolicy
    wrap_backend: Callable[[Backend], Backend] | None
    linger_s: float
    pause_s: float
    log_level: int
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify:
    """Something may be pending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hurry:
    """The machine is about to go: the newest save first, all others wait, no clean-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Upload what is pending, then end."""


Command: TypeAlias = Task | Notify | Hurry | Close

# --- from the transfer process --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The task was understood; the loop runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The task cannot be done in a process of its own."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Where the upload under way is; `stem` None: there is none."""

    stem: Stem | None
    sent_bytes: int = 0
    total_bytes: int = 0
    rate_bytes_s: float = 0.0
    eta_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A save is in the store.

    Attributes:
        seconds: how long that took, waiting for retries included.
        sent_bytes: what was sent by this try; less than `size_bytes` when an earlier one had come far.
        retries: requests that were repeated meanwhile.
        created_at: when it was saved, ISO 8601; information.
        lag_s: seconds from then to the commit; None when that is not known.
    """

    stem: Stem
    seconds: float
    size_bytes: int
    sent_bytes: int
    retries: int
    created_at: str | None = None
    lag_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Something went wrong and was logged. `stem`: the upload that gave up for now; None: anything else, such as a clean-up."""

    error: CkptmgrError
    stem: Stem | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """A save is in the hands of another process of this machine; it is looked at again."""

    stem: Stem


@dataclass(frozen=True, slots=True, kw_only=True)
class Superseded:
    """A newer attempt of the run exists (I12)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A record of a logger of ours."""

    name: str
    level: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Nothing is left to do, or to be done now; the process ends."""


Event: TypeAlias = Ready | Refused | Moved | Committed | Failed | Busy | Superseded | Logged | Ended

# --- as bytes -------------------------------------------------------------------------------------------------------------

# A task must fit the socket's buffer: its sender does not wait for a reader.
_MOST_TASK_BYTES = 64 << 10


def encode(message: Command | Event) -> bytes:
    """The bytes of a message. An error that cannot be pickled, such as one of the user's, is told by its text."""
    try:
        return pickle.dumps(message)
    except Exception:
        if not isinstance(message, Failed):
            raise
        told = UploadError(str(message.error.args[0] if message.error.args else message.error), hint=message.error.hint)
        return pickle.dumps(Failed(error=told, stem=message.stem))


def decode(data: bytes) -> object:
    """The message. What is referred to must be importable here; raises whatever a foreign object's unpickling raises."""
    return pickle.loads(data)


def why_not_portable(task: Task) -> str | None:
    """Why `task` cannot be given to another process; None if it can: it holds a lambda, a class of the program's main module, or the like."""
    try:
        data = pickle.dumps(task)
    except Exception as error:  # noqa: BLE001 - whatever a foreign object's pickling raises
        return str(error)
    # The transfer process must not import the user's program: that would run it again.
    if b"__main__" in data:
        return "it uses something of the program's main module"
    return f"what it is given takes {len(data)} bytes" if len(data) > _MOST_TASK_BYTES else None
