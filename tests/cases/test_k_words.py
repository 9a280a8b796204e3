"""Cases of what the user reads: "committed" means that the manifest is there."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr.backends.base import Backend
from ckptmgr.callbacks.base import Callback
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.policies import EveryNSteps
from ckptmgr.testing.faulty import ActiveStoreFault, FaultyBackend, StoreFault, denied
from ckptmgr.testing.stores import Store
from ckptmgr.trainer import Trainer, TrainingArguments
from ckptmgr.training.manager import CheckpointManager

Ask = Callable[..., Any]
DEADLINE_S = 60.0


class Reader(logging.Handler):
    """Reads the log as it is written: each line with the manifests that the store holds at that moment."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.lines: list[tuple[str, list[str]]] = []
        self.failed = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        self.lines.append((message, self._store.keys("run/manifests/")))
        if "failed" in message:
            self.failed.set()

    def words_about(self, stem: str) -> list[str]:
        """The words that the log has had for the state of one checkpoint."""
        about = re.compile(rf"step \d+ (queued|uploading|failed|committed)\b.*{stem}")
        return [match.group(1) for message, _ in self.lines if (match := about.match(message))]


@pytest.fixture
def reader(store: Store) -> Iterator[Reader]:
    handler, logger = Reader(store), logging.getLogger("ckptmgr")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


class LookDuringUpload(Callback):
    """At step 2, while the upload of step 1 is held: looks, lets it fail, and looks again."""

    def __init__(self, look: Callable[[], None], gate: Callable[[], ActiveStoreFault], failed: threading.Event) -> None:
        self._look = look
        self._gate = gate
        self._failed = failed

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            gate = self._gate()
            assert gate.reached.wait(DEADLINE_S)
            self._look()
            gate.release()
            assert self._failed.wait(DEADLINE_S)
            self._look()


def test_k043_committed_is_said_only_once_the_manifest_is_there(
    store: Store, ask: Ask, tmp_path: Path, reader: Reader
) -> None:
    """An upload that is blocked and then fails reads queued, uploading, failed; `ls` calls it uncommitted until it is repeated."""
    url = f"{store.url}/run"
    gates: list[ActiveStoreFault] = []

    def gated(inner: Backend) -> Backend:
        backend = FaultyBackend(inner)
        gates.append(backend.add(StoreFault(verb="put_file", skip=1, hold=True, error=denied)))
        return backend

    manager = CheckpointManager(url, local_dir=tmp_path / "disk", save=EveryNSteps(1), wrap_backend=gated)
    looks: list[tuple[list[dict[str, Any]], Any, list[str]]] = []

    def look() -> None:
        uploads = manager.status().uploads
        (stem,) = uploads.pending
        looks.append((ask("ls", url)["checkpoints"], uploads, reader.words_about(str(stem))))

    model = torch.nn.Linear(1, 1)
    trainer = Trainer(
        model,
        TrainingArguments(max_steps=2),
        train_dataloader=[torch.ones(1, 1)] * 2,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=lambda model, batch: model(batch).square().mean(),
        callbacks=[SaveModelCallback(manager), LookDuringUpload(look, lambda: gates[-1], reader.failed)],
    )
    assert trainer.train().global_step == 2

    (held, during, said_held), (failed, after, said_failed) = looks
    stem = str(during.uploading)
    # Blocked: named as uncommitted, being uploaded.
    assert [(row["id"], row["step"], row["state"]) for row in held] == [(stem, 1, "uncommitted")]
    assert [str(waiting) for waiting in during.pending] == [stem]
    assert said_held == ["queued", "uploading"]
    # Failed: still uncommitted, and it says why.
    assert [(row["id"], row["step"], row["state"]) for row in failed] == [(stem, 1, "uncommitted")]
    assert (after.uploading, after.failures, after.committed) == (None, 1, 0)
    assert "injected: put_file" in after.last_error
    assert said_failed == ["queued", "uploading", "failed"]

    # The end of training tries again, and now it is committed.
    assert reader.words_about(stem) == ["queued", "uploading", "failed", "uploading", "committed"]
    assert [(row["step"], row["state"]) for row in ask("ls", url)["checkpoints"]] == [
        (1, "committed"),
        (2, "committed"),
    ]
    claims = [
        (message, there)
        for message, there in reader.lines
        if re.search(r"\b(committed|uploaded|saved|stored|done)\b", message)
    ]
    assert len(claims) == 3
    # The last is the closing line, which counts them.
    *claims, (closing, there) = claims
    assert closing.endswith("closed: 2 saved, 2 committed in the store, 1 failed upload")
    assert len(there) == 2
    for message, there in claims:
        (named,) = re.findall(r"\d{6}-\d{12}-\d{6}-[0-9a-f]{8}", message)
        assert f"run/manifests/{named}.json" in there
