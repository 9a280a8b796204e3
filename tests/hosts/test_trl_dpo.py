"""TRL's DPOTrainer, in this process: the accuracy that it logs is ours on the same batches, and what stays near chance is ended."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.callbacks.dpo_accuracy import DPOAccuracyCallback
from ckptmgr.callbacks.dpo_rewards import implicit_rewards, is_preference_batch
from ckptmgr.callbacks.early_stopping import EarlyStoppingCallback
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.testing.events import EventRecorder, agree

pytest.importorskip("trl")
# Not ours: what transformers and its libraries have to say about each other.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("offline", "one_thread")]

WORDS = ("<pad>", "<end>", "ask", "yes", "no", "maybe", *(f"w{number}" for number in range(26)))
ACCURACY = "rewards/accuracies"

Make = Callable[..., Any]


def make_in(folder: Path, *callbacks: Any, rows: int = 16, **options: Any) -> Any:
    """A training of 8 steps of two micro-batches of two pairs."""
    import torch
    from datasets import Dataset  # type: ignore[import-not-found, unused-ignore]
    from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-not-found, unused-ignore]
    from transformers import (  # type: ignore[import-not-found, unused-ignore]
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )
    from trl import DPOConfig, DPOTrainer  # type: ignore[import-not-found, unused-ignore]

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    pairs = [
        {
            "prompt": f"ask w{number % 26} w{number * 7 % 26}",
            "chosen": f" yes w{number * 3 % 26}" + " maybe" * (number % 3),
            "rejected": f" no w{number * 5 % 26}",
        }
        for number in range(rows)
    ]

    def model() -> Any:
        torch.manual_seed(7)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(WORDS),
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=32,
                pad_token_id=0,
                eos_token_id=1,
                bos_token_id=None,
            )
        )

    class Checked(DPOTrainer):  # type: ignore[misc, unused-ignore]
        """Computes our accuracy of each micro-batch beside its own."""

        ours: list[float]
        evaluated: list[float]

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            assert is_preference_batch(inputs)
            training = model.training
            chosen, rejected = implicit_rewards(model, inputs, reference=self.ref_model, beta=self.args.beta)
            assert model.training is training
            (self.ours if training else self.evaluated).append((chosen > rejected).float().mean().item())
            return super().compute_loss(model, inputs, *args, **kwargs)

    arguments = {
        "output_dir": str(folder / "out"),
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "max_length": 32,
        "beta": 0.1,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 7,
        **options,
    }
    data = Dataset.from_list(pairs)
    trainer = Checked(
        model=model(),
        ref_model=model(),
        args=DPOConfig(**arguments),
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
    trainer.ours, trainer.evaluated = [], []
    return trainer


@pytest.fixture
def make_trainer(tmp_path: Path) -> Make:
    return partial(make_in, tmp_path)


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("managed", [True, False])
def test_our_accuracy_is_that_of_trl_at_every_step(make_trainer: Make, managed: bool) -> None:
    callback = DPOAccuracyCallback(window=100)
    evaluated = DPOAccuracyCallback(window=100, monitor=f"eval_{ACCURACY}")
    both = [CallbackManager([callback, evaluated])] if managed else [callback, evaluated]
    trainer = make_trainer(*both, eval_strategy="steps", eval_steps=4)
    trainer.train()
    theirs = logged(trainer, ACCURACY)
    assert len(theirs) == 8
    ours = [sum(trainer.ours[index : index + 2]) / 2 for index in range(0, 16, 2)]
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert callback._values.values == pytest.approx(theirs, abs=1e-6)
    # It learns: the test would not tell much of a number that is always the same.
    assert theirs[0] == 0.0
    assert len(set(theirs)) > 2
    assert theirs[-1] > 0.7
    of_evaluations = logged(trainer, f"eval_{ACCURACY}")
    assert [sum(trainer.evaluated[index : index + 2]) / 2 for index in (0, 2)] == pytest.approx(
        of_evaluations, abs=1e-6
    )
    assert evaluated._values.values == pytest.approx(of_evaluations, abs=1e-6)


def test_a_mean_over_several_steps_is_one_reading(make_trainer: Make) -> None:
    callback = DPOAccuracyCallback(window=100)
    trainer = make_trainer(callback, logging_steps=4)
    trainer.train()
    ours = [sum(trainer.ours[index : index + 8]) / 8 for index in (0, 8)]
    assert callback._values.values == pytest.approx(ours, abs=1e-6)


@pytest.mark.parametrize("managed", [True, False])
def test_a_run_that_stays_below_52_percent_is_ended(
    make_trainer: Make, managed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It learns nothing; one that learns is not ended."""

    def callbacks() -> list[Any]:
        made = DPOAccuracyCallback(0.52, window=3, warmup=2, stop=True)
        return [CallbackManager([made])] if managed else [made]

    bad = make_trainer(*callbacks(), learning_rate=0.0)
    bad.train()
    assert bad.state.global_step == 3
    assert "below 0.52, at step 3: training ends" in caplog.text
    good = make_trainer(*callbacks(), learning_rate=1e-2)
    good.train()
    assert good.state.global_step == 8


