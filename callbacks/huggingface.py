"""What is particular to Hugging Face's Trainer: it writes the files itself, and deletes old ones when it likes. Imports no transformers.

Facts of transformers 5.19 and 5.24 that this goes by:
- A save writes `output_dir/checkpoint-<step>`, removes old ones (`save_total_limit`), and calls `on_save` last. Each rank writes its own random state, and
  no rank waits for the others.
- With flags `should_save` at a step's end and again at the end of the epoch, it saves one step twice, into one directory, in place. With
  `save_strategy="best"` an evaluation overwrites `should_save`.
- `enable_jit_checkpoint` saves without `on_save`, in the middle of a step, possibly over a checkpoint that is complete; meanwhile the sentinel is there.
- `trainer_state.json` has a place for the state of callbacks, which every save writes and every resume hands back in `state`.
- A callback that raises ends the training.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptmgr.callbacks.seams import TakingManager
from ckptmgr.core.errors import CheckpointError, ConflictError
from ckptmgr.run.intake import is_linkable, unshare
from ckptmgr.run.launch import RESUME_ENV
from ckptmgr.training.ranks import world_size

_log = logging.getLogger(__name__)

STATE = "trainer_state.json"
SENTINEL = "checkpoint-is-incomplete.txt"
# Not the name of a callback class: transformers would make a new object of it when asked to restore callbacks.
_STATE_KEY = "ckptmgr"
STATES_KEY = "ckptmgr.callbacks"
"""Where in the state of Hugging Face's Trainer the states of callbacks of ours are; followed by `/` and its name that of one without a manager. Not the
name of a class: transformers would make a new object of it when asked to restore callbacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A complete checkpoint directory that no `on_save` told of."""

    step: int
    epoch: float | None
    directory: Path


class OutputDirectory:
    """Where a Hugging Face Trainer writes its checkpoints.

    Args:
        args: its TrainingArguments.
    """

    def __init__(self, args: Any) -> None:
        self.path = Path(os.path.abspath(args.output_dir))
        self._args = args
        self._there_before: dict[str, object] = {}

    @classmethod
    def of(cls, args: Any) -> OutputDirectory | None:
        """That of the host whose arguments these are; None if it is another host."""
        return cls(args) if getattr(args, "output_dir", None) else None

    @property
    def saves_without_event(self) -> bool:
        """Whether checkpoints may be written, and written over, without an event."""
        return bool(getattr(self._args, "enable_jit_checkpoint", False))

    @property
    def decides_after_evaluation(self) -> bool:
        """Whether an evaluation overwrites `should_save`."""
        return str(getattr(self._args.save_strategy, "value", self._args.save_strategy)) == "best"

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of `step` is written."""
        return self.path / f"checkpoint-{step}"

    def complete(self, step: int) -> Path:
        """The directory that was just written for `step`; call it when every rank has written.

        Raises:
            CheckpointError: it is not there, or not all of it.
        """
        directory = self.checkpoint(step)
        if not (directory / STATE).is_file():
            raise CheckpointError(
                f"the Trainer has saved step {step}, but {directory / STATE} is not there",
                hint="hyperparameter search, which gives each trial a directory of its own, is not supported",
                step=step,
            )
        # Of a save without event that was killed here earlier; this one was finished.
        (directory / SENTINEL).unlink(missing_ok=True)
        ranks = world_size()
        states = len(list(directory.glob("rng_state_*.pth")))
        if 0 < states < ranks:
            _log.warning(
                "%s has the random states of %d ranks out of %d: on several machines output_dir must be on a shared disk",
                directory,
                states,
                ranks,
            )
        return directory

    def before_save(self, step: int) -> None:
        """The Trainer may write the checkpoint of `step` now. If that directory exists, of an earlier attempt or save, it is written in place: what was
        taken from it must not change with it."""
        copied = unshare(self.checkpoint(step))
        if copied:
            _log.info(
                "%s is about to be written again: %d bytes were copied to keep apart", self.checkpoint(step), copied
            )

    def train_begins(self, local_dir: Path) -> None:
        """Say what a user should know before the first step, and remember what is there: `found` leaves it out.

        Args:
            local_dir: of the local tier.
        """
        self._there_before = {path.name: _mark(path) for path, _ in self._checkpoints()}
        for warning in self._warnings(local_dir):
            _log.warning("%s", warning)

    def found(self) -> Iterator[Found]:
        """Complete checkpoints that were written since `note_present`, in order of steps."""
        for path, step in sorted(self._checkpoints(), key=lambda pair: pair[1]):
            if (path / SENTINEL).exists() or self._there_before.get(path.name) == _mark(path):
                continue
            try:
                document = json.loads((path / STATE).read_bytes())
                if document["global_step"] == step:
                    yield Found(step=step, epoch=document.get("epoch"), directory=path)
            except (OSError, ValueError, KeyError, TypeError):
                _log.warning("%s is not a complete checkpoint", path)

    def resumed_from(self, step: int, run_name: str) -> list[Path]:
        """Where the state that training begins with at `step` may have come from, likeliest first: the Trainer does not say."""
        named = [os.environ.get(RESUME_ENV), getattr(self._args, "resume_from_checkpoint", None)]
        places = [Path(os.path.abspath(place)) for place in named if isinstance(place, str) and place]
        # `trainer.train(resume_from_checkpoint=True)`, and what `ckptmgr resume RUN` makes without --to.
        places += [self.checkpoint(step)]
        places += [Path(os.path.abspath(name)) / f"checkpoint-{step}" for name in (run_name, f"{run_name}-resumed")]
        return [place for place in dict.fromkeys(places) if _step_in(place) == step]

    def _warnings(self, local_dir: Path) -> Iterator[str]:
        if not is_linkable(self.path, local_dir):
            yield (
                f"{self.path} and the local tier {local_dir} are on different disks: each save is copied while training waits; "
                "give local_dir a place beside output_dir"
            )
        if getattr(self._args, "save_only_model", False):
            yield "save_only_model: checkpoints have no optimizer, so that no training can go on from them exactly"
        if self.decides_after_evaluation:
            yield (
                "save_strategy='best': at a step with an evaluation the Trainer alone decides whether it is saved; "
                "use save_strategy='no' and a policy with Best(…)"
            )
        if self.saves_without_event:
            yield (
                "enable_jit_checkpoint: checkpoints are copied while training waits, because the Trainer may write into them again; "
                "it is not needed, SaveModelCallback saves at SIGTERM"
            )

    def _checkpoints(self) -> Iterator[tuple[Path, int]]:
        with contextlib.suppress(FileNotFoundError):
            for path in self.path.iterdir():
                match = re.fullmatch(r"checkpoint-(\d+)", path.name)
                if match is not None and path.is_dir():
                    yield path, int(match.group(1))


