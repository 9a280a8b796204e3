"""Where in the data a Lightning training is: its loaders are iterated through objects that know, and come back there.

Lightning makes the iterator of the first epoch before its first hook, of a later one after `on_train_epoch_start`, and of a resumed one before anything
was restored; without help a plain loader starts its epoch again. Here the true iterator is made when its first batch is asked for: by then everything
that may draw random numbers before it has done so, in a resumed run as in an uninterrupted one. Imports no Lightning.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ckptmgr.core.conditions import Conditions
from ckptmgr.training.data_position import DataPosition
from ckptmgr.training.dataset_facts import dataset_facts
from ckptmgr.training.loader import ResumableLoader
from ckptmgr.training.random_sources import generators
from ckptmgr.training.rng import RngMark, capture_rng, restore_rng

_log = logging.getLogger(__name__)

_NOT_FORWARDED = frozenset({"loader", "position", "state_dict", "load_state_dict"})


class TrainingData:
    """The data of one `trainer.fit`: the loaders that it iterates, and the state that a resumed one begins with.

    Attributes:
        moment: the random states of the save, until something has drawn from them.
    """

    def __init__(self) -> None:
        self.moment: Mapping[str, Any] | None = None
        self._loaders: list[LoaderInUse] = []
        self._saved: list[Mapping[str, Any]] = []
        self._together: Any = None
        self._trainer: Any = None

    def attach(self, trainer: Any) -> bool:
        """Have `trainer` iterate its training loaders through this, whenever it makes them; False if this Lightning has no place for that."""
        source = getattr(getattr(trainer, "fit_loop", None), "_data_source", None)
        if source is None or not callable(getattr(source, "dataloader", None)):
            return False
        self._trainer = trainer
        ask = type(source).dataloader
        combined = _combined_loader(type(trainer).__module__.split(".")[0])

        def dataloader() -> Any:
            given = ask(source)
            # Lightning leaves alone what is such an object already, and hands the loaders back when it has added its samplers.
            mode = getattr(given, "_mode", None)
            loaders = given.iterables if mode is not None else given
            self._together = combined(self, loaders, mode or "max_size_cycle")
            return self._together

        source.dataloader = dataloader
        return True

    def in_use(self, loaders: list[Any]) -> list[Any]:
        """`loaders`, each as an object that knows where it is; those of a resumed run go to the saved place."""
        found = [LoaderInUse(each, self) for each in loaders]
        if self._saved and len(self._saved) != len(found):
            _log.warning(
                "the checkpoint was made with %d training loaders, there are %d: they begin anew",
                len(self._saved),
                len(found),
            )
            self._saved = []
        for loader, state in zip(found, self._saved, strict=False):
            loader.come_back_to(state)
        self._saved = []
        self._loaders = found
        return found

    @property
    def fetches_ahead(self) -> bool:
        """Whether Lightning takes each batch one step before it uses it: it does when it cannot tell the last batch by its number."""
        try:
            len(self._together)
        except (TypeError, OverflowError, NotImplementedError):
            return True
        return False

    @property
    def epoch(self) -> int:
        """The number of the epoch, as Lightning tells it to samplers."""
        return int(self._trainer.fit_loop.epoch_progress.current.processed)

    def restore_moment(self) -> None:
        """Set the random states of the save, if this is a resumed run and they were not set yet."""
        if self.moment is not None:
            restore_rng(self.moment)

    def batch_begins(self) -> None:
        """A batch goes into a training step."""
        for loader in self._loaders:
            loader.used += 1

    def epoch_is_over(self) -> None:
        """What is saved from here on begins with the next epoch."""
        for loader in self._loaders:
            loader.end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """The positions as they are between two steps; plain values and tensors."""
        ahead = self.fetches_ahead
        return {"loaders": [loader.saved(ahead=ahead) for loader in self._loaders]}

    def conditions(self, trainer: Any) -> Conditions:
        """What `trainer` and its data say of what it runs under; of several training loaders nothing."""
        known = Conditions(world_size=trainer.world_size, accumulation=trainer.accumulate_grad_batches)
        if len(self._loaders) != 1:
            return known
        data = dataset_facts(self.loaders[0])
        return replace(
            known,
            batch_size=data.batch_size,
            dataset_length=data.dataset_length,
            dataset_fingerprint=data.dataset_fingerprint,
        )

    def load_state_dict(self, state: Mapping[str, Any], moment: Mapping[str, Any]) -> None:
        """Take up what was saved, for the loaders that Lightning makes next; `moment` are the random states of the save."""
        self._saved = list(state["loaders"])
        self.moment = moment

    @property
    def proof(self) -> str:
        """What the first batch after a resume showed; see `DataPosition`."""
        return ", ".join(dict.fromkeys(str(getattr(loader.position, "proof", "")) for loader in self._loaders))

    @property
    def loaders(self) -> list[Any]:
        """The loaders that Lightning iterates, bare; none before it has begun to."""
        return [each.loader for each in self._loaders]


class LoaderInUse:
    """A loader, and where in it training is. Behaves as the loader itself in every other respect.

    Attributes:
        used: batches of this pass that went into a training step.
    """

    def __init__(self, loader: Any, data: TrainingData) -> None:
        self.loader = _bare(loader)
        self.position = DataPosition(self.loader)
        self.used = 0
        self._data = data
        self._running = False
        self._to_find = False
        # What to save of the edge before the batch that was fetched ahead; and, of a resumed run, the random states to fetch that one with.
        self._before: tuple[dict[str, Any], Mapping[str, Any]] | None = None
        self._before_next: Mapping[str, Any] | None = None

    def come_back_to(self, state: Mapping[str, Any]) -> None:
        """Go on at the saved place when the first batch is asked for."""
        self.position.load_state_dict(state["position"])
        self._before_next = state["before"]
        self._to_find = True
        self.used = self.position.batches

    def end_epoch(self) -> None:
        if self._running:
            self._running = False
            self.position.finish_epoch()
            self.used = 0

    def saved(self, *, ahead: bool) -> dict[str, Any]:
        """The position, without a batch that was fetched but not used."""
        if ahead and self._running and self._before is not None and self.used < self.position.batches:
            position, rng = self._before
            return {"position": position, "before": rng}
        return {"position": self.position.state_dict(), "before": None}

    def __iter__(self) -> Iterator[Any]:
        self.end_epoch()
        return _Pass(self)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_FORWARDED:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def state_dict(self) -> dict[str, Any]:
        """That there is one tells Lightning that an epoch can be gone on with. What is saved is `TrainingData.state_dict`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `state_dict`."""

    def fetch(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: there is none.
        """
        if not self._running:
            self._begin()
        if self._data.fetches_ahead:
            self._before = self.position.state_dict(), capture_rng()
        taken = self.position.take(1)
        if not taken:
            raise StopIteration
        self.position.advance(1)
        return taken[0]

    def _begin(self) -> None:
        self._running = True
        to_find, self._to_find = self._to_find, False
        if to_find and self.position.exhausted:
            # Saved in the last batch of an epoch, and Lightning has gone on to the next.
            self.position.finish_epoch()
            self.used = 0
        if to_find and self.position.batches:
            self._go_on()
            return
        if self._data.fetches_ahead:
            # Lightning has not called a hook yet. In other cases it has, and what was drawn since the uninterrupted run has drawn as well.
            self._data.restore_moment()
        self._data.moment = None
        if to_find:
            now = RngMark()
            self.position.warm_up()
            now.go_back()
        self.position.epoch = self._data.epoch
        self.position.begin()

    def _go_on(self) -> None:
        """Make the iterator in the middle of its epoch, and then set the random states of the moment in which its next batch is fetched."""
        before, self._before_next = self._before_next, None
        now = capture_rng()
        self.position.warm_up()
        if before is None:
            before, self._data.moment = self._data.moment or now, None
        self.position.begin(before)


