"""The half of the reference Trainer that changes nothing: forward passes, evaluation, prediction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ckptmgr.core.errors import ConfigError
from ckptmgr.training.arguments import TrainingArguments
from ckptmgr.training.forward import Outputs, autocast, call_model, evaluation_mode, split_loss, to_device


class Evaluating(ABC):
    """Evaluates and predicts; see `Trainer`, which is the only one."""

    args: TrainingArguments
    model: torch.nn.Module
    device: torch.device
    eval_dataloader: Iterable[Any] | None
    _loss_fn: Callable[[torch.nn.Module, Any], Any] | None
    _eval_fn: Callable[[torch.nn.Module, Iterable[Any]], Mapping[str, Any]] | None

    @abstractmethod
    def log(self, logs: Mapping[str, Any]) -> None:
        """Append to `state.log_history`, with the epoch and the step, and tell the callbacks."""

    @abstractmethod
    def _call(self, event: str, **arguments: Any) -> None:
        """Call the hook `event` of all callbacks."""

    def evaluate(self) -> dict[str, float]:
        """Evaluate now; metrics get the prefix `eval_`, are logged, and go to the callbacks."""
        return self._evaluate(self._eval_data())

    def predict(self, dataloader: Iterable[Any]) -> list[Any]:
        """What the model returns for every batch, in order, without gradient; needs no loss. Hooks get it as `outputs`."""
        results = []
        with evaluation_mode(self.model):
            for given in dataloader:
                batch = to_device(given, self.device)
                with autocast(self.device, self.args.amp):
                    results.append(call_model(self.model, batch))
                self._call("on_prediction_step", batch=batch, outputs=results[-1])
        self._call("on_predict", metrics={})
        return results

    def _eval_data(self) -> Iterable[Any]:
        if self.eval_dataloader is None:
            raise ConfigError("there is no eval_dataloader", hint="give one to the Trainer")
        return self.eval_dataloader

    def _evaluate(self, dataloader: Iterable[Any]) -> dict[str, float]:
        self._call("on_evaluate_begin")
        with evaluation_mode(self.model):
            found = self._mean_loss(dataloader) if self._eval_fn is None else self._eval_fn(self.model, dataloader)
        metrics = {name if name.startswith("eval_") else f"eval_{name}": float(value) for name, value in found.items()}
        self.log(metrics)
        self._call("on_evaluate", metrics=metrics)
        return metrics

    def _mean_loss(self, dataloader: Iterable[Any]) -> dict[str, float]:
        losses = []
        for given in dataloader:
            batch = to_device(given, self.device)
            loss, outputs = self._forward(batch)
            losses.append(loss.double())
            self._call("on_prediction_step", batch=batch, outputs=outputs)
        if not losses:
            raise ConfigError("the eval_dataloader gave no batch", hint="check its dataset and batch size")
        return {"loss": float(torch.stack(losses).mean())}

    def _forward(self, batch: Any) -> tuple[torch.Tensor, Outputs]:
        """The loss with its graph, and the outputs without."""
        with autocast(self.device, self.args.amp):
            result = call_model(self.model, batch) if self._loss_fn is None else self._loss_fn(self.model, batch)
        return split_loss(result)
