"""The accuracy of preference training: what it is, where it is read, and when it ends a training."""

from __future__ import annotations

import copy
import json
import logging
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies

from ckptmgr.callbacks.base import Callback, TrainerControl, TrainerState
from ckptmgr.callbacks.dpo_accuracy import DPOAccuracyCallback
from ckptmgr.callbacks.dpo_rewards import completion_log_probs, implicit_rewards, reward_accuracies
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.errors import ConfigError
from ckptmgr.core.policies import Best
from ckptmgr.trainer import Trainer, TrainingArguments

VOCABULARY, PAIRS, LENGTH = 16, 4, 6
ACCURACY = "rewards/accuracies"

pytestmark = pytest.mark.usefixtures("one_thread")


class Model(torch.nn.Module):
    """A language model: of each token, what comes next; with dropout, which must not be drawn from."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 8)
        self.frozen = torch.nn.Dropout(0.5).eval()
        self.head = torch.nn.Linear(8, VOCABULARY)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.head(self.dropout(self.frozen(self.embedding(input_ids)))))


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(2 * PAIRS, LENGTH, dtype=torch.long)
    mask[:, :2] = 0
    mask[1, -1] = 0
    return {
        "input_ids": torch.randint(0, VOCABULARY, (2 * PAIRS, LENGTH), generator=generator),
        "attention_mask": torch.ones(2 * PAIRS, LENGTH, dtype=torch.long),
        "completion_mask": mask,
    }


def dpo_loss(reference: torch.nn.Module, *, sign: float = 1.0, tells: bool = True) -> Any:
    """A loss function as users write them; `sign=-1` learns the wrong way round."""

    def log_probs(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        said = logits.float().log_softmax(-1).gather(2, batch["input_ids"][:, 1:].unsqueeze(-1)).squeeze(-1)
        total: torch.Tensor = (said * batch["completion_mask"][:, 1:]).sum(-1)
        return total

    def loss_fn(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
        with torch.no_grad():
            theirs = log_probs(reference, batch)
        chosen, rejected = (0.1 * (log_probs(model, batch) - theirs)).chunk(2)
        loss = -torch.nn.functional.logsigmoid(sign * (chosen - rejected)).mean()
        return {"loss": loss, "rewards/chosen": chosen, "rewards/rejected": rejected} if tells else loss

    return loss_fn


def trainer_of(*callbacks: Any, sign: float = 1.0, tells: bool = True, batches: int = 4, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model).eval()
    for callback in callbacks:
        if getattr(callback, "reference", None) is True:
            callback.reference = reference
    return Trainer(
        model,
        TrainingArguments(**{"max_steps": 40, "logging_steps": 5, **arguments}),
        train_dataloader=[batch_of(seed) for seed in range(batches)],
        eval_dataloader=[batch_of(seed) for seed in range(2)],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        loss_fn=dpo_loss(reference, sign=sign, tells=tells),
        callbacks=callbacks,
    )


class Watch(Callback):
    """Notes the accuracy of each micro-batch as the loss function tells it."""

    def __init__(self) -> None:
        self.by_step: dict[int, list[float]] = {}

    def on_substep_end(self, state: Any, outputs: Any, **kwargs: Any) -> None:
        self.by_step.setdefault(state.global_step + 1, []).extend(reward_accuracies(outputs).float().tolist())

    def on_step_end(self, state: Any, outputs: Any, **kwargs: Any) -> None:
        self.by_step.setdefault(state.global_step, []).extend(reward_accuracies(outputs).float().tolist())


# --- the number -----------------------------------------------------------------------------------------------------------


def test_rewards_are_those_of_the_loss_function_and_nothing_is_drawn_or_left_changed() -> None:
    torch.manual_seed(1)
    model, reference, batch = Model(), Model(), batch_of(3)
    model.train()
    model.frozen.eval()
    told = dpo_loss(reference.eval())(copy.deepcopy(model).eval(), batch)
    before = torch.get_rng_state()
    chosen, rejected = implicit_rewards(model, batch, reference=reference)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.allclose(chosen, told["rewards/chosen"], atol=1e-6)
    assert torch.allclose(rejected, told["rewards/rejected"], atol=1e-6)
    assert not chosen.requires_grad
    assert model.training
    assert model.dropout.training
    assert not model.frozen.training
    stored = {**batch, "ref_chosen_logps": completion_log_probs(reference, batch)[:PAIRS]}
    stored["ref_rejected_logps"] = completion_log_probs(reference, batch)[PAIRS:]
    assert torch.equal(implicit_rewards(model, stored)[0], chosen)
    with pytest.raises(ConfigError, match="without a reference model - give reference="):
        implicit_rewards(model, batch)


def test_ties_and_what_is_no_number_count_as_wrong() -> None:
    chosen = torch.tensor([1.0, 1.0, math.nan, 2.0, 0.0])
    rejected = torch.tensor([0.0, 1.0, 0.0, math.nan, 1.0])
    expected = [True, False, False, False, False]
    assert reward_accuracies({"rewards/chosen": chosen, "rewards/rejected": rejected}).tolist() == expected
    named = SimpleNamespace(chosen_rewards=chosen, rejected_rewards=rejected)
    assert reward_accuracies(named).tolist() == expected
    assert reward_accuracies({"loss": torch.tensor(1.0)}) is None
    assert reward_accuracies(None) is None
    # A mean alone says nothing about pairs.
    assert reward_accuracies({"rewards/chosen": 1.0, "rewards/rejected": 0.5}) is None


# --- in the embedded Trainer ------------------------------------------------------------------------------------------------


def test_a_reading_is_the_mean_over_all_pairs_of_its_steps_and_micro_batches() -> None:
    watch, callback = Watch(), DPOAccuracyCallback(window=100, log_interval=4)
    trainer_of(callback, watch, max_steps=8, gradient_accumulation_steps=2, batches=20).train()
    expected = []
    for first in (1, 5):
        pairs = [pair for step in range(first, first + 4) for pair in watch.by_step[step]]
        assert len(pairs) == 4 * 2 * PAIRS
        expected.append(sum(pairs) / len(pairs))
    assert callback._values.values == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("reference", [True, None])
def test_what_will_be_computed_is_not_missed_before(reference: Any, caplog: pytest.LogCaptureFixture) -> None:
    callback = DPOAccuracyCallback(window=2, log_interval=4, reference=reference)
    trainer_of(callback, tells=reference is None, logging_steps=1, max_steps=5).train()
    assert callback.readings == 1
    assert "neither in the logs" not in caplog.text


def test_with_a_reference_it_is_computed_at_sampled_steps_and_training_is_the_same_to_the_last_bit() -> None:
    class Computed(Callback):
        def __init__(self) -> None:
            self.values: list[float] = []

        def on_step_end(self, state: Any, model: Any, batch: Any, **kwargs: Any) -> None:
            if state.global_step % 4 == 0:
                chosen, rejected = implicit_rewards(model, batch, reference=callback.reference)
                self.values.append((chosen > rejected).float().mean().item())

    callback, check = DPOAccuracyCallback(window=100, log_interval=4, reference=True), Computed()
    with_it = trainer_of(callback, check, tells=False, max_steps=16)
    with_it.train()
    assert callback._values.values == pytest.approx(check.values, abs=1e-6)
    assert len(check.values) == 4
    without = trainer_of(tells=False, max_steps=16)
    without.train()
    assert all(torch.equal(a, b) for a, b in zip(with_it.model.parameters(), without.model.parameters(), strict=True))


def test_the_accuracy_of_an_evaluation_is_in_its_metrics_for_policies_and_others(fake_manager: Any) -> None:
    manager = fake_manager(save_policy=Best("eval_rewards/accuracies", mode="max"), preemption=None)
    callback = DPOAccuracyCallback(window=10, monitor="eval_rewards/accuracies")
    seen: list[float] = []

    class Other(Callback):
        def on_evaluate(self, metrics: Any, **kwargs: Any) -> None:
            seen.append(metrics["eval_rewards/accuracies"])

    trainer_of(Other(), SaveModelCallback(manager, preemption=False), callback, eval_steps=10).train()
    assert seen == callback._values.values
    assert len(seen) == 4
    assert manager.saves[0]["reasons"][0] == "best:eval_rewards/accuracies"
    assert manager.saves[0]["metrics"]["eval_rewards/accuracies"] == seen[0]


def test_a_training_that_stays_below_is_ended_and_saved_and_a_learning_one_is_not(
    caplog: pytest.LogCaptureFixture, fake_manager: Any
) -> None:
    def stopping() -> DPOAccuracyCallback:
        return DPOAccuracyCallback(0.52, window=3, warmup=19, stop=True, log_interval=2)

    manager = fake_manager(preemption=None)
    bad = trainer_of(SaveModelCallback(manager, preemption=False), stopping(), sign=-1.0)
    result = bad.train()
    assert result.global_step == 20  # the first reading after the warm-up with a full window
    assert result.stopped == "DPOAccuracyCallback"
    assert [save["step"] for save in manager.saves] == [20]
    (said,) = [r.getMessage() for r in caplog.records if "rewards/accuracies" in r.getMessage()]
    assert " over the last 3 readings, below 0.52, at step 20: training ends - " in said
    good = trainer_of(stopping())
    assert good.train().global_step == 40
    assert good.callbacks.callbacks[0].accuracy > 0.8


# --- where the host says it in its logs ---------------------------------------------------------------------------------------


def play(callback: DPOAccuracyCallback, readings: list[Any], *, by_position: bool = False, first: int = 1) -> list[int]:
    """A host that logs every step, as transformers calls callbacks or through a manager of ours; the steps where it was asked to stop."""
    manager = CallbackManager([] if by_position else [callback])
    stops = []
    for step, reading in enumerate(readings, start=first):
        control, state = TrainerControl(), TrainerState(global_step=step)
        logs = {"loss": 0.69, **({} if reading is None else {"rewards/accuracies": reading})}
        if by_position:
            callback.on_step_end(None, state, control, model=None, optimizer=None)
            callback.on_log(None, state, control, logs=logs, model=None, optimizer=None)
        else:
            manager.call("on_step_end", args=None, state=state, control=control)
            manager.call("on_log", args=None, state=state, control=control, logs=logs)
        if control.should_training_stop:
            stops.append(step)
    return stops


@pytest.mark.parametrize("by_position", [True, False])
def test_the_logs_of_trl_are_read(by_position: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    callback = DPOAccuracyCallback(window=2, warmup=3, stop=True)
    readings = [0.1, 0.2, 0.3, 0.5, 0.6, 0.5, 0.4, 0.9]
    assert play(callback, readings, by_position=by_position) == [4, 7]
    assert callback.accuracy == pytest.approx(0.65)
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split(" over ")[0] for message in messages] == [
        *("rewards/accuracies is 0.400", "rewards/accuracies is 0.550", "rewards/accuracies is 0.450"),
        "rewards/accuracies is 0.650",
    ]


def test_far_below_chance_looks_like_swapped_answers(caplog: pytest.LogCaptureFixture) -> None:
    play(DPOAccuracyCallback(window=2, warmup=0), [0.1, 0.2])
    assert [record.getMessage() for record in caplog.records] == [
        "rewards/accuracies is 0.150 over the last 2 readings, below 0.52, at step 2 - are chosen and rejected answers swapped?"
    ]


def test_ties_are_not_taken_for_swapped_answers(caplog: pytest.LogCaptureFixture) -> None:
    """A model that does not move has the rewards of its reference: all ties, which count as wrong."""
    callback = DPOAccuracyCallback(window=1, warmup=0, monitor="eval_rewards/accuracies")
    metrics = {"eval_rewards/accuracies": 0.0, "eval_rewards/margins": 0.0}
    callback.on_evaluate(None, TrainerState(global_step=1), TrainerControl(), metrics=metrics)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.endswith(
        "at step 1 - the rewards of both answers are the same, as before any training: look at the learning rate, and at what is trained"
    )


def test_exactly_at_the_threshold_is_not_below() -> None:
    assert play(DPOAccuracyCallback(0.5, window=2, warmup=0, stop=True), [0.5, 0.5, 0.25]) == [3]


def test_readings_that_are_no_number_are_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    callback = DPOAccuracyCallback(window=2, warmup=0, stop=True)
    assert play(callback, [math.nan, 0.1, math.inf, 0.2]) == [4]
    assert [record.getMessage() for record in caplog.records][:1] == [
        "rewards/accuracies is nan at step 1: left out",
    ]
    assert sum("left out" in record.getMessage() for record in caplog.records) == 1


def test_a_missing_metric_is_said_once_with_what_is_there_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    callback = DPOAccuracyCallback(window=1, warmup=0, stop=True)
    assert play(callback, [None, None, None]) == []
    assert [record.getMessage() for record in caplog.records] == [
        "rewards/accuracies is neither in the logs nor can it be computed here; there are: loss"
    ]


def test_other_ranks_decide_alike_and_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    callback, control = DPOAccuracyCallback(window=1, warmup=0, stop=True), TrainerControl()
    state = TrainerState(global_step=1, is_world_process_zero=False)
    callback.on_log(None, state, control, logs={"rewards/accuracies": 0.1})
    assert control.should_training_stop
    assert caplog.records == []


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_resumed_run_decides_as_an_uninterrupted_one(cut: int) -> None:
    readings = [0.9, 0.4, math.nan, 0.3, 0.45, 0.6, 0.9, 0.1]

    def make() -> DPOAccuracyCallback:
        return DPOAccuracyCallback(window=3, warmup=2, stop=True)

    first, second = make(), make()
    stops = play(first, readings[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert stops + play(second, readings[cut:], first=cut + 1) == play(make(), readings)


# --- the same everywhere --------------------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(
    readings=strategies.lists(strategies.sampled_from([0.0, 0.4, 0.5, 0.52, 0.6, 1.0, math.nan, None]), max_size=8),
    window=strategies.integers(1, 3),
    warmup=strategies.integers(0, 3),
)
def test_every_host_gets_the_same_decision_for_the_same_evaluations(
    replay: Any, readings: list[float | None], window: int, warmup: int
) -> None:
    metrics = [{"eval_loss": 1.0, **({} if each is None else {f"eval_{ACCURACY}": each})} for each in readings]
    decided = []
    for shape in ("embedded", "huggingface", "plain") if readings else ():
        callback = DPOAccuracyCallback(window=window, warmup=warmup, stop=True, monitor=f"eval_{ACCURACY}")
        decided.append((replay(shape, callback, metrics=metrics), callback.state_dict()["readings"]))
    assert all(each == decided[0] for each in decided)
    finite = [(step, each) for step, each in enumerate(readings, start=1) if each is not None and math.isfinite(each)]
    low = (
        step
        for end, (step, _) in enumerate(finite, start=1)
        if end >= window and step > warmup and sum(each for _, each in finite[end - window : end]) / window < 0.52
    )
    assert not decided or decided[0][0].stopped == next(low, None)


RANK = """
import json, os, sys
import torch
import torch.distributed as dist
from ckptmgr.callbacks.dpo_accuracy import DPOAccuracyCallback
from ckptmgr.trainer import Trainer, TrainingArguments

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
torch.set_num_threads(1)

