"""Toy copies of the directories that real trainers write: their names, nesting, dot files, links and marker files, with bytes of chance.

    directory = write_tree("T5", tmp_path / "out", step=500)      # DeepSpeed: latest, global_step500/…, rng_state_0.pth …

Files that torch would read are opaque here, unless `loadable` asks for real ones: good for whatever moves, lists, counts or checks files. DCP files
(`.distcp`, `.metadata`) are opaque always: make real ones with `torch.distributed.checkpoint.save` where they are to be loaded.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FLOATS = 16
# Of the zip archives that torch.save writes; what looks at the first bytes takes an opaque file for one.
_ZIP = b"PK\x03\x04"
_SIGNED_BYTES = 64
LAYERS = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """One kind of tree.

    Attributes:
        name: `T1` … `T14`.
        what: which trainer writes it.
        checkpoint: the path, below the trainer's output directory, of what is one checkpoint; `{step}` stands for the step.
        write: writes one step below an output directory.
    """

    name: str
    what: str
    checkpoint: str
    write: Callable[[_Writer, int], None]


def write_tree(name: str, root: Path, *, step: int = 100, seed: int = 0, loadable: bool = False) -> Path:
    """Write one step of the tree `name` below the output directory `root`, which may hold earlier steps; returns the checkpoint's own directory.

    The same arguments make the same bytes, another step or seed makes others.

    Args:
        loadable: write what torch reads with torch, which must be installed.
    """
    tree = TREES[name]
    root.mkdir(parents=True, exist_ok=True)
    tree.write(_Writer(root, random.Random(f"{seed} {name} {step}"), loadable=loadable), step)
    return root / tree.checkpoint.format(step=step)


class _Writer:
    """Writes files below `root`, by paths with slashes."""

    def __init__(self, root: Path, chance: random.Random, *, loadable: bool) -> None:
        self._root = root
        self._chance = chance
        self._loadable = loadable

    def raw(self, path: str, data: bytes | str | int) -> None:
        """Bytes or text; a number stands for that many bytes of chance."""
        if isinstance(data, int):
            data = self._chance.randbytes(data)
        self._made(path).write_bytes(data if isinstance(data, bytes) else data.encode())

    def json(self, path: str, document: object) -> None:
        self.raw(path, json.dumps(document, indent=2, sort_keys=True) + "\n")

    def torch(self, path: str, size: int, document: Mapping[str, Any] | None = None) -> None:
        """What `torch.save` writes: `document`, or a tensor of about `size` bytes."""
        if not self._loadable:
            self.raw(path, _ZIP + self._chance.randbytes(max(size - len(_ZIP), _SIGNED_BYTES)))
            return
        import torch

        numbers = torch.Generator().manual_seed(self._chance.randrange(2**31))
        torch.save(document or {"t": torch.rand(max(1, size // 4), generator=numbers)}, self._made(path))

    def safetensors(self, path: str, names: Sequence[str]) -> None:
        """Float32 tensors of 4 by 4 in the documented layout: length of the header, header, data."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        data = b""
        for name in names:
            tensor = b"".join(struct.pack("<f", self._chance.random()) for _ in range(_FLOATS))
            header[name] = {"dtype": "F32", "shape": [4, 4], "data_offsets": [len(data), len(data) + len(tensor)]}
            data += tensor
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.raw(path, struct.pack("<Q", len(text)) + text + data)

    def link(self, path: str, target: str) -> None:
        """A link to `target` beside it; an older one is replaced."""
        made = self._made(path)
        made.unlink(missing_ok=True)
        made.symlink_to(target)

    def dcp(self, folder: str, ranks: int, *, per_rank: int = 1) -> None:
        """What `torch.distributed.checkpoint` writes; shards of different ranks differ in size."""
        self.raw(f"{folder}/.metadata", 900)
        for rank in range(ranks):
            for number in range(per_rank):
                self.raw(f"{folder}/__{rank}_{number}.distcp", 600 + 40 * rank)

    def _made(self, path: str) -> Path:
        made = self._root / path
        made.parent.mkdir(parents=True, exist_ok=True)
        return made