def begin(
    manager: TakingManager, host: OutputDirectory, step: int, *, resume_from: Path | None, expected_bytes: int | None
) -> None:
    """Claim an attempt for a training that begins at `step`; what it descends from is found out.

    Raises:
        ConflictError: it would abandon checkpoints of the run (I12); the hint says what to do.
    """
    if resume_from is not None:
        places: list[Path | None] = [resume_from]
    elif manager.is_restored:
        if step == 0:
            raise ConflictError(
                f"a checkpoint of {manager.url} was asked for, but training begins at step 0",
                hint="hand its path over: trainer.train(resume_from_checkpoint=path)",
            )
        places = [None]
    else:
        places = [*host.resumed_from(step, manager.url.rsplit("/", 1)[-1])] if step else []
    refusal: ConflictError | None = None
    for place in places or [None]:
        try:
            manager.begin(resume_from=place, expected_bytes=expected_bytes)
        except ConflictError as exc:
            if not hasattr(exc, "newest"):
                raise  # not about what was restored: another place does not help
            refusal = exc
        else:
            return
    if refusal is not None:
        raise _explained(refusal, host, step, [place for place in places if place is not None]) from refusal


def entry_in(state: Any, key: str = _STATE_KEY) -> Mapping[str, Any]:
    """What `keep_entry` kept, from a resumed `state`; empty if it has nothing of the kind."""
    try:
        entry = state.stateful_callbacks[key]["attributes"]
    except (AttributeError, KeyError, TypeError):
        return {}
    return entry if isinstance(entry, Mapping) else {}


def keep_entry(state: Any, entry: Mapping[str, Any], key: str = _STATE_KEY) -> None:
    """Have the Trainer's next save write `entry`, JSON values all through."""
    if isinstance(getattr(state, "stateful_callbacks", None), dict):
        state.stateful_callbacks[key] = {"args": {}, "attributes": dict(entry)}


