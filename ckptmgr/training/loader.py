"""A loader for training loops of one's own that knows where it is, and comes back there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from ckptmgr.core.conditions import Conditions
from ckptmgr.training.data_position import DataPosition
from ckptmgr.training.dataset_facts import dataset_facts
from ckptmgr.training.rng import capture_rng, restore_rng


class ResumableLoader:
    """Wraps a DataLoader (or anything that can be iterated once per epoch) so that a resumed loop gets the very batches it would have got.

        loader = ResumableLoader(DataLoader(…, shuffle=True))
        state = {"model": model, "optimizer": optimizer, "data": loader}
        manager.restore(state)
        for epoch in range(loader.epoch, epochs):
            for batch in loader:
                …
                optimizer.step()
                manager.save(step, state)

    Each `for` runs the present epoch, after a restore the rest of it; without one it is the loader's own `iter`, bit for bit. `set_epoch` is
    called for you. Once `load_state_dict` was called, the next `iter` goes to the saved place and then sets the random states back to what
    they were when it was called: those of the save, if nothing was drawn since the restore. That making an iterator draws from them
    (every `iter(DataLoader)` does) has no effect then.

    A batch counts as used as soon as it is handed out, so save where its step is done: after `optimizer.step()`, or after the loop. With
    accumulation, save only where no gradients are pending. A save in the last iteration of an epoch comes back to an epoch without a batch,
    so that what follows the inner loop is done then; a save after the inner loop comes back to the next epoch. An epoch that is left by
    `break` ends with the next `iter`, or with `end_epoch()`: call that before a save in between.

    Not thread-safe, and one iteration at a time.

    Args:
        loader: what gives the batches.
        skip: how to come back, see `DataPosition`.
        on_mismatch: what to do when the first batch after a resume is not that which the save expected: "log" an error and go on, or "raise".
        proof: whether a save notes a digest of the next batch, to be compared after a resume; it waits for that batch.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        skip: Literal["auto", "indices", "replay"] = "auto",
        on_mismatch: Literal["log", "raise"] = "log",
        proof: bool = True,
    ) -> None:
        self.loader = loader
        self.position = DataPosition(loader, skip=skip, on_mismatch=on_mismatch, proof=proof)
        # Stands for the iteration under way. Not that itself, which knows us: see `PresentEpoch.fetch_ahead` for what a cycle costs.
        self._running: object | None = None
        self._to_find = False

    @property
    def epoch(self) -> int:
        """The epoch that the next `iter` runs or goes on with, from 0; within an epoch, that one."""
        return self.position.epoch

    @property
    def batches(self) -> int:
        """Batches of this epoch that were handed out."""
        return self.position.batches

    @property
    def proof(self) -> str:
        """What the first batch after a resume showed; see `DataPosition.proof`."""
        return self.position.proof

    def conditions(self) -> Conditions:
        """What is known of the data: batch size, length and fingerprint of the dataset."""
        facts = dataset_facts(self.loader)
        return Conditions(
            batch_size=facts.batch_size,
            dataset_length=facts.dataset_length,
            dataset_fingerprint=facts.dataset_fingerprint,
        )

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        length = self.position.length
        if length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return length

    def __iter__(self) -> Iterator[Any]:
        if self._running is not None:
            # Left by `break`, or by an exception that the caller survived.
            self.end_epoch()
        rng = capture_rng() if self._to_find else None
        if rng is not None:
            self.position.warm_up()
            restore_rng(rng)
        self.position.begin(rng)
        self._to_find = False
        self._running = object()
        return _Epoch(self, self._running)

    def end_epoch(self) -> None:
        """Go to the start of the next epoch, if there is one that was begun and not ended."""
        if self._running is not None:
            self._running = None
            self.position.finish_epoch()

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values: this batch, and none after it, counts as used."""
        return self.position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved position; the next `iter` goes there. An iteration that is under way ends.

        Raises:
            IncompatibleStateError: it is not the state of such a loader.
        """
        self._running = None
        self.position.load_state_dict(state)
        self._to_find = True

    def close(self) -> None:
        """Let go of the iterator and its worker processes; the position stays, and the next `iter` goes on from there."""
        if self._running is not None:
            self._running = None
            self.position.close()
            self._to_find = True

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # before __init__, as in a copy
            raise AttributeError(name)
        return getattr(self.loader, name)


class _Epoch(Iterator[Any]):
    """One iteration over the rest of an epoch."""

    def __init__(self, loader: ResumableLoader, mark: object) -> None:
        self._loader = loader
        self._mark = mark

    def __next__(self) -> Any:
        if self._loader._running is not self._mark:
            raise StopIteration
        position = self._loader.position
        taken = position.take(1)
        if not taken:
            self._loader.end_epoch()
            raise StopIteration
        position.advance(1)
        return taken[0]
