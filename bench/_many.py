"""A run of many checkpoints, as files to be copied into a store: what a year of training leaves behind, without the weights."""

from __future__ import annotations

from pathlib import Path

from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.layout import Stem, attempt_key, data_key, manifest_key
from ckptmgr.core.manifest import FileEntry, Manifest, encode_manifest
from ckptmgr.core.records import AttemptRecord, encode_attempt

EVERY_STEPS = 500
FILES = (
    *(f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)),
    *("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"),
    *("config.json", "tokenizer.json", "tokenizer_config.json"),
)
CONTENT = b"{}"


def fill(directory: Path, *, run_uuid: str, count: int) -> None:
    """Write the records of `count` checkpoints of attempt 1 below `directory`, keys as paths: a dozen files each, of which one has its bytes there."""
    digests = digest_bytes(CONTENT)
    files = tuple(FileEntry.of(path, digests) for path in FILES)

    def put(key: str, data: bytes) -> None:
        path = directory / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    put(attempt_key(1), encode_attempt(AttemptRecord(number=1, how="auto", claim_id="bench")))
    for number in range(1, count + 1):
        stem = Stem(1, number * EVERY_STEPS, number, f"{number:08x}")
        manifest = Manifest(
            stem=stem,
            run_uuid=run_uuid,
            files=files,
            epoch=number / 10,
            created_at="2026-01-01T00:00:00.000Z",
            reasons=(f"every_n_steps:{EVERY_STEPS}",),
            metrics={"eval_loss": 1 + 1 / number, "eval_accuracy": 1 - 1 / (1 + number)},
            producer={"framework": "bench", "host": "bench"},
        )
        put(data_key(stem, "config.json"), CONTENT)
        put(manifest_key(stem), encode_manifest(manifest))