def run(wrong_from):
    model = torch.nn.Linear(2, 1)
    def loss_fn(model, batch):
        # Rank 0 is always right; rank 1 is wrong from some step on, and has three times as many pairs.
        wrong = rank and trainer.state.global_step >= wrong_from
        chosen = torch.full((3 if rank else 1,), -1.0 if wrong else 1.0)
        return {"loss": model(batch).square().mean(), "rewards/chosen": chosen, "rewards/rejected": -chosen}
    callback = DPOAccuracyCallback(window=2, warmup=0, stop=True, log_interval=2)
    trainer = Trainer(
        model,
        TrainingArguments(max_steps=10, gradient_accumulation_steps=2),
        train_dataloader=[torch.ones(1, 2)] * 20,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=loss_fn,
        callbacks=[callback],
    )
    return [trainer.train().global_step, callback.state_dict()["readings"]]

print(json.dumps([run(3), run(100)]))
sys.stdout.flush()
dist.destroy_process_group()
os._exit(0)  # gloo's threads may abort an interpreter that takes its time to end
"""


def test_all_ranks_stop_together_by_the_pairs_of_all(tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "file")], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    told = [json.loads(each.communicate(timeout=120.0)[0]) for each in started]
    # Steps 3 and 4: of 16 pairs the 6 of rank 1's fourth step are wrong.
    whole = [1.0, 10 / 16, 4 / 16]
    assert told[0] == told[1] == [[6, whole[-2:]], [10, [1.0, 1.0]]]


@pytest.mark.parametrize(
    "arguments",
    [
        {"threshold": 52},
        {"window": 0},
        {"warmup": -1},
        {"log_interval": 0},
        {"beta": 0},
        {"stop": "yes"},
        {"monitor": ""},
    ],
    ids=str,
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"DPOAccuracyCallback: {next(iter(arguments))} is .* - "):
        DPOAccuracyCallback(**arguments)
