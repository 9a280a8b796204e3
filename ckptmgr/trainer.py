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
from typing import Any, Literal

import torch

from ckptmgr.callbacks.base import TrainerControl, TrainerState
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.core.errors import ConfigError
from ckptmgr.training import state as training_state
from ckptmgr.training.arguments import TrainingArguments
from ckptmgr.training.data_position import DataPosition
from ckptmgr.training.edges import EPOCH_HOOKS, Edges
from ckptmgr.training.evaluating import Evaluating
from ckptmgr.training.forward import optimizer_step, to_device
from ckptmgr.training.interruption import Interrupted, Interruption
from ckptmgr.training.progress import OpenEdge, Progress, RunningLoss
from ckptmgr.training.ranks import is_main_process
from ckptmgr.training.rng import capture_rng, restore_rng

__all__ = ["Trainer", "TrainingArguments", "TrainingResult"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """What `train` did: the step and epoch it is at, how many optimizer steps this call ran, and whether a preemption ended it."""

    global_step: int
    epoch: float
    steps_run: int
    interrupted: bool = False


class Trainer(Evaluating):
    """Trains a model, calls callbacks, and resumes to the last bit.

    "To the last bit" holds on CPU with deterministic algorithms and the same thread count, for losses and weights, at whatever step edge
    a checkpoint was made. Not thread-safe.

    If a callback has a `preemption`, such as a `SaveModelCallback`, the Trainer looks at it at every edge. An interrupted step or evaluation is
    taken back: random states, data position, buffers, and the states of callbacks are those of the last edge. So `pieces` of yours must
    change at the end of steps only, not in a forward pass.

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
        callbacks: callbacks or classes of them.
        processing_class: handed to callbacks (a tokenizer).
        pieces: further pieces of the state by name, saved and restored with the rest.
    """

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
        self._position = DataPosition(train_dataloader)
        self._losses = RunningLoss(self.device)
        self._progress = Progress(self.state, self._losses)
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

    def restore(self, directory: Path) -> training_state.RestoreReport:
        """Load a checkpoint of this trainer from a directory; `train` then goes on from there.

        Raises:
            IncompatibleStateError: it does not fit; the trainer may be partly loaded.
            IntegrityError: a file is damaged.
        """
        report = training_state.restore(directory, self.pieces())
        for note in report.notes:
            _log.warning("%s", note)
        if report.missing:
            _log.warning(
                "the checkpoint has no %s: the resumed run will not equal the uninterrupted one",
                ", ".join(report.missing),
            )
        if report.unexpected:
            _log.warning("the checkpoint also has %s, which nothing here takes up", ", ".join(report.unexpected))
        _log.info("resuming from step %d, epoch %.4g", self.state.global_step, self.state.epoch)
        return report

    def train(self, resume_from: str | Path | None = None) -> TrainingResult:
        """Train until `max_steps` or the last epoch, or until a callback stops it.

        `on_train_end` is called also after an exception or an interruption, which is raised on. Nothing is saved then: between two step edges
        the state is torn. A preemption is neither: the last step edge is saved, unless it is the one resumed from, and `on_train_end` follows.

        Args:
            resume_from: the directory of a checkpoint, as `ckptmgr resume` prints it. After `manager.restore(trainer.pieces())`, and for a
                second call, it is not needed: training goes on from where the trainer is.

        Raises:
            IncompatibleStateError: the checkpoint does not fit.
            ConfigError: the loader is empty.
            SystemExit: after a preemption, from a callback that knows the exit code.
        """
        resume = Path(resume_from) if resume_from else None
        if resume is not None:
            self.restore(resume)
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
        )

    def log(self, logs: Mapping[str, Any]) -> None:
        """Append to `state.log_history`, with the epoch and the step, and tell the callbacks."""
        entry = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**entry, "step": self.state.global_step})
        self._call("on_log", logs=entry)

    def _plan(self) -> None:
        """How far to train, from the arguments and the length of the loader."""
        args, length = self.args, self._position.length
        self.state.num_train_epochs = args.num_train_epochs
        steps_per_epoch = None if length is None else math.ceil(length / args.gradient_accumulation_steps)
        if args.max_steps is not None:
            self.state.max_steps = args.max_steps
            if steps_per_epoch:
                self.state.num_train_epochs = math.ceil(args.max_steps / steps_per_epoch)
        else:
            self.state.max_steps = args.num_train_epochs * (steps_per_epoch or 0)
        self.control.should_training_stop = self.control.should_interrupt = False
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
        elif preemption is None or preemption.save_wanted:
            self._call("on_save", checkpoint=self.pieces)

    def _train(self, rng: Mapping[str, Any] | None) -> None:
        open_edge = self._progress.open_edge
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
        if self.state.max_steps:
            return self.state.global_step >= self.state.max_steps
        return self._position.epoch >= self.state.num_train_epochs

    def _run_epoch(self, rng: Mapping[str, Any] | None) -> None:
        """Run the present epoch, or the rest of it; ends early when a callback or `max_steps` says so."""
        self.control.should_epoch_stop = False
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
        total = torch.zeros((), device=self.device)
        for index, given in enumerate(window):
            batch = to_device(given, self.device)
            loss, outputs = self._forward(batch)
            self._backward(loss / len(window))
            total += outputs["loss"] / len(window)
            if index + 1 < len(window):
                self._call("on_substep_end", batch=batch, outputs=outputs)
                if cuts and self._edges.can_go_back:
                    self._interruption.leave_if_due()
        self._position.advance(len(window))
        self._optimize()
        self.state.global_step += 1
        self._moved = True
        self.state.epoch = self._position.epochs
        self._losses.add(total)
        self._set_flags(self.state.global_step, self.args.logging_steps, self.args.eval_steps)
        self._call("on_step_end", batch=batch, outputs={**outputs, "loss": total}, checkpoint=self.pieces)

    def _optimize(self) -> None:
        stepped = optimizer_step(
            self.optimizer,
            self.model,
            self.scaler,
            max_grad_norm=self.args.max_grad_norm,
            before=lambda: self._call("on_pre_optimizer_step"),
        )
        self._call("on_optimizer_step")
        by_epoch = self.args.lr_scheduler_interval == "epoch"
        # An overflow skips the optimizer's step, so the scheduler's as well.
        if self.lr_scheduler is not None and (self._position.exhausted if by_epoch else stepped):
            self.lr_scheduler.step()
        self.optimizer.zero_grad()

    def _step_edge(self, *, stepped: bool) -> bool:
        """Everything between two steps, the save last; whether the epoch is over."""
        # Before anything that takes long, and after the hooks of the step: the last moment at which this step's save is whole.
        self._interruption.is_due()
        if stepped:
            self._log_and_evaluate("step")
        ended = self._position.exhausted or self.control.should_epoch_stop
        over = ended or self.control.should_training_stop
        if over:
            if ended:
                self._finish_epoch()
            self._call("on_epoch_end")
            self._log_and_evaluate("epoch")
        self._save_at_edge()
        return over

    def _save_at_edge(self) -> None:
        if self.control.should_interrupt and not self.control.should_training_stop:
            raise Interrupted
        if self.control.should_save:
            self.control.should_save = False
            self._call("on_save", checkpoint=self.pieces)

    def _finish_open_edge(self, edge: OpenEdge) -> None:
        """Do what the interrupted run had not done of the edge of its last step."""
        _log.info("evaluating step %d again, which a preemption had cut off", self.state.global_step)
        control = self.control
        control.should_log, control.should_evaluate, control.should_save = False, True, edge.save
        control.should_epoch_stop, control.should_training_stop = edge.epoch_stop, edge.training_stop
        if edge.exhausted:
            self._position.end()
        if edge.stage == "step":
            self._step_edge(stepped=True)
        else:
            self._interruption.is_due()
            self._log_and_evaluate("epoch")
            self._save_at_edge()

    def _finish_epoch(self) -> None:
        complete = self._position.exhausted
        self._position.finish_epoch()
        if complete:
            self.state.epoch = float(self._position.epoch)
        # The step may have been evaluated a moment ago; the weights are the same.
        evaluated = self._evaluated_step == self.state.global_step
        self._set_flags(self._position.epoch, None, self.args.eval_epochs if complete and not evaluated else None)

    def _set_flags(self, count: int, logging: int | None, evaluation: int | None) -> None:
        """Before the hooks, which may take a flag back."""
        if logging and count % logging == 0:
            self.control.should_log = True
        if evaluation and count % evaluation == 0:
            self.control.should_evaluate = True
        if self._is_done():
            self.control.should_training_stop = True

    def _log_and_evaluate(self, stage: Literal["step", "epoch"]) -> None:
        if self.control.should_log:
            self.control.should_log = False
            self.log({"loss": self._losses.take(), "learning_rate": float(self.optimizer.param_groups[0]["lr"])})
        if self.control.should_evaluate:
            self.control.should_evaluate = False
            self._evaluate_at_edge(stage)

    def _evaluate_at_edge(self, stage: Literal["step", "epoch"]) -> None:
        control = self.control
        open_edge = OpenEdge(
            stage=stage,
            save=control.should_save,
            epoch_stop=control.should_epoch_stop,
            training_stop=control.should_training_stop,
            exhausted=self._position.exhausted,
        )
        try:
            with self._edges.evaluation():
                if control.should_interrupt:
                    raise Interrupted
                self._evaluate(self._interruption.watched(self._eval_data(), by_others=self._eval_fn is not None))
        except Interrupted:
            self._progress.open_edge = open_edge
            raise
        self._evaluated_step = self.state.global_step
        if self._progress.open_edge is not None:
            self._progress.open_edge = None
            self._moved = True

    def _backward(self, loss: torch.Tensor) -> None:
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]

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
