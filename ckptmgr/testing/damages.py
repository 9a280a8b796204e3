"""Ways to spoil a stored checkpoint, and to put it right again."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from ckptmgr.core.layout import Stem, data_key
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.push import push
from ckptmgr.testing.outcomes import files_in
from ckptmgr.testing.stores import Store
from ckptmgr.testing.trees import write_tree

#: `stale` leaves the file of an older checkpoint in the newer one's place; `add` leaves the checkpoint's own files as they are.
Kind = Literal["flip", "truncate", "empty", "remove", "swap", "stale", "add"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What lies under some paths of a checkpoint instead; None for nothing. `wrong` are those of its own files that are not what they were."""

    stored: Mapping[str, bytes | None]
    wrong: frozenset[str]


def flipped(data: bytes, chance: random.Random) -> bytes:
    """`data`, which is not empty, with one bit anywhere in it the other way round."""
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def change(
    kind: Kind, path: str, files: Mapping[str, bytes], older: Mapping[str, bytes], chance: random.Random
) -> Change | None:
    """The damage of this kind to the file at `path`; None where there is none, such as a flipped bit of an empty file.

    Args:
        files: every file of the checkpoint.
        older: those of one before it.
    """
    right = files[path]
    if kind == "add":
        return Change(stored={f"{path}.more": right}, wrong=frozenset())
    if kind == "swap":
        others = [name for name, data in files.items() if data != right]
        if not others:
            return None
        other = chance.choice(others)
        return Change(stored={path: files[other], other: right}, wrong=frozenset({path, other}))
    spoiled: bytes | None = right
    if kind == "remove":
        spoiled = None
    elif kind == "stale":
        spoiled = older.get(path, next(iter(older.values())))
    elif right:
        spoiled = {"flip": flipped(right, chance), "truncate": right[: chance.randrange(len(right))], "empty": b""}[
            kind
        ]
    return None if spoiled == right else Change(stored={path: spoiled}, wrong=frozenset({path}))


@dataclass
class PushedTree:
    """Two steps of one trainer's tree in a run `run` of an empty store, each pushed whole, as it is.

    Attributes:
        stems: of both steps, the older first.
        files: what was pushed as each.
    """

    store: Store
    run: RunDirectory
    stems: list[Stem] = field(default_factory=list)
    files: list[dict[str, bytes]] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, store: Store, scratch: Path) -> PushedTree:
        """The tree `name` of `ckptmgr.testing.trees`, written below `scratch` first."""
        pushed = cls(store=store, run=RunDirectory.open_or_create(f"{store.url}/run"))
        for step in (100, 200):
            source = scratch / f"{name}-{step}"
            write_tree(name, source, step=step)
            pushed.stems.append(push(source, pushed.run, step=step).stem)
            pushed.files.append(files_in(source))
        return pushed

    @contextlib.contextmanager
    def damaged(self, spoiled: Change, root: Callable[[str, bytes | None], None] | None = None) -> Iterator[None]:
        """The newer checkpoint with this change, for the length of a `with` block."""
        put = root or self._put
        for path, data in spoiled.stored.items():
            put(path, data)
        yield
        for path in spoiled.stored:
            put(path, self.files[-1].get(path))

    def _put(self, path: str, data: bytes | None) -> None:
        key = f"run/{data_key(self.stems[-1], path)}"
        if data is None:
            self.store.delete(key)
        else:
            self.store.put(key, data)
