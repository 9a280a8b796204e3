"""The state of every random number generator that a training step may draw from, as values that load without pickle."""

from __future__ import annotations

import importlib
import random
from collections.abc import Mapping
from typing import Any

import torch

from ckptmgr.core.errors import IncompatibleStateError


def capture_rng() -> dict[str, Any]:
    """The states of Python's, NumPy's (if installed), torch's CPU and each CUDA device's default generator, at this moment.

    A tree of CPU tensors and plain values that shares no memory with the generators. CUDA's are left out while CUDA is not in use: asking
    for them would create a context on the device.
    """
    version, words, gauss_next = random.getstate()
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss_next": gauss_next},
        "numpy": _capture_numpy(),
        "torch": torch.get_rng_state(),
        "cuda": _capture_cuda(),
    }


def same_rng(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two results of `capture_rng` are of the same states."""
    return _same(one, other)


def restore_rng(states: Mapping[str, Any]) -> tuple[str, ...]:
    """Set every generator to what `capture_rng` returned.

    Returns:
        What could not be set because it is not on this machine: fewer GPUs, no NumPy. Those generators are left as they are.

    Raises:
        IncompatibleStateError: `states` is not such a tree; some generators may be set already.
    """
    try:
        notes = [*_restore_numpy(states["numpy"]), *_restore_cuda(states["cuda"])]
        torch.set_rng_state(states["torch"])
        python = states["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss_next"]))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise IncompatibleStateError(
            f"the random states of the checkpoint do not fit this machine: {error!r}",
            hint="restore without them (the run then goes on with other random numbers) or use the versions it was saved with",
            piece="rng",
        ) from error
    return tuple(notes)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _numpy_random() -> Any:
    try:
        return importlib.import_module("numpy.random")
    except ImportError:
        return None


def _capture_numpy() -> dict[str, Any] | None:
    numpy_random = _numpy_random()
    if numpy_random is None:
        return None
    return {key: _plain(value) for key, value in numpy_random.get_state(legacy=False).items()}


def _restore_numpy(state: Mapping[str, Any] | None) -> list[str]:
    if state is None:
        return []
    numpy_random = _numpy_random()
    if numpy_random is None:
        return ["NumPy is not installed here: its random state was not restored"]
    numpy_random.set_state({key: _unplain(value) for key, value in state.items()})
    return []


def _plain(value: Any) -> Any:
    """Arrays as their dtype and whole numbers, so that neither pickle nor NumPy's module paths get into the file."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    return value


def _unplain(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) == {"dtype", "values"}:
        return importlib.import_module("numpy").array(value["values"], dtype=value["dtype"])
    return {key: _unplain(item) for key, item in value.items()}


def _capture_cuda() -> list[torch.Tensor]:
    cuda: Any = torch.cuda  # typed only in part
    return list(cuda.get_rng_state_all()) if cuda.is_available() and cuda.is_initialized() else []


def _restore_cuda(states: list[torch.Tensor]) -> list[str]:
    if not states:
        return []
    count = torch.cuda.device_count()
    for device, state in enumerate(states[:count]):
        torch.cuda.set_rng_state(state, device)
    if count < len(states):
        return [
            f"random states of {len(states)} CUDA devices were saved and {count} devices are here: the rest was not restored"
        ]
    return []


class CpuMark:
    """The states of Python's, NumPy's and torch's CPU generators at a moment, to go back to within this process.

    Cheap enough to be taken for every batch: less than 0.1 ms, and no call into a driver.
    """

    def __init__(self) -> None:
        self._python: Any = random.getstate()
        numpy_random = _numpy_random()
        self._numpy: Any = None if numpy_random is None else numpy_random.get_state(legacy=False)
        self._torch = torch.get_rng_state()

    def go_back(self) -> None:
        """Set the generators to what they were."""
        random.setstate(self._python)
        if self._numpy is not None:
            _numpy_random().set_state(self._numpy)
        torch.set_rng_state(self._torch)


class RngMark(CpuMark):
    """As `CpuMark`, with each CUDA device's default generator. Cheaper to take than `capture_rng`, which makes values to save."""

    def __init__(self) -> None:
        super().__init__()
        self._cuda = _capture_cuda()

    def go_back(self) -> None:
        """Set every generator to what it was."""
        super().go_back()
        _restore_cuda(self._cuda)
