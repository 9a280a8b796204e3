"""Where the batches of a loader get their random numbers from: the global generators, those that the loader owns, and others that are hidden."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from ckptmgr.core.errors import IncompatibleStateError
from ckptmgr.training.first_batch import digest
from ckptmgr.training.rng import capture_rng, restore_rng, same_rng

# Enough for datasets with their transforms. A list of a million samples is judged by its first ones.
_MOST_OBJECTS = 20_000
_MOST_ITEMS = 64
_LEAVES = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    type(None),
    torch.Tensor,
    torch.dtype,
    torch.device,
    types.ModuleType,
)
# Their code keeps no random generator of its own in globals: it draws from the global ones, or from what it is given.
_LIBRARIES = frozenset({"torch", "numpy", "pyarrow", "datasets", "pandas"}) | sys.stdlib_module_names
# Of the standard library, these may hold what a sample depends on; loggers, locks and files lead nowhere, or everywhere.
_HOLDING = frozenset({"builtins", "collections", "functools", "itertools", "random", "types"})


def holders(loader: Any) -> list[Any]:
    """The loader and everything in it that may own a generator or want the epoch's number, each once, in a fixed order."""
    found = [loader, getattr(loader, "sampler", None)]
    batch_sampler = getattr(loader, "batch_sampler", None)
    # Those of accelerate, for ranks, have another one in them.
    while batch_sampler is not None and all(batch_sampler is not each for each in found):
        found += [batch_sampler, getattr(batch_sampler, "sampler", None)]
        batch_sampler = getattr(batch_sampler, "batch_sampler", None)
    found.append(getattr(loader, "dataset", None))
    return list({id(holder): holder for holder in found if holder is not None}.values())


def generators(loader: Any) -> list[torch.Generator]:
    """Those that `holders` own as `generator`, each once."""
    found = [getattr(holder, "generator", None) for holder in holders(loader)]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def generator_states(loader: Any) -> list[torch.Tensor]:
    """The states of `generators`, in their order."""
    return [generator.get_state() for generator in generators(loader)]


def set_generators(loader: Any, states: Sequence[torch.Tensor]) -> None:
    """Set `generators` to what `generator_states` returned of such a loader, in any process.

    Raises:
        IncompatibleStateError: there is another number of them; none was set.
    """
    own = generators(loader)
    if len(own) != len(states):
        raise IncompatibleStateError(
            f"the loader has {len(own)} generators of its own, the checkpoint was made with {len(states)}",
            hint="build the loader as it was when the checkpoint was made",
            piece="data",
        )
    for generator, state in zip(own, states, strict=True):
        generator.set_state(state)


def set_epoch(among: Iterable[Any], epoch: int) -> None:
    """Tell the number of the epoch to those that want it."""
    for holder in among:
        if callable(getattr(holder, "set_epoch", None)):
            holder.set_epoch(epoch)


def hidden_in(loader: Any, known: Iterable[torch.Generator]) -> str | None:
    """The state between samples that the dataset of `loader`, or what collates its samples, keeps and no checkpoint knows, as `hidden_source` says."""
    try:
        return hidden_source([getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)], known)
    except Exception as error:  # noqa: BLE001 - other people's attributes; what cannot be looked at may hide something
        return f"the dataset cannot be looked through: {error!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The states of the global random generators and of a loader's own, at one moment.

    Attributes:
        rng: as `capture_rng` gives them.
        own: the loader's, in the order of `generators`.
    """

    rng: Mapping[str, Any]
    own: Sequence[torch.Tensor]

    @classmethod
    def now(cls, own: Iterable[torch.Generator]) -> Moment:
        """Of this moment."""
        return cls(rng=capture_rng(), own=[generator.get_state() for generator in own])

    def go_back(self, own: Iterable[torch.Generator]) -> None:
        """Set all generators to it."""
        restore_rng(self.rng)
        for generator, state in zip(own, self.own, strict=True):
            generator.set_state(state)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Moment) and same_rng(self.rng, other.rng) and self.has_own(other.own)

    __hash__ = None  # type: ignore[assignment]

    def has_own(self, own: Sequence[torch.Tensor]) -> bool:
        """Whether the loader's generators are as in `own`."""
        return len(own) == len(self.own) and all(map(torch.equal, own, self.own))

    def digest(self) -> str:
        """Of all states but those of GPUs, whose number may change; 64 hexadecimal digits."""
        return digest([{name: state for name, state in self.rng.items() if name != "cuda"}, list(self.own)])


