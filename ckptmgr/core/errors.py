"""Every error that ckptmgr raises on purpose, and the exit code each one means.

    CkptmgrError                                                            1 unexpected
    ├─ ConfigError (ValueError)                                             2 usage, configuration, unknown scheme
    │  └─ MissingExtraError (ImportError) · ConfigFileError                 2
    ├─ ConflictError                                                        7 would mix or overwrite; nothing was changed
    ├─ ManifestError ── ManifestVersionError                                5 damaged / made by a newer ckptmgr
    ├─ IntegrityError ── ChecksumMismatchError · SizeMismatchError · SourceChangedError     5
    ├─ CheckpointError
    │  ├─ CheckpointNotFoundError (FileNotFoundError)                       3
    │  ├─ CheckpointExistsError (FileExistsError)                           7
    │  └─ NotCommittedError                                                 3 data is there, its manifest is not
    ├─ BackendError: backend, operation, key                                4 store unavailable or refused
    │  ├─ TransientBackendError ── ThrottledError · BackendTimeoutError (TimeoutError)
    │  └─ PermanentBackendError
    │     ├─ ObjectNotFoundError (FileNotFoundError) · ObjectExistsError (FileExistsError)
    │     └─ AccessDeniedError (PermissionError) · BucketNotFoundError · DiskFullError
    ├─ UploadError                                                          6 uploads still pending
    └─ ResumeError                                                          5
       └─ IncompatibleStateError                                            5
          └─ DriftError                                                     7 training's conditions differ, which was refused

Exit codes are those of the interface people script against; the command line maps an error to its class's `exit_code` and
prints its `lines`: mostly one, with what, where, why and, after a dash, what to do (`hint`).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptmgr.core.redaction import without_secrets

# Of many that failed, so many are told of.
_NAMED = 20


def _rebuild(cls: type[CkptmgrError], message: str, facts: dict[str, Any]) -> CkptmgrError:
    error = cls(message)
    for name, value in facts.items():
        setattr(error, name, value)
    return error


class CkptmgrError(Exception):
    """The base of all errors that ckptmgr raises on purpose.

    Keyword arguments become attributes (`error.key`, `error.step`, …), so that messages, logs and tests read the same facts.
    All errors pickle, attributes included: they cross from a worker to its supervisor.

    Args:
        message: what happened, where and why, in one line; credentials in a URL are taken out of it.
        hint: what the reader can do about it; "" when there is nothing to say.
        facts: attributes of this error.
    """

    exit_code = 1
    hint: str = ""

    def __init__(self, message: str = "", *, hint: str = "", **facts: Any) -> None:
        message = without_secrets(message)
        super().__init__(message)
        self.message = message
        self._facts = tuple(facts)
        if hint:
            self.hint = hint
        for name, value in facts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return f"{self.message} - {self.hint}" if self.hint else self.message

    @property
    def lines(self) -> tuple[str, ...]:
        """What it says, one line for each thing that is wrong."""
        return (str(self),)

    def __reduce__(self) -> tuple[Any, ...]:
        # A fact with the name of a builtin base's own attribute (`path` of ImportError, `filename` of OSError) is not in __dict__.
        facts = {**self.__dict__, **{name: getattr(self, name) for name in self._facts}}
        return _rebuild, (type(self), self.message, facts)


class ConfigError(CkptmgrError, ValueError):
    """A wrong argument, option, URL, selector or configuration value. `argument` is the name of the argument, where it is about one."""

    exit_code = 2
    argument: str = ""


class MissingExtraError(ConfigError, ImportError):
    """An optional package that this operation needs is not installed; the hint says what to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One thing that is wrong in a configuration.

    Attributes:
        file: its name; "" if it never was a file.
        line: counted from 1; None if it never was text.
        key: where it is, such as `callbacks[0].params.patience`; "" for the whole.
        what: what is wrong there.
        hint: what to do about it; "" when there is nothing to say.
    """

    file: str
    line: int | None
    key: str
    what: str
    hint: str

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        said = ": ".join(part for part in (where, self.key, self.what) if part)
        return f"{said} - {self.hint}" if self.hint else said


class ConfigFileError(ConfigError):
    """A configuration holds mistakes: `mistakes` are all of them, in the order of lines; as text, each is a line."""

    mistakes: tuple[Mistake, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """A line for each mistake."""
        return tuple(map(str, self.mistakes))


class ConflictError(CkptmgrError):
    """Going on would mix, overwrite or orphan something; nothing was changed."""

    exit_code = 7


class ManifestError(CkptmgrError):
    """A manifest cannot be read: not JSON, truncated, a wrong digest, or fields that make no sense."""

    exit_code = 5


class ManifestVersionError(ManifestError):
    """A manifest (or run.json) was written by a newer ckptmgr with a format this one does not know."""


class IntegrityError(CkptmgrError):
    """Stored bytes are not the bytes that a manifest describes."""

    exit_code = 5


class ChecksumMismatchError(IntegrityError):
    """A digest differs from the one recorded; `expected` and `actual` hold both."""


class SizeMismatchError(IntegrityError):
    """A size in bytes differs from the one recorded; `expected` and `actual` hold both.

    Where nobody counted to the end, there is `how` in place of `actual`: `fewer` or `more`.
    """


class SourceChangedError(IntegrityError):
    """A local file changed, shrank or vanished between being described and being uploaded (I10); `path` names it."""


class CheckpointError(CkptmgrError):
    """Something about one checkpoint."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint matches: an unknown selector, an empty run, or no run at the URL."""

    exit_code = 3


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A target already holds something else and replacing it was not asked for."""

    exit_code = 7


class NotCommittedError(CheckpointError):
    """Data lies there, but no manifest: by I1 it is not a checkpoint."""

    exit_code = 3


class BackendError(CkptmgrError):
    """A store refused or failed. Attributes: `backend` ("s3", "oss", "local", …), `operation`, `key`."""

    exit_code = 4
    backend: str = ""
    operation: str = ""
    key: str = ""


class TransientBackendError(BackendError):
    """It may work when tried again. For a write the outcome is unknown: read back before judging."""

    retry_after_s: float | None = None


class ThrottledError(TransientBackendError):
    """The store asked for fewer requests (503 SlowDown, 429); `retry_after_s` when it said for how long."""


class BackendTimeoutError(TransientBackendError, TimeoutError):
    """No answer in time, or the connection broke."""


class PermanentBackendError(BackendError):
    """Trying again will not help until somebody changes something."""


class ObjectNotFoundError(PermanentBackendError, FileNotFoundError):
    """No object has this key. The store was asked and said so (I7): a failed look-up is never this error."""

    exit_code = 3


class ObjectExistsError(PermanentBackendError, FileExistsError):
    """A create-only write was refused because the key exists; nothing was written."""

    exit_code = 7


class AccessDeniedError(PermanentBackendError, PermissionError):
    """The credentials are wrong, expired, or lack a permission."""


class BucketNotFoundError(PermanentBackendError):
    """The bucket (or the local parent directory) does not exist."""


class DiskFullError(PermanentBackendError):
    """A file system has no room left; `needed_bytes` and `free_bytes` when known."""


class UploadError(CkptmgrError):
    """A checkpoint did not become durable."""

    exit_code = 6


class ResumeError(CkptmgrError):
    """A checkpoint was found but the training state could not be restored from it."""

    exit_code = 5


class IncompatibleStateError(ResumeError):
    """The checkpoint does not fit the objects it should be loaded into; `piece` names the part."""


class DriftError(IncompatibleStateError):
    """Training runs under other conditions than the checkpoint's, which was to be refused; nothing was loaded. `drift` says what differs."""

    exit_code = 7
    drift: tuple[Any, ...] = ()