@pytest.mark.parametrize(("source", "monitor"), [("log", ACCURACY), ("evaluation", f"eval_{ACCURACY}")])
def test_early_stopping_goes_by_the_same_number(make_trainer: Make, source: Any, monitor: str) -> None:
    def stopping() -> EarlyStoppingCallback:
        return EarlyStoppingCallback(monitor, 3, mode="max", baseline=0.52, source=source)

    options = {"eval_strategy": "steps", "eval_steps": 1} if source == "evaluation" else {}
    bad = make_trainer(stopping(), learning_rate=0.0, **options)
    bad.train()
    assert bad.state.global_step == 3


def test_a_resumed_training_goes_on_with_its_window(make_trainer: Make, tmp_path: Path) -> None:
    first = DPOAccuracyCallback(window=100)
    trainer = make_trainer(first, save_strategy="steps", save_steps=4, max_steps=4)
    trainer.train()
    second = DPOAccuracyCallback(window=100)
    resumed = make_trainer(second, save_strategy="steps", save_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    whole = logged(resumed, ACCURACY)
    assert len(whole) == 8
    assert second._values.values == pytest.approx(whole, abs=1e-6)
    assert math.isclose(second.accuracy or 0.0, sum(whole) / 8, rel_tol=1e-9)


def test_the_page_of_events(make_trainer: Make) -> None:
    """docs/events.md: which events come, in which order, with what."""
    recorder = EventRecorder()
    make_trainer(
        CallbackManager([recorder]),
        rows=8,
        max_steps=-1,
        num_train_epochs=2,
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        per_device_eval_batch_size=8,
    ).train()
    agree("TRL", recorder.told(), Path(__file__).parents[2] / "docs" / "events.md")


RANKS = """
import logging
from pathlib import Path
join()
os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
sys.path.insert(0, "hosts")
from test_trl_dpo import ACCURACY, DPOAccuracyCallback, logged, make_in

def run(callback, **options):
    trainer = make_in(Path(sys.argv[1]), callback, **options)
    trainer.train()
    return {
        "theirs": logged(trainer, ACCURACY), "read": callback._values.values, "mine": trainer.ours, "step": trainer.state.global_step,
    }

found = {
    "learns": run(DPOAccuracyCallback(window=100)),
    "does not": run(DPOAccuracyCallback(0.52, window=3, warmup=2, stop=True), learning_rate=0.0),
}
"""


def test_two_ranks(offline: None, in_two_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """What each rank reads is the mean over both, as TRL logs it; both end together."""
    first, second = in_two_ranks(RANKS, tmp_path, deadline_s=500.0)
    for rank in (first, second):
        learns = rank["learns"]
        assert (learns["step"], len(learns["theirs"])) == (8, 8)
        assert learns["read"] == pytest.approx(learns["theirs"], abs=1e-6)
        pairs = zip(first["learns"]["mine"], second["learns"]["mine"], strict=True)
        means = [sum(each) / 2 for each in pairs]
        assert learns["theirs"] == pytest.approx([sum(means[at : at + 2]) / 2 for at in range(0, 16, 2)], abs=1e-6)
        assert rank["does not"]["step"] == 3
    # The test would not tell much of ranks that see the same.
    assert first["learns"]["mine"] != second["learns"]["mine"]
