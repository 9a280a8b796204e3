"""Makes, offline, a tiny Qwen2 with dropout, its tokenizer with a chat template, and a data set of conversations, as files. No test by itself.

python tiny_model.py DIR        DIR/model, DIR/rows.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROWS = 48
# The names that the templates of Qwen look for.
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make(directory: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM  # type: ignore[import-not-found, unused-ignore]

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        attention_dropout=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    rows = (
        [
            {"role": "user", "content": f"What is {number} times {number % 7}?"},
            {"role": "assistant", "content": f"It is {number * (number % 7)}."},
        ]
        for number in range(ROWS)
    )
    (directory / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def make_tokenizer() -> Any:
    """One token per byte."""
    from tokenizers import (  # type: ignore[import-not-found, unused-ignore]
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found, unused-ignore]

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        [],
        trainers.BpeTrainer(
            vocab_size=len(alphabet) + len(SPECIAL),
            special_tokens=list(SPECIAL),
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=SPECIAL[2], pad_token=SPECIAL[0], chat_template=TEMPLATE, model_max_length=256
    )


if __name__ == "__main__":
    make(Path(sys.argv[1]))