def stopped_by(state: Any) -> str | None:
    """Who ended the training that a resumed `state` is of, early and for good: the name of a callback, or "a callback" where nobody says; None if
    it was not ended, or by its `max_steps`, or by what the next start gets over."""
    callbacks: Any = getattr(state, "stateful_callbacks", None)
    ending = entry_in(state).get("ending")
    try:
        if not callbacks["TrainerControl"]["args"]["should_training_stop"] or not isinstance(ending, Mapping):
            return None
        if ending["step"] != state.global_step or ending["interrupted"] or ending["step"] >= ending["max_steps"]:
            return None
    except (KeyError, TypeError):
        return None
    ours = (name for name, saved in _states_of_ours(callbacks) if saved.get("stopped_step") == state.global_step)
    theirs = (name for name, saved in callbacks.items() if _out_of_patience(saved))
    return next(ours, None) or next(theirs, "a callback")


def parts_of(paths: Sequence[str], optimizer: Any) -> dict[str, bool]:
    """What the Trainer looks for in a checkpoint, and whether it is among the files: what is not there starts anew, and the Trainer says nothing.

    Args:
        optimizer: the Trainer's, from accelerate, which has the scaler if there is one. What the arguments say does not tell: fp16 has none on a CPU.
    """
    top = {path.partition("/")[0] for path in paths}

    def any_of(pattern: str) -> bool:
        return any(re.fullmatch(pattern, name) for name in top)

    # DeepSpeed, FSDP and model parallelism have directories and names of their own for all of it.
    whole = any_of(r"global_step\d+|pytorch_model_fsdp.*|optimizer_\d+|user_content\.pt")
    ranks = world_size()
    random_states = {"rng_state.pth"} if ranks == 1 else {f"rng_state_{rank}.pth" for rank in range(ranks)}
    found = {
        "model": whole or any_of(r"(model|adapter_model|pytorch_model).*\.(safetensors|bin)|model_state.*"),
        "optimizer": whole or any_of(r"optimizer(\.pt|\.bin|_\d+)?"),
        "lr_scheduler": whole or "scheduler.pt" in top,
        "random states": random_states <= top,
        "trainer state": STATE in top,
    }
    if getattr(optimizer, "scaler", None) is not None:
        found["scaler"] = whole or "scaler.pt" in top
    return found


def _states_of_ours(callbacks: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The states that a `CallbackManager` and callbacks of ours without one have put there, by their names."""
    for key, saved in callbacks.items():
        place, _, name = key.partition("/")
        attributes = saved.get("attributes") if isinstance(saved, Mapping) else None
        if place == STATES_KEY and isinstance(attributes, Mapping):
            states = {name: attributes} if name else attributes
            yield from ((name, state) for name, state in states.items() if isinstance(state, Mapping))


def _out_of_patience(saved: Any) -> bool:
    """Whether this is the state of transformers' EarlyStoppingCallback after it has had enough."""
    for each in saved if isinstance(saved, list) else [saved]:
        try:
            patience = each["args"]["early_stopping_patience"]
            if each["attributes"]["early_stopping_patience_counter"] >= patience:
                return True
        except (KeyError, TypeError):
            continue
    return False


def framework() -> dict[str, str]:
    """What writes the files, for the manifest."""
    version = getattr(sys.modules.get("transformers"), "__version__", None)
    return {"framework": "transformers"} | ({"transformers": str(version)} if version else {})


def _explained(refusal: ConflictError, host: OutputDirectory, step: int, places: list[Path]) -> ConflictError:
    """The refusal with what a user of the Trainer can do."""
    named = os.environ.get(RESUME_ENV)
    ways = "pass SaveModelCallback(manager, resume_from=DIR), use another run name, or on_existing='new-lineage'"
    if step:
        looked = ", ".join(map(str, places)) or str(host.checkpoint(step))
        message = (
            f"{refusal.message}: training goes on from step {step}, which is none of them as far as {looked} tells"
        )
        hint = f"resume with trainer.train(resume_from_checkpoint=manager.resume_path()) or `ckptmgr resume`, {ways}"
    else:
        message = refusal.message
        what = f"{RESUME_ENV}={named} was not handed over: " if named else ""
        hint = f"{what}use trainer.train(resume_from_checkpoint={repr(named) if named else 'manager.resume_path()'}), {ways}"
    return ConflictError(message, hint=hint, newest=getattr(refusal, "newest", ""))


def _mark(directory: Path) -> object:
    """What changes when a checkpoint directory is written again; None while it has no state."""
    try:
        found = os.stat(directory / STATE)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _step_in(directory: Path) -> int | None:
    try:
        step = json.loads((directory / STATE).read_bytes())["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
