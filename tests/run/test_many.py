"""10,000 checkpoints: what is asked of their history takes time in proportion to their number."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone

import pytest

from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.history import History
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import ClosingRecord, FileEntry, Manifest, decode_manifest, encode_manifest
from ckptmgr.core.records import AttemptRecord
from ckptmgr.core.retention import KeepBest, KeepEveryNSteps, KeepLast, KeepWithin
from ckptmgr.core.selectors import parse_selector
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.loose import Names
from ckptmgr.run.overview import run_overview
from ckptmgr.run.prune import plan_prune

MANY = 10_000
# Each of these takes some tenths of a second of an idle core; anything quadratic takes minutes.
BOUND_S = 8.0


@contextmanager
def within_bound() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < BOUND_S


def history(attempts: int) -> History:
    """`MANY` checkpoints with metrics, over so many attempts, each resumed from the last one of the attempt before; as many closing records."""
    first = Manifest(
        stem=Stem(1, 0, 1, "00000000"),
        run_uuid="uuid",
        files=tuple(FileEntry.of(f"file-{number:02}.pt", digest_bytes(b"x")) for number in range(12)),
        created_at="2026-01-01T00:00:00.000Z",
        reasons=("every_n_steps:100",),
        metrics={f"metric_{number}": 0.5 for number in range(8)},
    )
    stems = [Stem(1 + at * attempts // MANY, at, at + 1, f"{at:08x}") for at in range(MANY)]
    last = {stem.attempt: stem for stem in stems}
    manifests = {
        stem: replace(first, stem=stem, metrics={**first.metrics, "eval_loss": 1 / (1 + stem.step)}) for stem in stems
    }
    closed = [replace(stem, nonce="ffffffff") for stem in stems]
    return History(
        run_uuid="uuid",
        manifests=manifests,
        closed={stem: ClosingRecord(stem=stem, closed="pruned") for stem in closed},
        attempts={n: AttemptRecord(number=n, how="auto", parent=last.get(n - 1)) for n in range(1, attempts + 1)},
        tags={f"tag-{step}": stems[step] for step in range(0, MANY, 10)},
    )


@pytest.fixture(params=[1, MANY], ids=["one attempt", "an attempt each"])
def looked(request: pytest.FixtureRequest) -> History:
    return history(request.param)


def test_choosing(looked: History) -> None:
    """What `resume`, `show` and each turn of the transfer process ask, again and again."""
    with within_bound():
        for _ in range(100):
            newest = looked.newest()
        assert newest is not None
        assert newest.step == MANY - 1
        assert len(looked.chain()) == len(looked.readable_chain()) == MANY
        assert looked.others() == []
        assert looked.highest_attempt == max(looked.attempts)
        for word, step in (
            ("latest", MANY - 1),
            ("5", 5),
            ("best:eval_loss", MANY - 1),
            ("worst:eval_loss", 0),
            ("tag:tag-70", 70),
        ):
            assert looked.choose(parse_selector(word)).step == step


def test_planning_a_prune(looked: History) -> None:
    """Every rule, and every protection."""
    rule = KeepLast(3) | KeepEveryNSteps(1000) | KeepBest("eval_loss", k=5) | KeepWithin(60)
    with within_bound():
        plan = plan_prune(looked, rule, now=datetime(2026, 2, 1, tzinfo=timezone.utc))
    # The tagged ones, and of the others the newest five.
    assert (len(plan.keep), len(plan.delete)) == (MANY // 10 + 5, MANY - MANY // 10 - 5)


def test_listing(looked: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ls`, as a document and as a table."""
    from ckptmgr.backends.registry import open_store
    from ckptmgr.cli import looking
    from ckptmgr.cli.output import emit_json

    fs, root = open_store("memory://many/run")
    run = RunDirectory(fs=fs, root=root, url="memory://many/run")
    fs.pipe_file(run.path("checkpoints/foreign/model.bin"), b"1")
    names = Names(data=[*map(str, looked.manifests), "foreign"], top=["run.json"])
    monkeypatch.setattr(RunDirectory, "history", lambda run, cached: looked)
    monkeypatch.setattr(RunDirectory, "names", lambda run: names)
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    with within_bound():
        overview = run_overview(run)
        looking._emit_run(overview)
        document = [looking._row_json(row) for row in overview.rows]
        emit_json({"checkpoints": document}, is_finite=True)
    assert len(overview.rows) == len(document) == MANY + 1
    assert out.getvalue().count('"eval_loss"') == MANY


def test_reading_and_writing_manifests() -> None:
    """Their bytes, own digest checked."""
    (one,) = list(history(1).manifests.values())[:1]
    data = encode_manifest(one)
    with within_bound():
        for _ in range(MANY):
            read = decode_manifest(data, where="x")
        for _ in range(MANY // 10):
            encode_manifest(one)
    assert read == one
