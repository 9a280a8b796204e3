"""Files of `torch.save`, read without running what is in them: tensors, plain values, and NumPy's numbers and arrays."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from typing import Any

import torch

from ckptmgr.core.errors import IncompatibleStateError, IntegrityError


def load_file(path: str | os.PathLike[str], *, piece: str = "", allow: Iterable[Any] = ()) -> Any:
    """What `torch.save` wrote to `path`, with its tensors on the CPU; whoever wrote it, it runs no code (K074).

    Loaded with `weights_only=True`. Beyond what torch allows then, NumPy's arrays, numbers and dtypes are let through, under the module names of
    NumPy 1 and 2: random states (Hugging Face's `rng_state.pth`), schedulers, metrics and optimizers hold them.

    Args:
        piece: the name of what the file holds, for errors.
        allow: further classes and functions to let through. They are run with what the file says: name only those you trust with that.

    Raises:
        IncompatibleStateError: it holds other Python objects; nothing of it was loaded, the first one is named.
        IntegrityError: it is no such file, or a damaged one, or cannot be read.
    """
    path = os.fspath(path)
    name = os.path.basename(path)
    try:
        with torch.serialization.safe_globals([*_numpy_globals(), *allow]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise IncompatibleStateError(
            f"{name} holds Python objects, which are not loaded: {_refusal(error)}",
            hint="only checkpoints made of tensors and plain values can be restored",
            piece=piece,
        ) from error
    except Exception as error:  # damaged bytes, read as pickle, raise whatever the instructions in them come to
        raise unreadable(path, piece, error) from error


def unreadable(path: str | os.PathLike[str], piece: str, error: BaseException) -> IntegrityError:
    """The error for a file that is not what it should be."""
    what = os.path.basename(path) + (f" of {piece!r}" if piece else "")
    return IntegrityError(
        f"{what} cannot be read: {one_line(error)}",
        hint="run `ckptmgr verify` on the checkpoint and resume from an older one",
        key=os.fspath(path),
    )


def one_line(error: BaseException, *, limit: int = 400) -> str:
    """What `error` says, of torch's many lines the beginning, up to `limit` characters; its type if it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[:limit]}…"


def _refusal(error: pickle.UnpicklingError) -> str:
    """What torch met, without its page of advice before and after it, which is to load everything."""
    text = one_line(error, limit=2000)
    _, found, reason = text.partition("WeightsUnpickler error: ")
    return reason.partition(" Please ")[0][:400] if found else text[:400]


def _numpy_globals() -> list[Any]:
    """NumPy's numbers and arrays: they are data."""
    try:
        import numpy as np
    except ImportError:
        return []
    multiarray: Any = (np._core if hasattr(np, "_core") else np.core).multiarray
    dtypes = {type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSU"}
    # Files written under NumPy 1 name its functions by their old module, and those of NumPy 2 read under 1 by a new one.
    functions = [
        (getattr(multiarray, name), f"numpy.{core}.multiarray.{name}")
        for name in ("_reconstruct", "scalar")
        for core in ("core", "_core")
    ]
    return [np.ndarray, np.dtype, *functions, *dtypes]
