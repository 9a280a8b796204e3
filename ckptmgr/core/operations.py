"""The operations that the protocol yields and a driver performs: everything that a run directory's rules need of a store.

An operation that fails is answered by throwing the error into the protocol that yielded it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import FileEntry

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PutFile:
    """Upload the source of `entry` to `key`, checked against its digests on the way and in the store. Result: None."""

    key: str
    entry: FileEntry


@dataclass(frozen=True, slots=True)
class CopyFile:
    """Copy the object at `source` to `key` within the store, and prove there that it holds the bytes of `entry`.

    Result: True; False if that cannot be done, for whatever reason: then the file has to be sent.
    """

    source: str
    key: str
    entry: FileEntry


@dataclass(frozen=True, slots=True)
class IsStored:
    """Result: True if `key` holds the bytes of `entry` for certain, by what the store reports without a download; else False."""

    key: str
    entry: FileEntry


@dataclass(frozen=True, slots=True)
class Missing:
    """Result: the paths of those `entries` that do not lie below `prefix` in their size.

    One listing; what that does not show was looked at by itself, for some stores list late.
    """

    prefix: str
    entries: Sequence[FileEntry]


@dataclass(frozen=True, slots=True)
class Create:
    """Write `body` to `key` only if nothing is there. Result: None; `ObjectExistsError` if refused."""

    key: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Replace:
    """Write `body` to `key`, whatever is there. Result: None."""

    key: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Read:
    """Result: the bytes at `key`, or None if the store says that nothing is there."""

    key: str


@dataclass(frozen=True, slots=True)
class ListKeys:
    """Result: every key below `prefix`, sorted."""

    prefix: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove `key`; already gone is success. Result: None."""

    key: str


@dataclass(frozen=True, slots=True)
class DeleteAll:
    """Remove `keys`, in any order and in as few requests as the store allows; those already gone are success. Result: None.

    After an error any of them may be gone.
    """

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the file of `entry` from `key` to where it is wanted and check it. Result: None if it is right, else what is wrong with it."""

    key: str
    entry: FileEntry


@dataclass(frozen=True, slots=True)
class Record:
    """Note progress durably in the local journal, never in the store. Result: None.

    `confirmed`: the store holds `path`. `renamed`: the upload goes on as `stem`, with nothing confirmed. `uploaded`: committed as `stem`;
    only after this may the local copy go (I6). `dropped`: the checkpoint was pruned meanwhile.
    """

    event: Literal["confirmed", "renamed", "uploaded", "dropped"]
    stem: Stem
    path: str = ""


@dataclass(frozen=True, slots=True)
class Together:
    """Protocols that concern different keys, and so may go in any order and side by side; with each the number of bytes that it moves.

    Result: None, once all have ended. The first error is thrown; the others are then ended where they are, or have not begun.

    Attributes:
        to_the_end: do what can be done of the others first, and throw one error that names all that failed.
    """

    parts: tuple[tuple[int, Generator[Operation, Any, None]], ...]
    to_the_end: bool = False


Operation: TypeAlias = "PutFile | CopyFile | IsStored | Missing | Create | Replace | Read | ListKeys | Delete | DeleteAll | Fetch | Record | Together"


def one_by_one(protocol: Generator[Operation, Any, _T], *, backwards: bool = False) -> Generator[Operation, Any, _T]:
    """`protocol` with the parts of each `Together`, and the keys of each `DeleteAll`, done one after the other: for drivers that do one thing at a time.

    Args:
        backwards: the last part first.
    """
    answer: Any = None
    failure: CkptmgrError | None = None
    while True:
        try:
            operation = protocol.throw(failure) if failure is not None else protocol.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        answer = failure = None
        try:
            if isinstance(operation, Together):
                for _, part in reversed(operation.parts) if backwards else operation.parts:
                    yield from one_by_one(part, backwards=backwards)
            elif isinstance(operation, DeleteAll):
                for key in reversed(operation.keys) if backwards else operation.keys:
                    yield Delete(key)
            else:
                answer = yield operation
        except CkptmgrError as error:
            failure = error
