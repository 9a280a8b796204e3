"""Where in its data a training of Hugging Face's Trainer is, and what its way back there lacks.

Facts of transformers 5.19 and 5.24 with accelerate 1.15 that this goes by:
- The epoch and the micro-batch to go on with are computed from `global_step`, the loader's length and the accumulation of *now*. A map-style dataset
  is not asked for the samples before it: the batch sampler is. An iterable one is run through from the start of the epoch.
- The order of a plain shuffle depends on the seed and the epoch alone. Any other one (`group_by_length`, `use_seedable_sampler=False`, a loader of the
  user's) and the seeds of workers are drawn from the main generator when the iterator is made; the random states of the checkpoint are set after that.
- They are set when the first step's batches have been loaded, while the uninterrupted run loaded all but one of these after that moment: one batch
  is always in hand (accelerate looks whether the loader has ended). So a dataset that draws from the main generators goes on differently.
- Generators that the loader or its sampler owns are not saved: in a new process they begin with their seed.

What is missing is kept in the `trainer_state.json`: the random states at the epoch's start, right before the batch in hand was loaded, and at the save;
the states of the loader's own generators at the epoch's start, from where all that it draws is drawn again, or after its end; and the state of an iterable
dataset that has one (`state_dict`, as those of the `datasets` library) before the batch in hand, with which it need not be run through. Each rank's, but
not for an iterable dataset of several ranks: one rank loads the batches of all, or each loads all and drops what is others', which are not the batches
that are counted here.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ckptmgr.callbacks.huggingface_loader import ANEW, LoaderWatch
from ckptmgr.callbacks.huggingface_rng import CpuRng, own_states, set_own_states
from ckptmgr.training.dataset_facts import length_of
from ckptmgr.training.ranks import rank, world_size

_log = logging.getLogger(__name__)
VERSION = 1
_OVER = {"why": "the epoch ended"}


# What holds on the rank that has told it.
_OF_A_RANK = frozenset({"next", "epoch_rng", "epoch_own", "edge_rng", "edge_own", "load_rng", "dataset_state"})


def of_all_ranks(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The documents of all ranks as one, which is that of rank 0 with what is not the same on the others."""
    first, *others = documents
    return {
        **first,
        "ranks": [
            {name: each.get(name) for name in _OF_A_RANK if each.get(name) != first.get(name)} for each in others
        ],
    }


def of_this_rank(document: Mapping[str, Any]) -> dict[str, Any]:
    """What `of_all_ranks` was given for this rank. Of another number of ranks only what holds for all."""
    others = [{}, *document.get("ranks", ())]
    if len(others) == world_size():
        told = {**document, **others[rank()]}
        return {name: value for name, value in told.items() if value is not None}
    common = {name: value for name, value in document.items() if name not in _OF_A_RANK}
    if "next" in document:
        known = rank() == 0 or document["next"] == _OVER
        common["next"] = document["next"] if known else {"why": "the checkpoint tells the main process's batch"}
    return common


