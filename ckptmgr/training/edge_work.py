"""What the reference Trainer does between two steps: log, evaluate, end the epoch, save."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

from ckptmgr.training import ranks
from ckptmgr.training.data_position import DataPosition
from ckptmgr.training.edges import Edges
from ckptmgr.training.evaluation_data import EvaluationData
from ckptmgr.training.interruption import Interrupted, Interruption
from ckptmgr.training.progress import OpenEdge, Progress, RunningLoss
from ckptmgr.training.rank_rng import gather_rng
from ckptmgr.training.stepping import Stepping

_log = logging.getLogger(__name__)


class EdgeWork(Stepping):
    """Works off a step's edge; see `Trainer`, which is the only one.

    Everything may change there but the data and the weights, and the save is the last act. A preemption within an evaluation leaves an `OpenEdge`.
    """

    state: Any
    control: Any
    _interruption: Interruption
    _edges: Edges
    _position: DataPosition
    _losses: RunningLoss
    _progress: Progress
    _evaluation_data: EvaluationData
    _evaluated_step: int
    _moved: bool

    @abstractmethod
    def pieces(self) -> Mapping[str, Any]:
        """Everything a resumed run needs, by name."""

    @abstractmethod
    def _is_done(self) -> bool:
        """Whether all steps are done."""

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
        wanted, self.control.should_save = self.control.should_save, False
        self._save(wanted=wanted, together=True)

    def _save(self, *, wanted: bool, together: bool) -> None:
        """Have the edge saved, if that is wanted. `together`: all ranks are here, so that each one's random states come along; then a collective."""
        if together and ranks.any_rank(wanted):
            gather_rng()
        if wanted:
            self._call("on_save", checkpoint=self.pieces)

    def _finish_open_edge(self, edge: OpenEdge) -> None:
        """Do what the interrupted run had not done of the edge of its last step."""
        _log.info("evaluating step %d again, which a preemption had cut off", self.state.global_step)
        control = self.control
        control.should_log, control.should_evaluate, control.should_save = False, True, edge.save
        control.should_epoch_stop, control.should_training_stop = edge.epoch_stop, edge.training_stop
        if edge.exhausted:
            self._position.end()
        self._schedule.begin_epoch(exhausted=edge.exhausted)
        if edge.stage == "step":
            self._step_edge(stepped=True)
        else:
            self._interruption.is_due()
            self._log_and_evaluate("epoch")
            self._save_at_edge()

    def _finish_epoch(self) -> None:
        complete = self._position.exhausted
        self._position.let_end()
        self._position.finish_epoch()
        self._schedule.epoch_ended()
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
            with self._edges.evaluation(self._evaluation_data.generators):
                if control.should_interrupt:
                    raise Interrupted
                data = self._interruption.watched(self._eval_data(), by_others=self._eval_fn is not None)
                metrics = self._evaluate(data)
        except Interrupted:
            self._progress.open_edge = open_edge
            raise
        self._schedule.evaluated(metrics)
        self._evaluated_step = self.state.global_step
        if self._progress.open_edge is not None:
            self._progress.open_edge = None
            self._moved = True