# --- what several of them have --------------------------------------------------------------------------------------------


def _trainer_state(writer: _Writer, path: str, step: int, *, new: bool = True, best: str | None = None) -> None:
    """trainer_state.json of Transformers; `new` with what newer versions add."""
    logged = [
        {"epoch": at / 390, "learning_rate": 5e-05 * (1 - at / 1170), "loss": 2 - at / 1000, "step": at}
        for at in range(100, step + 1, 100)
    ]
    evaluated = {"epoch": step / 390, "eval_loss": 2.1 - step / 1000, "eval_runtime": 8.3, "step": step}
    state: dict[str, Any] = {
        "best_metric": None if best is None else 0.76,
        "best_model_checkpoint": best,
        "epoch": step / 390,
        "global_step": step,
        "is_hyper_param_search": False,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": [*logged, evaluated],
        "max_steps": 1170,
        "num_train_epochs": 3,
        "total_flos": 3.7e14,
        "trial_name": None,
        "trial_params": None,
    }
    if new:
        stopping = {"early_stopping_patience": 3, "early_stopping_threshold": 0.0}
        control = dict.fromkeys(("epoch_stop", "evaluate", "log", "save", "training_stop"), False)
        state |= {
            "eval_steps": 100,
            "logging_steps": 100,
            "save_steps": 100,
            "train_batch_size": 8,
            "stateful_callbacks": {
                "EarlyStoppingCallback": {"args": stopping, "attributes": {"early_stopping_patience_counter": 1}},
                "TrainerControl": {"args": {f"should_{name}": value for name, value in control.items()}},
            },
        }
    writer.json(path, state)


def _transformers(
    writer: _Writer, folder: str, step: int, *, ranks: int = 1, new: bool = True, best: str | None = None
) -> None:
    """What every checkpoint of Transformers' Trainer has beside its weights and optimizer."""
    for rank in range(ranks):
        writer.torch(f"{folder}/rng_state.pth" if ranks == 1 else f"{folder}/rng_state_{rank}.pth", 1400)
    writer.torch(f"{folder}/scheduler.pt", 1064)
    writer.torch(f"{folder}/training_args.bin", 670)
    _trainer_state(writer, f"{folder}/trainer_state.json", step, new=new, best=best)


def _tokenizer(writer: _Writer, folder: str) -> None:
    writer.json(f"{folder}/tokenizer_config.json", {"model_max_length": 512})
    writer.json(f"{folder}/special_tokens_map.json", {"eos_token": "</s>"})
    writer.json(f"{folder}/tokenizer.json", {"version": "1.0"})