class TrainingData:
    """Follows a training through its data, from `on_train_begin` on.

    Args:
        loader: its train_dataloader.
        args: its TrainingArguments.
        step: the finished steps that it begins with.
        saved: what `as_document` gave for the checkpoint that it goes on from; None if there is none, or it does not say.

    Attributes:
        proof: what the first batch after a resume showed: "equal", "different", or "none: " and why nobody knows. "" before it. Where workers load
            the samples, their numbers are compared, else the content of the batch.
        notes: what a user should know about the way back, as it is found out.
    """

    def __init__(self, loader: Any, args: Any, *, step: int, saved: Mapping[str, Any] | None) -> None:
        self._base: Any = getattr(loader, "base_dataloader", loader)
        self._watch = LoaderWatch(loader)
        # Whether this rank's loader makes the batches that it trains on, one by one.
        self._has_states = self._watch.by_samples or world_size() == 1
        self._length = length_of(loader)
        self._epoch, self._skipped = _place(self._length, args, step)
        self._begins = True
        self._epoch_rng: CpuRng | None = None
        self._epoch_own: list[str] = []
        self._saved: Mapping[str, Any] = {}
        self._expected: Mapping[str, Any] | None = None
        self._edge_rng: CpuRng | None = None
        self._said = False
        self.proof = ""
        self.notes: list[str] = []
        if step:
            self._come_back(saved, step, bool(getattr(args, "ignore_data_skip", False)))

    def end_early(self) -> bool:
        """Have the loader yield nothing, so that no step is run; False if it cannot be had to."""
        return self._watch.end_early()

    def close(self) -> None:
        """Let go of the loader."""
        self._watch.remove()

    # --- events -----------------------------------------------------------------------------------------------------------

    def epoch_begins(self) -> None:
        """Before the iterator is made."""
        if not self._begins:
            self._epoch += 1
            self._skipped = 0
            self._begin_epoch()
            return
        self._begins = False
        self._set_own("edge_own" if self._ended_before else "epoch_own")
        if not self._saved:
            self._begin_epoch()
        elif self._skipped and self._ended_before:
            self._edge_rng = self._epoch_rng = start = self._rng_in("edge_rng")
            if start is not None:
                start.go_back()
            self._watch.begin_epoch(self._skipped, state=ANEW)
        elif self._skipped:
            start = self._rng_in("epoch_rng")
            if start is not None:
                start.go_back()
            self._edge_rng, load = self._rng_in("edge_rng"), self._rng_in("load_rng")
            # Without those of the loading no batch was in hand: a loader of the user's, which nobody looks ahead in.
            first, second = (load, self._edge_rng) if load is not None else (self._edge_rng, None)
            self._watch.begin_epoch(
                self._skipped, first_rng=first, second_rng=second, state=self._saved.get("dataset_state")
            )
            self._epoch_rng = start
        else:
            # The Trainer sets the states of the checkpoint right after this; they are those of the epoch's start.
            start = self._rng_in("edge_rng")
            if start is not None:
                start.go_back()
            self._begin_epoch()

    def step_begins(self) -> None:
        """The first micro-batches of a step are loaded, and none of them is used."""
        expected, self._expected = self._expected, None
        if expected is not None:
            self.proof = _compared(expected, self._watch.next_batch())
        edge, self._edge_rng = self._edge_rng, None
        loaded = self._watch.loaded_rng
        # The Trainer has just set the states of the save, from which the uninterrupted run had gone on to load these batches. Are they others, somebody
        # has drawn after this was written down, and the Trainer's count.
        if edge is not None and loaded is not None and CpuRng.now() == edge:
            loaded.go_back()

    def batch_used(self) -> None:
        """A micro-batch was trained on."""
        self._watch.use()

    # --- saving -----------------------------------------------------------------------------------------------------------

    def as_document(self, step: int, *, at_edge: bool) -> dict[str, Any]:
        """What a resume needs, as JSON values.

        Args:
            at_edge: a save may be made at this moment; else only what holds for the whole epoch is told.
        """
        document: dict[str, Any] = {"version": VERSION, "epoch": self._epoch}
        if self._epoch_rng is not None:
            document |= {"epoch_rng": self._epoch_rng.as_document(), "epoch_own": self._epoch_own}
        if not at_edge:
            return document
        used, over = self._watch.used, self._is_over
        document |= {
            "step": step,
            "batches": used,
            "next": _OVER if over else self._watch.next_batch(),
        }
        if self._has_states:
            document["edge_rng"] = CpuRng.now().as_document()
            if over:
                document["edge_own"] = own_states(self._base)
            load_rng = None if over else self._watch.load_rng()
            if load_rng is not None:
                document["load_rng"] = load_rng.as_document()
            document |= {} if over else self._dataset_state()
        return document

    def _dataset_state(self) -> dict[str, Any]:
        state = self._watch.dataset_state()
        try:
            return {} if state is None else {"dataset_state": json.loads(json.dumps(state))}
        except (TypeError, ValueError) as error:
            if not self._said:
                _log.warning(
                    "the state of the dataset is no JSON, so that a resume runs through it from its start: %s", error
                )
            self._said = True
            return {}

    # --- pieces -----------------------------------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        if self._length is None:
            return self._watch.is_exhausted
        return self._watch.used >= self._length

    @property
    def _ended_before(self) -> bool:
        return self._saved.get("next") == _OVER

    def _begin_epoch(self) -> None:
        self._epoch_rng = CpuRng.now() if self._has_states else None
        self._epoch_own = own_states(self._base)
        self._watch.begin_epoch(0)

    def _come_back(self, saved: Mapping[str, Any] | None, step: int, anew: bool) -> None:
        """Find out what is known of the checkpoint's place in the data."""
        known = saved is not None and saved.get("version") == VERSION
        if anew:
            self._skipped = 0
            self.proof = "none: ignore_data_skip, so that the epoch's data starts anew"
            self.notes.append("ignore_data_skip: the epoch's data starts anew, which an uninterrupted run's would not")
        elif saved is None or not known or saved.get("step") != step:
            self.proof = "none: the checkpoint does not tell the batch after it"
            if saved is not None and known and saved.get("epoch") == self._epoch and self._skipped:
                self._saved = {name: saved[name] for name in ("epoch_rng", "epoch_own") if name in saved}
        else:
            self._take_up(saved)

    def _take_up(self, saved: Mapping[str, Any]) -> None:
        batches = saved.get("batches")
        ended = saved.get("next") == _OVER
        # Without a length the Trainer counts from the start of training; where the place is known without it, its count does not matter.
        by_state = self._length is None and (ended or "dataset_state" in saved)
        if self._skipped != (0 if ended else batches) and not by_state:
            self.notes.append(
                f"the checkpoint was made after micro-batch {batches} of epoch {saved.get('epoch')}, and the Trainer goes on after "
                f"micro-batch {self._skipped} of epoch {self._epoch}: samples are left out or used twice (other batch size or accumulation?)"
            )
        else:
            self._saved = saved
        expected = saved.get("next")
        if self._skipped and isinstance(expected, Mapping):
            self._expected = expected
        else:
            self.proof = "none: the epoch ended with the checkpoint"

    def _set_own(self, name: str) -> None:
        """Set the loader's own generators to what they were at the start of the epoch that begins, and note that."""
        states = self._saved.get(name, []) if self._has_states else []
        if not states:
            self._epoch_own = own_states(self._base)
            return
        self._epoch_own = states
        try:
            set_own_states(self._base, states)
        except (ValueError, TypeError, RuntimeError) as error:
            _log.warning(
                "the loader's own random generators are not those of the checkpoint, and are not set: %s", error
            )

    def _rng_in(self, name: str) -> CpuRng | None:
        document = self._saved.get(name)
        if document is None or not self._has_states:
            return None
        try:
            return CpuRng.of_document(document)
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("the %s of the checkpoint cannot be read, and is not set: %r", name, error)
            return None


def _place(length: int | None, args: Any, step: int) -> tuple[int, int]:
    """The epoch, and the micro-batch within it, that the Trainer goes on with."""
    accumulation = getattr(args, "gradient_accumulation_steps", 1)
    steps = max(math.ceil(length / accumulation), 1) if length else max(getattr(args, "max_steps", 0), 1)
    return step // steps, step % steps * accumulation


def _compared(expected: Mapping[str, Any], found: Mapping[str, str]) -> str:
    for what in ("content", "samples"):
        if what in expected and what in found:
            return "equal" if expected[what] == found[what] else "different"
    why = expected.get("why") or found.get("why") or "what is known of them cannot be compared"
    return f"none: {why}"
