"""Coming back to a saved place of a loader: the states, the way, and the proof."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any, Literal

from ckptmgr.core.errors import IncompatibleStateError
from ckptmgr.training import fast_forward, lookahead
from ckptmgr.training.fast_forward import NotExact, Skip, Way, way_back
from ckptmgr.training.present_epoch import PresentEpoch
from ckptmgr.training.random_sources import Moment, generators, holders, set_epoch, set_generators
from ckptmgr.training.rng import restore_rng

_log = logging.getLogger(__name__)


class ComingBack:
    """Makes the iterator of the present epoch, and has it go on where a checkpoint, or this process, had left it.

    Args:
        epoch: the epoch; `number`, `used` and `start` are the place.
        skip: how to come to the middle of an epoch, see `DataPosition`.
        raises: whether another first batch than the save expected is an error.

    Attributes:
        saved: the document of the place, from `take_up` until the position moves from there.
        proof: what the first batch showed; see `DataPosition`.
        way: how the last `begin` came to its place; "" for an epoch from its start.
    """

    def __init__(self, epoch: PresentEpoch, *, skip: Skip, raises: bool) -> None:
        self.saved: Mapping[str, Any] | None = None
        self.proof = ""
        self.way: Way | Literal[""] = ""
        self._epoch = epoch
        self._skip: Skip = skip
        self._raises = raises
        # The state of an end of its iteration that the dataset was given, and has not been iterated since.
        self._dataset_at_end: Mapping[str, Any] | None = None

    def take_up(self, state: Mapping[str, Any]) -> None:
        """Have `begin` go to the place of `state`, a document."""
        length, saved = self._epoch.length, state["length"]
        if saved is not None and length is not None and saved != length:
            _log.warning(
                "the loader has %d batches per epoch, the checkpoint was made with %d: the order of the data is not that of "
                "an uninterrupted run",
                length,
                saved,
            )
        start = state["start"]
        self._epoch.move_to(state["epoch"], state["batches"], start)
        self.saved = {**state, "start": {**start, "generators": list(start["generators"])}}
        self._dataset_at_end = None
        self.proof, self.way = "", ""

    def warm_up(self) -> None:
        """Start persistent workers; see `DataPosition`."""
        epoch, loader = self._epoch, self._epoch.loader
        if self.saved is not None and epoch.used and way_back(loader, self.saved, self._skip) == "loader":
            return
        if epoch.number and getattr(loader, "persistent_workers", False) and loader._iterator is None:
            iter(loader)

    def begin(self, rng: Mapping[str, Any] | None) -> None:
        """Make the iterator and go to the place in it, as `DataPosition.begin` says."""
        epoch = self._epoch
        set_epoch(holders(epoch.loader), epoch.number)
        saved, self.saved = self.saved, None
        epoch.close()
        self.way = ""
        if saved is not None:
            set_generators(epoch.loader, saved["start"]["generators"])
        if epoch.used and epoch.start is not None:
            self._to_middle(epoch.start, saved, rng)
        else:
            self._to_start(saved)

    def pass_over(self) -> None:
        """The rest of the saved epoch, if there is any, is left out: have the next one begin with the states of the place."""
        saved, self.saved = self.saved, None
        if saved is not None and self._epoch.used:
            at_edge = saved.get("generators")
            set_generators(self._epoch.loader, saved["start"]["generators"] if at_edge is None else at_edge)
            self._take_up_end(saved)

    def _to_start(self, saved: Mapping[str, Any] | None) -> None:
        """Begin the epoch at its start, where `saved` was made if it is given."""
        epoch = self._epoch
        before = epoch.note_start()
        if saved is not None and saved.get("loader") is not None and fast_forward.has_state(epoch.loader):
            epoch.loader.load_state_dict(saved["loader"])
        self._take_up_end(saved)
        epoch.iterator = iter(epoch.loader)
        if self._dataset_at_end is not None:
            self._pass_over_nothing(self._dataset_at_end)
        epoch.note_made()
        if saved is not None:
            self._conclude(self._prove(saved, before))

    def _pass_over_nothing(self, state: Mapping[str, Any]) -> None:
        """Make the iterator anew, past an iteration that gives nothing: some datasets take their state of an end for the place to go on from.

        In the uninterrupted run, the iteration that ended there was that one.
        """
        epoch = self._epoch
        self._dataset_at_end = None
        is_nothing = epoch.fetch_ahead().is_end
        epoch.drop_ahead()
        if not is_nothing:
            epoch.loader.dataset.load_state_dict(copy.deepcopy(state))
        epoch.make_anew()

    def _to_middle(
        self, start: Mapping[str, Any], saved: Mapping[str, Any] | None, rng: Mapping[str, Any] | None
    ) -> None:
        """Go to a place in the middle of the epoch that began with `start`; `saved` is None for one that only this process knows."""
        epoch, loader = self._epoch, self._epoch.loader
        if (
            saved is not None
            and rng is not None
            and self._skip != "replay"
            and fast_forward.nothing_left(loader, saved, epoch.used)
        ):
            set_generators(loader, saved["generators"])
            self._take_up_end(saved)
            epoch.end = saved.get("end")
            epoch.iterator = iter(())
            restore_rng(rng)
            self.proof = f"none: {fast_forward.NO_MORE}"
            return
        way = way_back(loader, saved, self._skip) if rng is not None or self._skip == "indices" else "replay"
        try:
            self._go(way, start, saved, rng)
        except NotExact as why:
            _log.info("%s", why)
            way = "replay"
            self._go(way, start, saved, rng)
        if saved is None:
            return
        found = self._prove(saved, Moment.now(generators(loader)))
        if found == "different" and way == "indices" and self._skip == "auto":
            _log.info("the first batch is not the expected one, its samples depend on more than their index")
            self._go("replay", start, saved, rng)
            found = self._prove(saved, Moment.now(generators(loader)))
        self._conclude(found)

    def _go(
        self,
        way: Way,
        start: Mapping[str, Any],
        saved: Mapping[str, Any] | None,
        rng: Mapping[str, Any] | None,
    ) -> None:
        """From the start of the epoch, with the states of then, to its present batch; then the states are `rng`."""
        epoch, loader, count = self._epoch, self._epoch.loader, self._epoch.used
        verb = "replaying" if way == "replay" else f"skipping (by {way})"
        _log.info(
            "%s %d micro-batches of epoch %d to get back to where the checkpoint was made", verb, count, epoch.number
        )
        self.way = way
        epoch.drop_ahead()
        set_generators(loader, start["generators"])
        restore_rng(start["rng"])
        at_edge = None if saved is None else saved.get("generators")
        if way == "indices" and not fast_forward.in_this_process(loader):
            epoch.iterator = fast_forward.iterator_from(loader, count)
        else:
            if saved is not None and way in ("loader", "dataset"):
                (loader if way == "loader" else loader.dataset).load_state_dict(saved[way])
            epoch.iterator = iter(loader)
            if (first := start.get("first")) is not None:
                set_generators(loader, first["generators"])
                restore_rng(first["rng"])
            if way == "indices":
                self._check_count(fast_forward.skip_indices(epoch.iterator, count, checked=self._skip == "auto"))
                if at_edge is not None and self._skip == "auto":
                    fast_forward.check_samplers(loader, at_edge)
            elif way == "replay":
                self._replay(count)
        if at_edge is not None:
            set_generators(loader, at_edge)
        if rng is not None:
            restore_rng(rng)

    def _replay(self, count: int) -> None:
        assert self._epoch.iterator is not None
        for done in range(count):
            try:
                with self._epoch.waiting():
                    next(self._epoch.iterator)
            except StopIteration:
                self._check_count(done)

    def _check_count(self, done: int) -> None:
        if done < self._epoch.used:
            raise IncompatibleStateError(
                f"the loader ended after {done} batches, the checkpoint was made after {self._epoch.used} batches of "
                f"epoch {self._epoch.number}",
                hint="resume with the dataset and batch size of the checkpoint",
                piece="data",
            )

    def _take_up_end(self, saved: Mapping[str, Any] | None) -> None:
        """Have generators and dataset as the end of an epoch, at or after which `saved` was made, had left them."""
        loader = self._epoch.loader
        end = (saved or {}).get("end") or {}
        if end.get("generators") is not None:
            set_generators(loader, end["generators"])
        if end.get("dataset") is not None and fast_forward.keeps_state(loader):
            self._dataset_at_end = end["dataset"]
            loader.dataset.load_state_dict(copy.deepcopy(end["dataset"]))

    def _prove(self, saved: Mapping[str, Any], moment: Moment) -> str:
        """Load the first batch, and compare it with the expected one: what `proof` will be. `moment`: before its loading."""
        expected = saved.get("next")
        why = lookahead.why_not_comparable(expected)
        if why is not None or expected is None:
            return f"none: {why}"
        return lookahead.compared(expected, self._epoch.fetch_ahead().digest(), moment)

    def _conclude(self, proof: str) -> None:
        self.proof = proof
        if proof == "equal":
            _log.info("the first batch is the one that the checkpoint expected")
        elif proof != "different":
            _log.info("whether the first batch is the right one is not known: %s", proof.removeprefix("none: "))
        else:
            what = f"batch {self._epoch.used} of epoch {self._epoch.number} is not the one that the checkpoint expected"
            hint = "resume with the dataset, loader and preprocessing of the checkpoint"
            if self._raises:
                raise IncompatibleStateError(what, hint=hint, piece="data")
            _log.error("%s: the resumed run does not equal an uninterrupted one - %s", what, hint)
