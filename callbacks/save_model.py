"""The callback that saves: it asks the policy at every event, and has one save made per step, with all reasons."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckptmgr.callbacks import facts
from ckptmgr.callbacks.base import Priority, TrainerControl, TrainerState
from ckptmgr.callbacks.closing import Closing
from ckptmgr.callbacks.deciding import DecidingCallback
from ckptmgr.callbacks.huggingface import OutputDirectory
from ckptmgr.callbacks.saves import Saves
from ckptmgr.callbacks.seams import SavingManager, StopSource
from ckptmgr.callbacks.stopping import Stopping, source_of
from ckptmgr.core.errors import ConfigError, IncompatibleStateError
from ckptmgr.core.policies import EpochEnded, Evaluated, SavePolicy, StepEnded
from ckptmgr.training import ranks
from ckptmgr.training.agreeing import on_all_ranks, with_all_ranks
from ckptmgr.training.starting import refuse_other_start

if TYPE_CHECKING:
    from ckptmgr.callbacks.huggingface_training import Training
    from ckptmgr.training.restore_report import RestoreReport

_log = logging.getLogger(__name__)

Checkpoint = Callable[[], Mapping[str, Any]]


class SaveModelCallback(DecidingCallback):
    """Save checkpoints when a policy says so, in the embedded Trainer or in Hugging Face's.

    Reasons gather over the events of one step (step end, evaluation, end of epoch); then the host makes one save with all of them. Only
    the main process saves. No failure of a save, an upload or a policy ends the training (I9): each is logged at once and counted in
    `failures`. One thing does: `on_train_begin` raises what `manager.begin()` raises, such as a run that has checkpoints which this
    training would abandon (I12), because nothing is lost yet at that moment.

    *Preemption.* At a notice (SIGTERM above all; see `Preemption`) training ends at the next edge, saved and uploaded first, and the process ends
    after `on_train_end`, by SystemExit. Hugging Face's Trainer cannot leave a step or an evaluation in the middle: both are finished first, and an
    evaluation that is due is left out unless it fits into the time that is left. When time is up before that, the process leaves without a save, at
    the next batch of the step or the evaluation. It cannot where a call does not return: ranks that wait in a collective for one that is gone wait for
    its timeout (`init_process_group(timeout=…)`), or for the platform's kill.

    *Hugging Face's Trainer* writes the files itself; they are taken into the local tier at once, before its rotation removes them, by hard link.
    Its own `save_strategy` may be "no": the policy drives saves. A save at the last step of an epoch is made at the end of the epoch, where the Trainer
    evaluates. Nobody else may write into a checkpoint directory in place while it waits for its upload: that upload fails, and says so. The
    policy's memory is in `trainer_state.json`, with what an exact resume needs besides what the Trainer saves. A training that a callback had
    ended early stays ended: resumed, it runs no step and says so, and `train()` returns (with an iterable dataset the process ends, with 0).

    The policy's memory is part of the saved state, so that a resumed run makes the decisions of an uninterrupted one. A metric counts
    as seen once it was decided on, even if the save then failed.

    Its hooks take `args, state, control` by position as well: it can be handed to a host that calls callbacks directly.

    Args:
        manager: usually a `CheckpointManager`. It is closed when training ends.
        save: the policy; the manager's own if None.
        save_at_end: also save when training ends at a step the policy did not choose, with the reason `train_end`.
        save_final: push the final model, with its tokenizer, as an artifact when training is complete or a callback has ended it: True for
            `<run>-final` beside the run, a name beside it, or a URL. Not after an interruption or an exception; a failure ends nothing.
        close_timeout_s: how long the end of training waits for uploads; None: as the manager is configured.
        resume_from: the directory that training resumes from, if the host does not say and nothing else tells.
        preemption: what gives notice; None: the manager's, or `Preemption()` if it has none; False: nothing.
        continue_stopped: in Hugging Face's Trainer, go on with a training that a callback had ended early; so does CKPTMGR_CONTINUE_STOPPED=1. In
            the embedded Trainer its arguments say so.
        on_mismatch: what to do in Hugging Face's Trainer when the first batch after a resume is not that which the save expected: "log" an error and
            go on, or "raise".
        clock: seconds from any origin, never backwards.

    Attributes:
        failures: what failed in the training thread.
        background_failures: what failed in the background, of which `last_background_error` is the last.
    """

    priority = Priority.SAVE
    critical = frozenset({"on_train_begin", "on_step_begin"})
    # A preemption, or uploads that fail: the next start goes on.
    stop_is_final = False

    def __init__(
        self,
        manager: SavingManager,
        save: SavePolicy | None = None,
        *,
        save_at_end: bool = True,
        save_final: bool | str = False,
        close_timeout_s: float | None = None,
        resume_from: str | Path | None = None,
        preemption: StopSource | bool | None = None,
        continue_stopped: bool = False,
        on_mismatch: Literal["log", "raise"] = "log",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(manager.save_policy if save is None else save)
        if on_mismatch not in ("log", "raise"):
            raise ConfigError(f"on_mismatch={on_mismatch!r} is unknown", hint="give 'log' or 'raise'")
        self.manager = manager
        self.save_at_end = save_at_end
        self.save_final = save_final
        self.resume_from = resume_from
        self.continue_stopped = continue_stopped
        self.close_timeout_s = close_timeout_s
        self._raises = on_mismatch == "raise"
        self._stopping = Stopping(source_of(preemption, manager), manager, clock)
        self._closing = Closing(manager, self._stopping, close_timeout_s)
        self._saves = Saves(manager)
        self._clock = clock
        self._began_s = clock()
        self._host: Training | None = None
        self._ended_before = False
        self._reserved = False
        self._raised = False

    # --- events -----------------------------------------------------------------------------------------------------------

    @property
    def proof(self) -> str:
        """In Hugging Face's Trainer, what the first batch after a resume showed: "equal", "different", or "none: " and why nobody knows; "" before."""
        return "" if self._host is None or self._host.data is None else self._host.data.proof

    @property
    def restored(self) -> RestoreReport | None:
        """In Hugging Face's Trainer, what came back and what is not as it was; None if training began from scratch, and on ranks other than 0."""
        return None if self._host is None else self._host.restored

    @property
    def preemption(self) -> StopSource | None:
        """What gives notice; a host that looks at more edges than callbacks see takes it from here."""
        return self._stopping.source

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        resume_from: str | Path | None = None,
        model: Any = None,
        optimizer: Any = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        """Claim an attempt of the run, and watch for a preemption. A collective with several ranks: what rank 0 cannot begin, none does.

        Raises:
            ConflictError: the run has checkpoints and this training does not resume from one of them; ranks begin at different steps; or the manager is
                closed, or has saved later steps, by an earlier training of this process.
            DriftError: in Hugging Face's Trainer, something that the manager refuses is not as it was.
            SystemExit: the training was ended early before, and the host cannot be kept from running a step; with 0.
        """
        self._began_s = self._clock()
        self._raised = False
        self._host = _training(args, state, train_dataloader, optimizer)
        if state.global_step == 0:
            self.load_state_dict({"memory": {}})
        if self._host is not None:
            self._memory = self._host.memory or self._memory
        refuse_other_start(state.global_step, getattr(self.manager, "restored_manifest", None))

        def begin() -> None:
            if state.is_world_process_zero:
                self._begin(state, resume_from or self.resume_from, facts.checkpoint_bytes(model))

        with_all_ranks(begin)
        self._heed_earlier_end(state, control)
        # After what may raise: a host without isolation would never call on_train_end.
        self._guard("watch for a preemption", self._stopping.begin)

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Go to the place in the data that a resumed training goes on from."""
        if self._host is not None:
            self._guard("look at the data", self._host.epoch_begins)
            self._keep(state, at_edge=False)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look whether the first batch after a resume is the expected one.

        Raises:
            IncompatibleStateError: it is not, with `on_mismatch="raise"`.
        """
        host = self._host
        if host is None:
            return
        mismatch: list[IncompatibleStateError] = []
        self._guard("look at the first batch", lambda: mismatch.extend(host.step_begins()))
        for error in mismatch:
            if self._raises:
                raise error
            _log.error("%s", error)

    def on_step_end(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        checkpoint: Checkpoint | None = None,
        **kwargs: Any,
    ) -> None:
        """Ask the policy, and look for what ends training. A host that brings `checkpoint` has buffers reserved for it after the first step."""
        self._count_batch()
        if state.is_world_process_zero:
            self._guard("look at the background", lambda: self._note_background(self.manager.poll_errors()))
            if checkpoint is not None and not self._reserved:
                self._reserved = True
                self._guard("reserving of buffers", lambda: self.manager.reserve(checkpoint()))
        self._guard("look at the failure budget", lambda: self._stopping.after_step(state, control))
        self._heed(state, control)
        now_s = self._clock() - self._began_s
        self._ask(StepEnded(step=state.global_step, epoch=state.epoch, time_s=now_s), state, control)
        self._settle(state, control)

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Ask the policy, and keep the metrics for a save of this step."""
        self._stopping.evaluation_ended()
        self._enter(state.global_step)
        self._metrics.update(facts.numbers(metrics or {}))
        self._heed(state, control)
        self._ask(Evaluated(step=state.global_step, metrics=metrics or {}), state, control)
        self._settle(state, control, at_edge=True)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A callback that goes by the logs may have asked for a save, which Hugging Face's Trainer makes next."""
        if control.should_save:
            self._settle(state, control, at_edge=True)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask the policy if the epoch is complete; ask for the last save if training ends here."""
        self._enter(state.global_step)
        if self._ended_before:
            control.should_save = control.should_evaluate = control.should_log = False
            return
        self._heed(state, control)
        completed = facts.finished_epochs(state)
        if completed is not None:
            self._ask(EpochEnded(step=state.global_step, epoch=completed), state, control)
        if state.global_step != self._saved_step:
            if control.should_training_stop and self.save_at_end and not self._stopping.is_decided:
                self._want(["train_end"], state, control)
            # Also what was asked for before an evaluation that has set the flag by itself.
            control.should_save = control.should_save or self._deferred or bool(self._reasons)
        self._epoch_over = True
        self._settle(state, control)

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Nothing can be saved between two micro-batches, but it may be the last moment to leave.

        Raises:
            SystemExit: a notice of preemption has run out.
        """
        self._count_batch()
        self._guard("look for a preemption", lambda: self._stopping.between_edges(state))

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """As `on_substep_end`, between the batches of an evaluation."""
        self._guard("look for a preemption", lambda: self._stopping.between_edges(state))

    def on_save(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        checkpoint: Checkpoint | None = None,
        **kwargs: Any,
    ) -> None:
        """Save, with all reasons of this step; a second call at the same step does nothing.

        What the host hands over is copied before this returns, what it has written is linked; the rest goes on in the background.
        """
        self._enter(state.global_step)
        if state.global_step == self._saved_step:
            return
        # Before the save: a failed one is not repeated by a second event of the same step.
        self._saved_step = state.global_step
        output = None if checkpoint is not None else self._output or OutputDirectory.of(args)
        if output is not None:
            # Each rank writes a part; the directory is complete when all have come here.
            self._guard("wait for the other ranks", lambda: ranks.any_rank(False))
        if state.is_world_process_zero:
            self._guard(f"save of step {state.global_step}", lambda: self._save(state, checkpoint, output))

    def on_exception(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """What there is now is no final model."""
        self._raised = True

    def on_train_end(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        """Close the manager, push the final model, and say what is not in the store yet. A collective with several ranks, unless training has raised:
        all leave when rank 0 has closed.

        Raises:
            SystemExit: training ended because of a notice, or one came while uploads were waited for and some are left; with the preemption's
                `exit_code`. Or something is not in the store, and the manager is `strict`; with 6.
        """
        host = self._output
        code = 0
        self._guard("last words of the save policy", lambda: self._say_unmet(state))
        if host is not None and host.saves_without_event:
            self._guard("wait for the other ranks", lambda: ranks.any_rank(False))
        if state.is_world_process_zero and host is not None:
            self._guard("look for saves without an event", lambda: self._saves.take_found(host, self._modes()))
        self._close_for_all(state)
        if state.is_world_process_zero:
            code = self._closing.exit_code()
            interrupted = self._stopping.is_interruption or self._stopping.has_ended(state, control)
            if self.save_final and not (self._raised or interrupted):
                self._guard("push of the final model", lambda: self._push_final(state, model, processing_class))
        if self._host is not None and self._host.data is not None:
            self._guard("end of the watch over the data", self._host.data.close)
        self._guard("end of the watch for a preemption", self._stopping.end)
        if self._stopping.has_ended(state, control):
            code = self._stopping.exit_code
        if code:
            raise SystemExit(code)

    # --- begin and end ----------------------------------------------------------------------------------------------------

    def _begin(self, state: TrainerState, resume_from: str | Path | None, expected_bytes: int | None) -> None:
        given, host = None if resume_from is None else Path(resume_from), self._host
        self._saves.refuse_rewind(state.global_step)
        if host is None:
            self.manager.begin(resume_from=given, expected_bytes=expected_bytes)
            return
        manager = self._saves.taking_manager
        host.begin(manager, state, given, expected_bytes)
        self._guard("look at the output directory", lambda: host.output.train_begins(manager.local_dir))

    def _heed_earlier_end(self, state: TrainerState, control: TrainerControl) -> None:
        """Have no step run of a training that a callback had ended, unless it is to be gone on with."""
        host = self._host
        self._ended_before = host is not None and host.stays_ended(state, continued=self.continue_stopped)
        if host is not None and self._ended_before:
            control.should_training_stop = True
            if not host.end_early():
                if state.is_world_process_zero:
                    self._guard("close of the checkpoint manager", self._close)
                raise SystemExit(self._closing.exit_code())

    def _close(self) -> None:
        self._note_background(self._closing.close())

    def _close_for_all(self, state: TrainerState) -> None:
        """Close the manager, and have the other ranks wait for it: what launchers do when the first of them has gone ends the one that uploads."""

        def close() -> None:
            if state.is_world_process_zero:
                self._guard("close of the checkpoint manager", self._close)

        if self._raised:
            # Where the others are, nobody knows.
            close()
        else:
            self._guard("wait for the main process", lambda: on_all_ranks(close, aside=True))

    def _push_final(self, state: TrainerState, model: Any, processing_class: Any) -> None:
        self._saves.push_final(
            self.save_final,
            model,
            processing_class,
            metrics=self._metrics if self._step == state.global_step else {},
            metadata={"step": state.global_step, "epoch": state.epoch},
            is_saved=self._saved_step == state.global_step,
        )

    # --- deciding ---------------------------------------------------------------------------------------------------------

    def _heed(self, state: TrainerState, control: TrainerControl) -> None:
        """At an edge: end training if something asks for it, and save before."""

        def look() -> None:
            reason = self._stopping.at_edge(state, control)
            if reason is not None:
                self._want([reason], state, control)

        self._guard("look for what ends training", look)

    def _settle(self, state: TrainerState, control: TrainerControl, *, at_edge: bool = False) -> None:
        """When all was asked at one event: what the host is to do about it.

        Args:
            at_edge: the host may save after this event, whatever the flags are now.
        """
        if self._stopping.forbids_saving:
            control.should_save = self._deferred = False
        if control.should_evaluate:
            self._stopping.evaluation_begins()
        host = self._host
        if host is None:
            return
        self._enter(state.global_step)
        if control.should_save and not self._epoch_over and facts.epoch_ends(state, control):
            # It comes back in on_epoch_end, after an evaluation and with all reasons; else one step might be saved twice, in place.
            control.should_save, self._deferred = False, True
        may_save = control.should_save or (control.should_evaluate and host.output.decides_after_evaluation)
        if may_save and state.is_world_process_zero:
            self._guard("look at the output directory", lambda: host.output.before_save(state.global_step))
        self._keep(state, at_edge=at_edge or control.should_save)

    def _keep(self, state: TrainerState, *, at_edge: bool) -> None:
        """Put what a resume needs where the host's next save writes it. A collective with several ranks if `at_edge`."""
        host = self._host
        if host is not None:
            interrupted = self._stopping.is_interruption or host.output.saves_without_event
            self._guard(
                "note of what a resume needs",
                lambda: host.keep(state, self._memory, interrupted=interrupted, at_edge=at_edge),
            )

    def _count_batch(self) -> None:
        if self._host is not None and self._host.data is not None:
            self._guard("look at the data", self._host.data.batch_used)

    # --- saving -----------------------------------------------------------------------------------------------------------

    def _save(self, state: TrainerState, checkpoint: Checkpoint | None, output: OutputDirectory | None) -> None:
        emergency = self._stopping.reason
        if emergency is not None and emergency not in self._reasons:
            self._reasons.append(emergency)
        reasons = tuple(self._reasons) or ("requested",)
        saved = self._saves.save(
            state.global_step,
            checkpoint,
            output,
            epoch=state.epoch,
            metrics=dict(self._metrics),
            reasons=reasons,
            metric_modes=self._modes(),
        )
        if saved is None:
            self.failures += 1  # the manager has logged why
            _log.warning("step %d was not saved (%s)", state.global_step, ", ".join(reasons))

    @property
    def _output(self) -> OutputDirectory | None:
        return None if self._host is None else self._host.output


def _training(args: Any, state: Any, loader: Any, optimizer: Any) -> Training | None:
    """What is known of Hugging Face's Trainer; None in any other host. Imports torch, which such a host has imported."""
    if OutputDirectory.of(args) is None:
        return None
    from ckptmgr.callbacks.huggingface_training import Training

    return Training(args, state, loader, optimizer)