def _adapter(writer: _Writer, folder: str, step: int) -> None:
    """A checkpoint of PEFT: no base weights, and the path that they were at on the machine that trained."""
    writer.raw(f"{folder}/README.md", "---\nlibrary_name: peft\n---\n")
    _tokenizer(writer, folder)
    config = {"base_model_name_or_path": "/models/base-7b", "bias": "none", "lora_alpha": 32, "modules_to_save": None}
    writer.json(
        f"{folder}/adapter_config.json",
        {**config, "peft_type": "LORA", "r": 16, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"},
    )
    names = [f"base_model.model.l.{part}.lora_{side}.weight" for part in "qv" for side in "AB"]
    writer.safetensors(f"{folder}/adapter_model.safetensors", names)
    writer.torch(f"{folder}/optimizer.pt", 1600)
    _transformers(writer, folder, step)


# --- one function per tree ------------------------------------------------------------------------------------------------


def _t1(writer: _Writer, step: int) -> None:
    folder = f"checkpoint-{step}"
    writer.json(f"{folder}/config.json", {"model_type": "toy"})
    writer.safetensors(f"{folder}/model.safetensors", LAYERS)
    writer.torch(f"{folder}/optimizer.pt", 1600)
    _transformers(writer, folder, step, best=f"/old/box/out/{folder}")


def _t2(writer: _Writer, step: int) -> None:
    folder = f"checkpoint-{step}"
    for name, size in (("pytorch_model.bin", 800), ("optimizer.pt", 1600), ("scaler.pt", 500)):
        writer.torch(f"{folder}/{name}", size)
    _transformers(writer, folder, step, new=False)
    writer.raw(".DS_Store", bytes(64))
    writer.raw("runs/Jan01_00-00-00_host/events.out.tfevents.1700000000.host.1.0", 200)


def _t3(writer: _Writer, step: int, shards: int = 3) -> None:
    folder = f"checkpoint-{step}"
    writer.json(f"{folder}/config.json", {"model_type": "toy"})
    writer.json(f"{folder}/generation_config.json", {"do_sample": False})
    _tokenizer(writer, folder)
    where: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        names = [f"model.layers.{shard}.w{number}.weight" for number in range(2)]
        writer.safetensors(f"{folder}/{file}", names)
        where |= dict.fromkeys(names, file)
    total = {"total_size": 4 * _FLOATS * len(where)}
    writer.json(f"{folder}/model.safetensors.index.json", {"metadata": total, "weight_map": where})
    writer.torch(f"{folder}/optimizer.pt", 1600)
    _transformers(writer, folder, step, ranks=8)


def _t4(writer: _Writer, step: int) -> None:
    _adapter(writer, f"checkpoint-{step}", step)


def _t5(writer: _Writer, step: int, ranks: int = 8) -> None:
    folder = f"checkpoint-{step}"
    writer.raw(f"{folder}/latest", f"global_step{step}")
    writer.raw(f"{folder}/zero_to_fp32.py", "# toy\n")
    writer.json(f"{folder}/config.json", {"model_type": "toy"})
    writer.safetensors(f"{folder}/model.safetensors", LAYERS)
    writer.torch(f"{folder}/global_step{step}/mp_rank_00_model_states.pt", 800)
    for rank in range(ranks):
        writer.torch(f"{folder}/global_step{step}/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", 400)
    _transformers(writer, folder, step, ranks=ranks)


def _t6(writer: _Writer, step: int) -> None:
    folder = f"checkpoint-{step}"
    writer.dcp(f"{folder}/pytorch_model_fsdp_0", 4)
    writer.dcp(f"{folder}/optimizer_0", 4)
    _transformers(writer, folder, step, ranks=4)


def _t7(writer: _Writer, step: int) -> None:
    top = "lightning_logs/version_0"
    writer.raw(f"{top}/hparams.yaml", "lr: 0.001\n")
    writer.raw(f"{top}/metrics.csv", f"epoch,step,val_loss\n0,{step},0.5\n")
    epoch = step // 100 - 1
    name = f"epoch={epoch}-step={step}.ckpt"
    stopping = {"wait_count": 1, "stopped_epoch": 0, "best_score": 0.5, "patience": 3}
    writer.torch(
        f"{top}/checkpoints/{name}",
        800,
        {
            "epoch": epoch,
            "global_step": step,
            "pytorch-lightning_version": "2.5.0",
            "state_dict": {},
            "loops": {},
            "callbacks": {"EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}": stopping},
            "optimizer_states": [{}],
            "lr_schedulers": [{}],
        },
    )
    writer.link(f"{top}/checkpoints/last.ckpt", name)


def _t8(writer: _Writer, step: int) -> None:
    top = "Toy-7B/v0-20250101-120000"
    folder = f"{top}/checkpoint-{step}"
    _adapter(writer, folder, step)
    for each in (top, folder):
        writer.json(f"{each}/args.json", {"model": "Toy-7B", "output_dir": f"/mnt/x/{top}", "train_type": "lora"})
    writer.json(f"{folder}/additional_config.json", {"lora_dtype": None, "lorap_lr_ratio": None})
    writer.raw(f"{top}/logging.jsonl", f'{{"loss": 1.9, "global_step/max_steps": "{step}/1170"}}\n')
    writer.raw(f"{top}/val_dataset.jsonl", "{}\n")
    writer.raw(f"{top}/images/train_loss.png", b"\x89PNG")
    writer.raw(f"{top}/runs/events.out.tfevents.1700000000.host.1.0", 100)


def _t9(writer: _Writer, step: int) -> None:
    folder = f"iter_{step:07d}"
    writer.dcp(folder, 8, per_rank=2)
    writer.torch(f"{folder}/common.pt", 800)
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    writer.json(f"{folder}/metadata.json", {**backends, "sharded_backend_version": 1, "common_backend_version": 1})
    writer.raw("latest_checkpointed_iteration.txt", str(step))


def _t10(writer: _Writer, step: int) -> None:
    writer.dcp(f"checkpoint/step-{step}", 8)


def _t11(writer: _Writer, step: int) -> None:
    folder = f"checkpoints/checkpoint_{step // 100}"
    writer.safetensors(f"{folder}/model.safetensors", LAYERS)
    states = ("optimizer.bin", "scheduler.bin", "sampler.bin", "scaler.pt", "random_states_0.pkl")
    for name in (*states, "custom_checkpoint_0.pkl"):
        writer.torch(f"{folder}/{name}", 400)


def _t12(writer: _Writer, step: int) -> None:
    for ending in ("", "-last"):
        folder = f"checkpoints/toy--val_loss=1.23-step={step}-consumed_samples={step * 8}.0{ending}"
        writer.dcp(f"{folder}/weights", 2)
        writer.torch(f"{folder}/weights/common.pt", 400)
        writer.json(f"{folder}/context/io.json", {})


def _t13(writer: _Writer, step: int) -> None:
    writer.torch(f"ckpt_{step}.pt", 800)
    writer.link("best.pt", f"ckpt_{step}.pt")


def _t14(writer: _Writer, step: int) -> None:
    name = f"ep{step // 500 + 1}-ba{step}-rank0.pt"
    writer.torch(name, 800)
    writer.link("latest-rank0.pt", name)


TREES: Mapping[str, Tree] = {
    tree.name: tree
    for tree in (
        Tree(name="T1", what="Transformers", checkpoint="checkpoint-{step}", write=_t1),
        Tree(name="T2", what="Transformers, old, with clutter", checkpoint="checkpoint-{step}", write=_t2),
        Tree(name="T3", what="Transformers, sharded, 8 ranks", checkpoint="checkpoint-{step}", write=_t3),
        Tree(name="T4", what="PEFT", checkpoint="checkpoint-{step}", write=_t4),
        Tree(name="T5", what="DeepSpeed ZeRO", checkpoint="checkpoint-{step}", write=_t5),
        Tree(name="T6", what="FSDP", checkpoint="checkpoint-{step}", write=_t6),
        Tree(name="T7", what="Lightning", checkpoint="lightning_logs/version_0/checkpoints", write=_t7),
        Tree(name="T8", what="ms-swift", checkpoint="Toy-7B/v0-20250101-120000/checkpoint-{step}", write=_t8),
        Tree(name="T9", what="Megatron", checkpoint="iter_{step:07d}", write=_t9),
        Tree(name="T10", what="torchtitan", checkpoint="checkpoint/step-{step}", write=_t10),
        Tree(name="T11", what="Accelerate", checkpoint="checkpoints", write=_t11),
        Tree(name="T12", what="NeMo", checkpoint="checkpoints", write=_t12),
        Tree(name="T13", what="a plain loop", checkpoint=".", write=_t13),
        Tree(name="T14", what="Composer", checkpoint=".", write=_t14),
    )
}