def hidden_source(roots: Iterable[Any], known: Iterable[torch.Generator]) -> str | None:
    """What, reachable from `roots`, keeps a state from one sample to the next that is no global generator and none of `known`; None if nothing is seen.

    Random generators and iterators are looked for: in attributes, containers, closures, and in the globals that functions name. What a
    library keeps in its own memory is not seen, nor a counter. Calls nothing of theirs.

    Returns:
        Words for it, such as "a numpy.random.Generator in 'Noisy.rng'".
    """
    passed = {id(generator) for generator in known} | {id(torch.default_generator), *_global_numpy()}
    passed.add(id(getattr(random, "_inst", None)))
    open_: list[tuple[Any, str]] = [(root, type(root).__name__) for root in roots if root is not None]
    seen: set[int] = set()
    kept = []  # objects made on the way, whose ids must not be used again
    while open_ and len(seen) < _MOST_OBJECTS:
        value, where = open_.pop()
        if isinstance(value, _LEAVES) or id(value) in seen or id(value) in passed or _leads_nowhere(value):
            continue
        seen.add(id(value))
        kept.append(value)
        if _is_source(value):
            return f"a {type(value).__module__}.{type(value).__qualname__} in {where!r}".replace("builtins.", "")
        open_ += _within(value, where)
    return None


def _leads_nowhere(value: Any) -> bool:
    home = _home(type(value).__module__)
    return home not in _HOLDING and home in sys.stdlib_module_names


def _is_source(value: Any) -> bool:
    if isinstance(value, (random.Random, torch.Generator)) or hasattr(type(value), "__next__"):
        return True
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return False
    kinds = (numpy_random.Generator, numpy_random.RandomState, numpy_random.BitGenerator)
    return isinstance(value, kinds)


def _global_numpy() -> list[int]:
    numpy_random: Any = sys.modules.get("numpy.random")
    state = getattr(getattr(numpy_random, "mtrand", None), "_rand", None)
    return [] if state is None else [id(state), id(getattr(state, "_bit_generator", None))]


def _within(value: Any, where: str) -> Iterator[tuple[Any, str]]:
    """What `value` leads to, with words for where that is."""
    if isinstance(value, Mapping):
        yield from ((item, where) for item in islice(_values(value), _MOST_ITEMS))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((item, where) for item in islice(value, _MOST_ITEMS))
    elif isinstance(value, functools.partial):
        yield from ((item, where) for item in (value.func, value.args, value.keywords))
    elif isinstance(value, types.MethodType):
        yield from ((item, where) for item in (value.__self__, value.__func__))
    elif isinstance(value, types.FunctionType):
        yield from _within_function(value)
    elif isinstance(value, type):
        yield from _within_class(value)
    else:
        yield type(value), type(value).__name__
        attributes = getattr(value, "__dict__", {})
        yield from ((item, f"{type(value).__name__}.{name}") for name, item in list(attributes.items()))
        slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
        yield from ((getattr(value, name, None), f"{type(value).__name__}.{name}") for name in slots)


def _values(mapping: Mapping[Any, Any]) -> Iterator[Any]:
    # A mapping that is no dict may read files for its values.
    return iter(list(mapping.values())) if isinstance(mapping, dict) else iter(())


def _slots(kind: type) -> list[str]:
    declared = kind.__dict__.get("__slots__", ())
    return [declared] if isinstance(declared, str) else [name for name in declared if not name.startswith("__")]


def _within_function(function: types.FunctionType) -> Iterator[tuple[Any, str]]:
    name = function.__qualname__
    yield from ((item, name) for item in (function.__defaults__, function.__kwdefaults__))
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents, name
        except ValueError:  # not filled yet
            continue
    if _is_library(function.__module__):
        return
    for word in _names(function.__code__):
        if word in function.__globals__:
            yield function.__globals__[word], word


def _names(code: types.CodeType) -> set[str]:
    """The globals that it may use, in what is defined within it as well."""
    within = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*within)


def _within_class(kind: type) -> Iterator[tuple[Any, str]]:
    for base in kind.__mro__:
        if _is_library(base.__module__):
            continue
        for name, item in list(vars(base).items()):
            plain = item.__func__ if isinstance(item, (staticmethod, classmethod)) else item
            plain = plain.fget if isinstance(plain, property) else plain
            yield plain, f"{base.__name__}.{name}"


def _is_library(module: Any) -> bool:
    return _home(module) in _LIBRARIES | {""}


def _home(module: Any) -> str:
    # Some types of C extensions have something else there.
    return module.partition(".")[0] if isinstance(module, str) else ""