def in_one(errors: Sequence[CkptmgrError]) -> CkptmgrError:
    """One error for several: what each says in one line, and of those that say the same of other keys the keys alone; of the kind and with the facts of
    the first that does not pass by itself, else of the first.

    Its `errors` are all of them. A single one is returned as it is.
    """
    kind = next((error for error in errors if not isinstance(error, TransientBackendError)), errors[0])
    if len(errors) == 1:
        return kind
    alike: dict[str, list[CkptmgrError]] = {}
    for error in errors[:_NAMED]:
        alike.setdefault(_without_its_own(error), []).append(error)
    told = "; ".join(map(_told, alike.values()))
    more = f"; and {len(errors) - _NAMED} more" if len(errors) > _NAMED else ""
    facts = {name: getattr(kind, name) for name in kind._facts}
    return type(kind)(f"{len(errors)} failed: {told}{more}", hint=kind.hint, **{**facts, "errors": tuple(errors)})


def _without_its_own(error: CkptmgrError) -> str:
    """What `error` says without its key, and without how long it was tried."""
    key = getattr(error, "key", "")
    return re.sub(r" \(gave up after [^)]*\)", "", error.message.replace(key, "") if key else error.message)


def _told(alike: Sequence[CkptmgrError]) -> str:
    first, *others = alike
    if not others or not getattr(first, "key", ""):
        return "; ".join(error.message for error in alike)
    keys = [str(getattr(error, "key", "")) for error in alike]
    shared = len(posixpath.commonprefix(keys).rpartition("/")[0])
    return f"{first.message}; likewise {', '.join(key[shared:].lstrip('/') for key in keys[1:])}"