class _Pass(Iterator[Any]):
    """One iteration over a loader. The true iterator is made at the first batch."""

    def __init__(self, loader: LoaderInUse) -> None:
        self._loader = loader

    def __next__(self) -> Any:
        return self._loader.fetch()


def evaluation_generators(loaders: Any) -> list[Any]:
    """The states of the generators that evaluation loaders own; `loaders` is what Lightning has, a loader or a collection of them."""
    return [generator.get_state() for loader in _leaves(loaders) for generator in generators(loader)]


def set_evaluation_generators(loaders: Any, states: list[Any]) -> None:
    """Set them to what `evaluation_generators` returned."""
    owned = [generator for loader in _leaves(loaders) for generator in generators(loader)]
    if len(owned) != len(states):
        _log.warning(
            "evaluation loaders own %d generators, the checkpoint has the states of %d: they are left alone",
            len(owned),
            len(states),
        )
        return
    for generator, state in zip(owned, states, strict=True):
        generator.set_state(state)


def _leaves(loaders: Any) -> list[Any]:
    if loaders is None:
        return []
    if isinstance(loaders, Mapping):
        return [leaf for each in loaders.values() for leaf in _leaves(each)]
    if isinstance(loaders, (list, tuple)):
        return [leaf for each in loaders for leaf in _leaves(each)]
    return [loaders]


def _bare(loader: Any) -> Any:
    return loader.loader if isinstance(loader, (LoaderInUse, ResumableLoader)) else loader


@lru_cache
def _combined_loader(package: str) -> Any:
    """Lightning's CombinedLoader with loaders that know where they are; `package` is the one whose Trainer is used."""
    name = "pytorch_lightning" if package == "pytorch_lightning" else "lightning.pytorch"
    base = sys.modules[f"{name}.utilities.combined_loader"].CombinedLoader

    class Together(base):  # type: ignore[misc, valid-type, unused-ignore]
        """What Lightning takes batches from."""

        def __init__(self, data: TrainingData, loaders: Any, mode: str) -> None:
            super().__init__(loaders, mode)
            self._data = data
            self._in_use = False

        def __iter__(self) -> Any:
            if not self._in_use:
                # By now Lightning's own samplers are in them.
                self._in_use = True
                base.flattened.fset(self, self._data.in_use(self.flattened))
            return super().__iter__()

        def _state_dicts(self) -> list[dict[str, Any]]:
            # Only of loaders that have one themselves, so that the checkpoint can be gone on with without us.
            return [loader.state_dict() for loader in self._stateful()]

        def _load_state_dicts(self, states: list[dict[str, Any]]) -> None:
            # A checkpoint that was made without us; with us, the position that is set later is the one that counts.
            for loader, state in zip(self._stateful(), states, strict=False):
                loader.load_state_dict(state)

        def _stateful(self) -> list[Any]:
            return [loader for loader in map(_bare, self.flattened) if _is_stateful(loader)]

    return Together


def _is_stateful(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
