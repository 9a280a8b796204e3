"""The reference Trainer: plain PyTorch, every hook, exact resume.

It is the host that shows what ckptmgr promises, not a framework. One step edge looks like this, and a save is always its last act, so that
one save carries all reasons and everything that the step changed:

    on_step_end → log → evaluate → [end of epoch: on_epoch_end → log → evaluate] → on_save

A preemption ends it at the next edge: between steps, micro-batches or evaluation batches. What is unfinished is taken back, so that the save is
that of the last step edge, and the resumed run equals the uninterrupted one as after any other save.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckptmgr.callbacks.base import TrainerControl, TrainerState
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.core.conditions import Conditions, drift_names
from ckptmgr.core.errors import ConfigError
from ckptmgr.run.conditions import refused_by_environment
from ckptmgr.training.agreeing import with_all_ranks
from ckptmgr.training.arguments import TrainingArguments, continues_stopped
from ckptmgr.training.data_position import DataPosition
from ckptmgr.training.dataset_facts import DatasetFacts, dataset_facts
from ckptmgr.training.edge_work import EdgeWork
from ckptmgr.training.edges import EPOCH_HOOKS, Edges
from ckptmgr.training.evaluation_data import EvaluationData
from ckptmgr.training.interruption import Interrupted, Interruption
from ckptmgr.training.progress import Progress, RunningLoss
from ckptmgr.training.ranks import is_main_process, world_size
from ckptmgr.training.restore_report import RestoreReport
from ckptmgr.training.resuming import newest, resume_pieces
from ckptmgr.training.rng import capture_rng, restore_rng
from ckptmgr.training.scheduling import Schedule

__all__ = ["Trainer", "TrainingArguments", "TrainingResult"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """What `train` did.

    Attributes:
        global_step: the step that it is at.
        epoch: the epoch that it is at.
        steps_run: optimizer steps of this call.
        interrupted: whether a preemption ended it.
        stopped: the callback that ended the training early, in this call or before it.
        restored: what came back of the checkpoint that this call, or `restore` before it, went on from.
        first_batch: whether the first batch after a resume was the expected one: `equal`, `different`, `none: why`; empty without a resume.
    """

    global_step: int
    epoch: float
    steps_run: int
    interrupted: bool = False
    stopped: str | None = None
    restored: RestoreReport | None = None
    first_batch: str = ""


class Trainer(EdgeWork):
    """Trains a model, calls callbacks, and resumes to the last bit.

    "To the last bit" holds on CPU with deterministic algorithms and the same thread count, for losses and weights, at whatever step edge
    a checkpoint was made. Not thread-safe.

    If a callback has a `preemption`, such as a `SaveModelCallback`, the Trainer looks at it at every edge. An interrupted step or evaluation is
    taken back: random states, data position, buffers, and the states of callbacks are those of the last edge. So `pieces` of yours must
    change at the end of steps only, not in a forward pass.

    A training that a callback has ended (`should_training_stop`) stays ended when it is resumed, unless `args.continue_stopped` says otherwise, or
    the callback's `stop_is_final` is False.

    Args:
        model: its forward gives the loss, if there is no `loss_fn`: called as `model(**batch)` for a mapping, `model(*batch)` for a
            list or tuple, else `model(batch)`.
        args: see `TrainingArguments`.
        train_dataloader: a DataLoader, or anything that can be iterated once per epoch.
        optimizer: of the model's parameters.
        lr_scheduler: stepped as `args.lr_scheduler_interval` says.
        eval_dataloader: for evaluation.
        loss_fn: `loss_fn(model, batch)` returns the loss of a micro-batch, its mean over samples: a scalar tensor, or a mapping or
            an object that has it under `loss`.
        eval_fn: `eval_fn(model, eval_dataloader)` returns metrics, in place of the mean loss; without gradient, in eval mode.
        callbacks: callbacks or classes of them; with several ranks the same ones on all.
        processing_class: handed to callbacks (a tokenizer).
        pieces: further pieces of the state by name, saved and restored with the rest.
    """

    state: TrainerState
    control: TrainerControl

    def __init__(
        self,
        model: torch.nn.Module,
        args: TrainingArguments | None = None,
        *,
        train_dataloader: Iterable[Any],
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any = None,
        eval_dataloader: Iterable[Any] | None = None,
        loss_fn: Callable[[torch.nn.Module, Any], Any] | None = None,
        eval_fn: Callable[[torch.nn.Module, Iterable[Any]], Mapping[str, Any]] | None = None,
        callbacks: Iterable[Any] = (),
        processing_class: Any = None,
        pieces: Mapping[str, Any] | None = None,
    ) -> None:
        self.args = args or TrainingArguments()
        if (self.args.eval_steps or self.args.eval_epochs) and eval_dataloader is None:
            raise ConfigError(
                "evaluation is asked for, but there is no eval_dataloader",
                hint="give one, or unset eval_steps and eval_epochs",
            )
        self.model = model if self.args.device is None else model.to(self.args.device)
        self.device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self._schedule = Schedule(lr_scheduler, self.args, evaluates=eval_dataloader is not None)
        self.train_dataloader = train_dataloader
        self.eval_dataloader = eval_dataloader
        self.processing_class = processing_class
        scaled = self.args.amp == "fp16" if self.args.grad_scaler is None else self.args.grad_scaler
        self.scaler = torch.amp.GradScaler(self.device.type) if scaled else None
        self.state = TrainerState(is_local_process_zero=is_main_process(), is_world_process_zero=is_main_process())
        self.control = TrainerControl()
        self.callbacks = CallbackManager(callbacks)
        self._loss_fn = loss_fn
        self._eval_fn = eval_fn
        self._own_pieces = dict(pieces or {})
        self._position = DataPosition(
            train_dataloader, skip=self.args.skip_data, on_mismatch=self.args.on_data_mismatch
        )
        self._losses = RunningLoss(self.device)
        self._evaluation_data = EvaluationData(lambda: self.eval_dataloader)
        self._progress = Progress(self.state, self._losses, self._evaluation_data, self.conditions)
        self._restored: RestoreReport | None = None
        self._facts: DatasetFacts | None = None
        self._evaluated_step = -1
        self._moved = False
        self._watch_out(None)
        self._call("on_init_end")

    def pieces(self) -> dict[str, Any]:
        """Everything a resumed run needs, by name: for `CheckpointManager.save` and `restore`. The random states are added there.

        Meaningful at a step edge; callbacks get this function as `checkpoint` in `on_save`.
        """
        optional = {"scheduler": self.lr_scheduler, "scaler": self.scaler}
        states = self._edges.states()
        return {
            # A compiled module keeps its own prefix in every key, and the checkpoint would only fit compiled ones.
            "model": getattr(self.model, "_orig_mod", self.model),
            "optimizer": self.optimizer,
            **{name: piece for name, piece in optional.items() if piece is not None},
            "trainer": self._progress,
            "data": self._position,
            "callbacks": self.callbacks if states is None else states,
            **self._own_pieces,
        }

    def conditions(self) -> Conditions:
        """What the data and the arguments say about what this training runs under; every checkpoint has it in its manifest."""
        if self._facts is None:
            self._facts = dataset_facts(self.train_dataloader)
        return Conditions(
            world_size=world_size(), accumulation=self.args.gradient_accumulation_steps, **self._facts._asdict()
        )

    def restore(self, directory: Path) -> RestoreReport:
        """Load a checkpoint of this trainer from a directory; `train` then goes on from there.

        What did not come back, and what training runs under now that is not as it was (`conditions`, versions, the git commit), is logged, one line each.

        Raises:
            IncompatibleStateError: it does not fit; the trainer may be partly loaded.
            IntegrityError: a file is damaged.
            DriftError: something that `args.refuse_drift` names has changed; nothing was loaded.
        """
        refused = drift_names(self.args.refuse_drift) | refused_by_environment()
        self._restored = resume_pieces(directory, self.pieces(), refused=refused)
        _log.info("resuming from step %d, epoch %.4g", self.state.global_step, self.state.epoch)
        return self._restored

    def train(self, resume_from: str | Path | None = None) -> TrainingResult:
        """Train until `max_steps` or the last epoch, or until a callback stops it.

        `on_train_end` is called also after an exception or an interruption, which is raised on. Nothing is saved then: between two step edges
        the state is torn. A preemption is neither: the last step edge is saved, unless it is the one resumed from, and `on_train_end` follows.

        Args:
            resume_from: the directory of a checkpoint, as `ckptmgr resume` prints it. A process that its COMMAND starts again goes on from what was saved
                since then, by the manager of the callbacks. After `manager.restore(trainer.pieces())`, and for a
                second call, it is not needed: training goes on from where the trainer is. With several ranks all of them give one, of the same checkpoint.

        Raises:
            ConflictError: ranks were given different checkpoints, or some of them none.
            IncompatibleStateError: the checkpoint does not fit.
            ConfigError: the loader is empty.
            SystemExit: after a preemption, from a callback that knows the exit code.
        """
        resume = newest(Path(resume_from) if resume_from else None, self.callbacks.manager)
        if resume is not None:
            with_all_ranks(lambda: self.restore(resume))
        first_step = self.state.global_step
        self._plan()
        self._watch_out(self.callbacks.preemption)
        try:
            # Before on_train_begin: what its hooks draw, an uninterrupted run has not drawn at this step.
            rng = capture_rng() if first_step else None
            self._call("on_train_begin", resume_from=resume)
            if interrupted := self._is_interrupted(rng):
                self._leave()
        except BaseException as error:
            if self.control.should_interrupt and isinstance(error, Exception):
                # A callback ends the process with the code of the preemption, and nobody else shows the error.
                _log.exception("training failed while it was being interrupted")
            self._call("on_exception", exception=error)
            raise
        finally:
            self._position.close()
            self._watch_out(None)
            self._call("on_train_end")
        return TrainingResult(
            global_step=self.state.global_step,
            epoch=self.state.epoch,
            steps_run=self.state.global_step - first_step,
            interrupted=interrupted,
            stopped=self.state.stopped,
            restored=self._restored,
            first_batch=self._position.proof,
        )

    def add_callback(self, callback: Any) -> None:
        """Add a callback, an instance of a class of them, or a `CallbackManager`, as `CallbackManager.add` does."""
        self.callbacks.add(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or all instances of a class, as `CallbackManager.remove` does."""
        self.callbacks.remove(callback)

    def log(self, logs: Mapping[str, Any]) -> None:
        """Append to `state.log_history`, with the epoch and the step, and tell the callbacks."""
        entry = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**entry, "step": self.state.global_step})
        self._call("on_log", logs=entry)

    def _plan(self) -> None:
        """How far to train, from the arguments and the length of the loader."""
        args, position = self.args, self._position
        self.state.num_train_epochs = args.num_train_epochs
        per_step, length = args.gradient_accumulation_steps, position.length or 0
        if args.max_steps is not None:
            self.state.max_steps = args.max_steps
            if length:
                self.state.num_train_epochs = math.ceil(args.max_steps / math.ceil(length / per_step))
        elif length:
            # What is left, not the whole: the steps so far may have been of another accumulation (K001).
            left = math.ceil((length - position.batches) / per_step)
            epochs_left = args.num_train_epochs - position.epoch - 1
            self.state.max_steps = self.state.global_step + max(0, left + epochs_left * math.ceil(length / per_step))
        else:
            self.state.max_steps = 0
        self.control.should_training_stop = self.control.should_interrupt = False
        if self.state.stopped is not None and continues_stopped(args.continue_stopped):
            _log.warning(
                "going on from step %d, where %s had ended the training", self.state.global_step, self.state.stopped
            )
            self.state.stopped = None
        self._moved = False

    def _watch_out(self, preemption: Any) -> None:
        """Look at `preemption` from now on; at nothing if None."""
        self._interruption = Interruption(preemption, self.control)
        self._position.waiting = self._interruption.waiting
        self._edges = Edges(self.model, self.callbacks, marks=preemption is not None)

    def _is_interrupted(self, rng: Mapping[str, Any] | None) -> bool:
        """Train; whether a preemption ended it, in which case the trainer is at an edge again."""
        try:
            self._train(rng)
        except Interrupted:
            self._position.go_back()
            return True
        # Complete in spite of a notice: nothing is left to resume.
        self.control.should_interrupt = False
        return False

    def _leave(self) -> None:
        """Have the last edge saved, if there is anything new in it."""
        self.control.should_training_stop = True
        self.control.should_save = False
        preemption = self._interruption.preemption
        if not self._moved:
            _log.warning("interrupted at step %d, where it began: there is nothing new to save", self.state.global_step)
        else:
            self._save(wanted=preemption is None or preemption.save_wanted, together=self._interruption.together)

    def _train(self, rng: Mapping[str, Any] | None) -> None:
        open_edge = self._progress.open_edge
        if self.state.stopped is not None and open_edge is None and not self.control.should_training_stop:
            _log.warning(
                "already stopped (%s): step %d was the last, and no further one is run - to go on, set continue_stopped in "
                "TrainingArguments, or CKPTMGR_CONTINUE_STOPPED=1",
                self.state.stopped,
                self.state.global_step,
            )
            return
        if self._is_done() and open_edge is None:
            # Not info: a job that exits 0 without a step must be noticed (K001).
            _log.warning("nothing left to do: step %d of %d is done", self.state.global_step, self.state.max_steps)
            return
        if self.control.should_training_stop:
            _log.warning("a callback ended the training at step %d, before it ran a step", self.state.global_step)
            return
        self.model.train()
        # An interrupted step of an earlier call leaves gradients behind.
        self.optimizer.zero_grad()
        self._position.warm_up()
        self._evaluation_data.begin()
        if rng is not None:
            restore_rng(rng)
        self._interruption.begin(self._position.length)
        if open_edge is not None:
            self._finish_open_edge(open_edge)
            rng = capture_rng()
        while not (self._is_done() or self.control.should_training_stop):
            self._run_epoch(rng)
            rng = None

    def _is_done(self) -> bool:
        if self.args.max_steps is not None:
            return self.state.global_step >= self.args.max_steps
        return (
            self._position.epoch + (1 if self._position.batches and self._position.exhausted else 0)
            >= self.args.num_train_epochs
        )

    def _run_epoch(self, rng: Mapping[str, Any] | None) -> None:
        """Run the present epoch, or the rest of it; ends early when a callback or `max_steps` says so."""
        self.control.should_epoch_stop = False
        self._schedule.begin_epoch()
        self._edges.mark(EPOCH_HOOKS)
        self._call("on_epoch_begin")
        with self._edges.step(), self._interruption.loading():
            self._position.begin(rng)
        over = False
        while not over:
            with self._edges.step():
                window = self._next_window()
                if window:
                    self._run_step(window)
                elif not self._position.batches:
                    raise ConfigError(
                        "the train_dataloader gave no batch", hint="check its dataset, batch size and drop_last"
                    )
            over = self._step_edge(stepped=bool(window))
            self._edges.mark()

    def _next_window(self) -> list[Any]:
        """The micro-batches of the next step; none at the end of the epoch."""
        if self._edges.marks:
            self._interruption.leave_if_due()
        with self._interruption.loading():
            return self._position.take(self.args.gradient_accumulation_steps)

    def _run_step(self, window: list[Any]) -> None:
        """One optimizer step over all micro-batches of `window`."""
        control = self.control
        control.should_save = control.should_evaluate = control.should_log = False
        cuts = self._interruption.cuts_steps and len(window) > 1
        if cuts:
            self._edges.mark_step()
        self._call("on_step_begin", batch=window[0])
        done = self._step_over(window, self._leave_between if cuts else lambda: None)
        self._position.advance(len(window))
        self._optimize(len(window), exhausted=self._position.exhausted)
        self.state.global_step += 1
        self._moved = True
        self.state.epoch = self._position.epochs
        self._losses.add(done["outputs"]["loss"])
        self._set_flags(self.state.global_step, self.args.logging_steps, self.args.eval_steps)
        self._call("on_step_end", **done, checkpoint=self.pieces)

    def _leave_between(self) -> None:
        """Between two micro-batches: leave if a preemption says so, and the model can be taken back."""
        if self._edges.can_go_back:
            self._interruption.leave_if_due()

    def _call(self, event: str, **arguments: Any) -> None:
        self.callbacks.call(
            event,
            args=self.args,
            state=self.state,
            control=self.control,
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            train_dataloader=self.train_dataloader,
            eval_dataloader=self.eval_dataloader,
            processing_class=self.processing_class,
            **arguments,
        )
