"""A small character transformer, and real text to train it on: the Python standard library's own source files."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn

CONTEXT = 64
_MODULES = (
    "argparse",
    "ast",
    "dataclasses",
    "difflib",
    "inspect",
    "pathlib",
    "subprocess",
    "textwrap",
    "typing",
    "zipfile",
)


def standard_library_text() -> str:
    """The source of some modules of this Python, in a fixed order. On a Python that ships no sources, of this module alone."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [path for name in _MODULES if (path := folder / f"{name}.py").is_file()] or [Path(__file__)]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


class Windows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Stretches of text: `(inputs, targets)`, each int64 `[CONTEXT]`, targets one character further.

    Args:
        text: the text.
        stride: characters from one window to the next.
    """

    def __init__(self, text: str, *, stride: int) -> None:
        # Bytes, not characters: 256 symbols whatever the text holds.
        self._data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
        self._stride = stride

    def __len__(self) -> int:
        return max(0, (len(self._data) - CONTEXT - 1) // self._stride)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self._stride
        window = self._data[start : start + CONTEXT + 1]
        return window[:-1], window[1:]


class CharTransformer(nn.Module):
    """A decoder of `layers` blocks over bytes; dropout on purpose, so that the random state matters. Returns the mean loss."""

    def __init__(self, *, width: int = 128, layers: int = 2, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight  # tied: a resume must give back one tensor, not two
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of `targets` `[batch, CONTEXT]` given `inputs` of the same shape."""
        hidden = self.embed(inputs) + self.position.weight[: inputs.shape[1]]
        hidden = self.blocks(hidden, mask=self.mask, is_causal=True)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
