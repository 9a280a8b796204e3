"""Capture the training state into a snapshot, write it to files, and put it back.

A state is a mapping from a name to a *piece*: an object with `state_dict()` and `load_state_dict()`, or a plain tree of tensors and values.
Each piece is one file: `<name>.json` if JSON gives it back exactly, `<name>.safetensors` if it is a flat dict of tensors such as a model's state
dict, and `<name>.pt` otherwise, which loads with `weights_only=True`. The random states are one more piece, `rng`. Nothing here unpickles
arbitrary objects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch

from ckptmgr.backends.atomic import fsync_dir, make_dirs_durable, write_atomic
from ckptmgr.core.checksums import Digests, digest_bytes
from ckptmgr.core.errors import (
    CheckpointError,
    CkptmgrError,
    ConfigError,
    IncompatibleStateError,
)
from ckptmgr.training import fitting
from ckptmgr.training.output import DigestingFile
from ckptmgr.training.rank_rng import capture_ranks, restore_ranks
from ckptmgr.training.restore_report import RestoreReport, is_stateful, piece_kinds
from ckptmgr.training.torch_files import load_file, one_line, unreadable
from ckptmgr.training.trees import HostMemory, TreeCopier, from_json, to_json
from ckptmgr.training.weights import SUFFIX as SAFETENSORS
from ckptmgr.training.weights import Weights, read_weights

__all__ = [
    "RNG",
    "FileWritten",
    "Hold",
    "RestoreReport",
    "Snapshot",
    "capture",
    "collect",
    "copy_trees",
    "load_file",
    "piece_kinds",
    "restore",
    "write",
]

RNG = "rng"
_PIECE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_JSON, _TORCH = ".json", ".pt"
_SUFFIXES = (_JSON, _TORCH, SAFETENSORS)


class Hold(Protocol):
    """What a snapshot has on memory that others will use after it."""

    def ready(self) -> None:
        """See `Snapshot.ready`."""

    def release(self) -> None:
        """See `Snapshot.release`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A deep copy of the training state in host memory; training may go on at once.

    Attributes:
        pieces: the tree of each piece, made of CPU tensors and plain values; shares no memory with the live objects.
        size_bytes: the bytes of all tensors, about what the files will take.
        hold: on memory that was lent; None if the snapshot's memory is its own.
    """

    pieces: Mapping[str, Any]
    size_bytes: int
    hold: Hold | None = field(default=None, repr=False, compare=False)

    def ready(self) -> None:
        """Block until the bytes are there: copies from a GPU may be on their way. Any thread; needed before `pieces` is read.

        Raises:
            RuntimeError: the snapshot was released.
        """
        if self.hold is not None:
            self.hold.ready()

    def release(self) -> None:
        """Give its memory back for the next snapshot; `pieces` must not be read any more. Any thread; again is a no-op."""
        if self.hold is not None:
            self.hold.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWritten:
    """One file of a written snapshot: its `path` relative to the directory, and what it holds."""

    path: str
    digests: Digests


def capture(pieces: Mapping[str, Any], *, rng: bool = True) -> Snapshot:
    """Copy every piece, and the random states unless `rng` is false, to host memory.

    Blocks until the copy is complete; call it in the training thread at a step edge. Tensors that share memory share it in the
    copy, each storage copied once. No random number is drawn.

    Raises:
        ConfigError: a name that cannot be a file name, or a value that could not be loaded again without pickle.
        CheckpointError: a piece's `state_dict()` raised.
    """
    return copy_trees(collect(pieces, rng=rng))


def collect(pieces: Mapping[str, Any], *, rng: bool) -> dict[str, Any]:
    """The tree of each piece, and of the random states; nothing is copied yet. Raises as `capture`, except for what is in the trees."""
    trees: dict[str, Any] = {}
    for name, piece in pieces.items():
        _check_name(name, rng=rng)
        trees[name] = _state_of(name, piece)
    if rng:
        trees[RNG] = capture_ranks()
    return trees


def copy_trees(trees: Mapping[str, Any], *, memory: HostMemory | None = None, hold: Hold | None = None) -> Snapshot:
    """Copy `trees`, made by `collect`, into `memory` (by default memory of their own), which `hold` is a hold on.

    Raises:
        ConfigError: a value that could not be loaded again without pickle.
    """
    copier = TreeCopier(memory)
    copies = {name: copier.copy(tree, name) for name, tree in trees.items()}
    return Snapshot(pieces=copies, size_bytes=copier.size_bytes, hold=hold)


def write(snapshot: Snapshot, directory: Path) -> list[FileWritten]:
    """Write one file per piece into `directory`, which is created; durable on return, names included.

    The digests are those of the bytes that were written, taken on the way; nothing is read back. Not atomic: a failure or a kill leaves some
    of the files, so the directory counts only once its manifest exists (I1). May run in another thread than the capture.

    Raises:
        DiskFullError, AccessDeniedError, PermanentBackendError: some files are missing or short.
        CheckpointError: torch could not serialise a piece.
    """
    snapshot.ready()
    make_dirs_durable(directory)
    written = [_write_piece(name, tree, directory, snapshot.size_bytes) for name, tree in snapshot.pieces.items()]
    fsync_dir(directory)
    return written


def restore(directory: Path, pieces: Mapping[str, Any], *, strict: bool = True, rng: bool = True) -> RestoreReport:
    """Put the files of `directory` back into `pieces`, in the order of `pieces`, and the random states last.

    Objects are loaded in place by their `load_state_dict`; pieces that are plain values are not touched, what was saved for them is in
    `report.values`. A checkpoint without random states (captured with `rng=False`) reports `rng` as missing.

    Args:
        strict: refuse, before anything is loaded, a checkpoint that lacks a piece.
        rng: set the random states too.

    Raises:
        IncompatibleStateError: a piece is missing (`strict`) or does not fit; pieces before it, and a part of it, are loaded already.
        IntegrityError: a file cannot be read as what it should be.
    """
    files = _files_of(directory)
    missing = tuple(name for name in pieces if name not in files)
    if missing and strict:
        present = ", ".join(sorted(files)) or "nothing"
        raise IncompatibleStateError(
            f"the checkpoint {directory.name!r} has no state for {', '.join(map(repr, missing))}; it holds {present}",
            hint="leave these out, or restore with strict=False and let them start anew",
            piece=missing[0],
        )
    values: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    restored = [name for name in pieces if name in files]
    scheduled = any(map(_sets_learning_rates, pieces.values()))
    for name in restored:
        tree = _read(files[name], name, pieces[name])
        if is_stateful(pieces[name]):
            notes += _load(name, pieces[name], tree, scheduled=scheduled)
        else:
            values[name] = tree
    if rng and RNG in files:
        notes += restore_ranks(_read(files[RNG], RNG, None))
        restored.append(RNG)
    elif rng:
        missing = (*missing, RNG)
    return RestoreReport(
        restored=tuple(restored),
        missing=missing,
        unexpected=tuple(sorted(set(files) - set(pieces) - {RNG})),
        values=values,
        notes=notes,
    )


def _check_name(name: str, *, rng: bool) -> None:
    if not isinstance(name, str) or not _PIECE_NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a piece of the state",
            hint="use letters, digits, '_', '-' and '.', at most 100 of them",
        )
    if rng and name == RNG:
        raise ConfigError(f"the piece {RNG!r} is taken by the random states", hint="give your piece another name")


def _state_of(name: str, piece: Any) -> Any:
    if not is_stateful(piece):
        return piece
    try:
        return piece.state_dict()
    except CkptmgrError:
        raise
    except Exception as error:  # it is the user's code: whatever it raises is a failed save, not a failed training (I9)
        raise CheckpointError(
            f"the state of {name!r} cannot be captured: state_dict() raised {error!r}", piece=name
        ) from error


def _write_piece(name: str, tree: Any, directory: Path, needed_bytes: int) -> FileWritten:
    data = to_json(tree)
    if data is not None:
        path = directory / f"{name}{_JSON}"
        write_atomic(path, data)
        return FileWritten(path=path.name, digests=digest_bytes(data))
    weights = Weights.of(tree)
    path = directory / f"{name}{_TORCH if weights is None else SAFETENSORS}"
    with DigestingFile(path, needed_bytes=needed_bytes) as file:
        try:
            if weights is not None:
                weights.write(file)
            else:
                torch.save(tree, cast("IO[bytes]", file))  # write() and flush() are all that it uses
        except RuntimeError as error:
            raise CheckpointError(f"cannot write {str(path)!r}: {one_line(error)}", key=str(path)) from error
        return FileWritten(path=path.name, digests=file.finish())


def _files_of(directory: Path) -> dict[str, Path]:
    """The file of each piece in `directory`; other files are none of ours."""
    try:
        paths = sorted(
            path for path in directory.iterdir() if path.suffix in _SUFFIXES and not path.name.startswith(".")
        )
    except OSError as error:
        raise IncompatibleStateError(
            f"{str(directory)!r} cannot be read as a checkpoint: {error.strerror}",
            hint="give the directory that `ckptmgr resume` printed",
            piece="",
        ) from error
    return {path.stem: path for path in paths}


def _read(path: Path, name: str, piece: Any) -> Any:
    if path.suffix == SAFETENSORS:
        # A module copies its weights into its own; others may keep what they are given, and get memory that is no file's.
        return read_weights(path, piece=name, mapped=isinstance(piece, torch.nn.Module))
    if path.suffix == _TORCH:
        return load_file(path, piece=name)
    try:
        return from_json(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, name, error) from error


def _sets_learning_rates(piece: Any) -> bool:
    return isinstance(piece, torch.optim.lr_scheduler.LRScheduler) or bool(getattr(piece, "sets_learning_rates", False))


def _load(name: str, piece: Any, tree: Any, *, scheduled: bool) -> tuple[str, ...]:
    """Load `tree` into `piece`; what of the piece's own settings that has replaced."""
    fitting.check(name, piece, tree)
    try:
        replaced = fitting.differences(name, piece, tree, scheduled=scheduled)
        piece.load_state_dict(tree)
    except CkptmgrError:
        raise
    except Exception as error:  # user code may raise anything; all of it means that this state does not fit this object
        raise fitting.misfit(name, one_line(error)) from error
    return replaced
