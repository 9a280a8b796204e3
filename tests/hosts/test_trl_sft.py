"""TRL's SFTTrainer, interrupted and resumed with the saving callback: everything is as in the uninterrupted run, to the last bit."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
# Not ours: what transformers and its libraries have to say about each other.
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("offline", "one_thread"),
]

# To pytest, the folders of tests are packages.
hf: Any = importlib.import_module("tests.hosts.hf_trainings")

WORDS = ("<pad>", "<end>", *(f"w{number}" for number in range(30)))


def rows(count: int) -> Any:
    """Prompts and completions of several lengths, of which SFTTrainer makes batches by itself."""
    from datasets import Dataset  # type: ignore[import-not-found, unused-ignore]

    def words(row: int, step: int, length: int) -> str:
        return " ".join(f"w{(row * step + place) % 30}" for place in range(length))

    return Dataset.from_list(
        [{"prompt": words(row, 7, 4), "completion": " " + words(row, 3, 2 + row % 3)} for row in range(count)]
    )


def sft(settings: dict[str, Any], **how: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-not-found, unused-ignore]
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found, unused-ignore]
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found, unused-ignore]

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    how |= {"train_dataset": rows(hf.ROWS), "eval_dataset": rows(4), "processing_class": tokenizer}
    return SFTTrainer(args=SFTConfig(**settings, max_length=32, bf16=False, gradient_checkpointing=False), **how)


def test_interrupted_twice_in_one_epoch_and_in_an_evaluation(tmp_path: Path) -> None:
    """Losses, gradients' norms, learning rates, weights, optimizer state, batches and random states."""
    trainings = hf.Trainings(tmp_path, trainer=sft)
    whole = trainings.run(save_every=None, out="whole")
    trainings.run(hf.crash("on_step_begin", 5), save_every=5)
    trainings.run(hf.crash("on_prediction_step", 6), save_every=100, resume=True)
    trainings.run(hf.crash("on_step_begin", 7), save_every=7, resume=True)
    last = trainings.run(save_every=hf.STEPS, resume=True)
    hf.assert_exact(whole, last, 8)
    assert trainings.callback.proof == "equal"
    assert trainings.callback.restored.missing == ()
