"""An upload that is killed anywhere, and goes on: no object that the store confirmed is sent again, and there is one manifest."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ckptmgr.backends.registry import open_store
from ckptmgr.backends.wrap import WrappedBackend
from ckptmgr.core.layout import Stem, upload_key
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.push import journal_root
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.faulty import FaultyBackend, StoreFault, transient
from ckptmgr.testing.stores import Store
from ckptmgr.transfer.drain import drain

T = TypeVar("T")
Cli = Callable[..., subprocess.CompletedProcess[str]]
Kill = Callable[..., bool]
Ask = Callable[..., Any]

FILES = {"model.safetensors": b"m" * 5000, "optimizer.pt": b"o" * 7000, "state.json": b'{"step": 100}'}


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file after the other, so that it is known which ones a kill has left."""
    monkeypatch.setenv("CKPTMGR_CONCURRENCY", "1")


@pytest.fixture(params=["local", "s3", "moto", "oss"])
def any_store(request: pytest.FixtureRequest, make_store: Callable[[str], Store]) -> Store:
    """An empty store of each kind; moto's and OSS's keep a log of requests."""
    return make_store(request.param)


class Sent:
    """What reached the store: by the log of the server where it has one, else by that of a wrapper around the backend."""

    def __init__(self, store: Store, log: Path) -> None:
        self._store = store
        self._log = log

    def writes(self) -> Counter[str]:
        """How often each key below the run was written, by requests or calls that the store answered with success."""
        if hasattr(self._store.server, "log"):
            puts = [r for r in self._store.server.log if r.method in ("PUT", "POST") and r.status == 200]
            return Counter(r.key.split("/run/", 1)[1] for r in puts if "/run/" in r.key)
        calls = [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []
        paths = [c["path"] for c in calls if c["verb"] in ("put_file", "pipe_file", "cp_file")]
        return Counter(path.split("/run/", 1)[1] for path in paths)

    def forget(self) -> None:
        """Begin anew."""
        self._log.unlink(missing_ok=True)
        if hasattr(self._store.server, "log"):
            self._store.server.log.clear()


def test_an_upload_killed_at_every_operation_sends_each_object_once(
    any_store: Store,
    kill: Kill,
    new_tier: Callable[[RunDirectory], LocalTier],
    local_save: Callable[..., Stem],
    tmp_path: Path,
) -> None:
    """Killed before and after each object, and before and after the manifest, and restarted each time."""
    url = f"{any_store.url}/run"
    run = RunDirectory.open_or_create(url)
    tier = new_tier(run)
    stem = local_save(tier, run, 100, FILES)
    sent = Sent(any_store, tmp_path / "calls")
    sent.forget()

    def drain(**dies: Any) -> bool:
        return kill("drain", url=url, tier=str(tier.root), log=str(tmp_path / "calls"), kill=dies)

    for count in range(len(FILES)):
        assert drain(verb="put_file", nth=1, when="before")
        assert len(any_store.keys("run/checkpoints/")) == count
        # The store has confirmed one more; the journal does not know.
        assert drain(verb="put_file", nth=1, when="after")
        assert len(any_store.keys("run/checkpoints/")) == count + 1
    assert drain(verb="pipe_file", path="*/manifests/*", nth=1, when="before")
    assert any_store.keys("run/manifests/") == []
    assert tier.uploaded() == set()
    # The manifest is there; the journal does not know.
    assert drain(verb="pipe_file", path="*/manifests/*", nth=1, when="after")
    assert any_store.keys("run/manifests/") == [f"run/manifests/{stem}.json"]
    assert tier.uploaded() == set()
    wanted = {f"checkpoints/{stem}/{name}" for name in FILES} | {f"manifests/{stem}.json"}
    assert sent.writes() == Counter(wanted)

    sent.forget()
    assert not drain()
    assert sent.writes() == Counter()
    assert tier.uploaded() == {stem}
    assert any_store.keys("run/manifests/") == [f"run/manifests/{stem}.json"]
    assert any_store.snapshot("run/checkpoints/") == {
        f"run/checkpoints/{stem}/{name}": data for name, data in FILES.items()
    }
    assert not drain()
    assert sent.writes() == Counter()


def test_a_lost_journal_costs_a_look_and_not_an_upload(
    any_store: Store,
    kill: Kill,
    new_tier: Callable[[RunDirectory], LocalTier],
    local_save: Callable[..., Stem],
    tmp_path: Path,
) -> None:
    """The journal is gone after two objects, and again after the commit: what the store has is looked at, not sent over."""
    url = f"{any_store.url}/run"
    run = RunDirectory.open_or_create(url)
    tier = new_tier(run)
    stem = local_save(tier, run, 100, FILES)
    sent = Sent(any_store, tmp_path / "calls")
    sent.forget()
    common = {"url": url, "tier": str(tier.root), "log": str(tmp_path / "calls")}
    assert kill("drain", **common, kill={"verb": "put_file", "nth": 2, "when": "after"})
    (tier.root / upload_key(stem)).unlink()
    assert not kill("drain", **common)
    wanted = {f"checkpoints/{stem}/{name}" for name in FILES} | {f"manifests/{stem}.json"}
    assert sent.writes() == Counter(wanted)

    (tier.root / upload_key(stem)).unlink()
    assert not kill("drain", **common)
    assert sent.writes() == Counter(wanted)
    assert tier.uploaded() == {stem}


def test_a_killed_push_goes_on_where_it_was(any_store: Store, kill: Kill, cli: Cli, tmp_path: Path) -> None:
    """Killed after two objects, killed between manifest and record, repeated: each object went once, the id is the first one's."""
    url = f"{any_store.url}/run"
    RunDirectory.open_or_create(url)
    source = tmp_path / "checkpoint-100"
    source.mkdir()
    for name, data in FILES.items():
        (source / name).write_bytes(data)
    sent = Sent(any_store, tmp_path / "calls")
    sent.forget()
    common = {"url": url, "directory": str(source), "log": str(tmp_path / "calls")}
    assert kill("push", **common, kill={"verb": "put_file", "nth": 2, "when": "after"})
    assert kill("push", **common, kill={"verb": "pipe_file", "path": "*/manifests/*", "nth": 1, "when": "after"})
    (manifest,) = any_store.keys("run/manifests/")
    stem = manifest.removeprefix("run/manifests/").removesuffix(".json")

    pushed = cli("push", source, url)
    assert pushed.returncode == 0, pushed.stderr
    assert pushed.stdout.strip() == stem
    writes = sent.writes()
    del writes[next(key for key in writes if key.startswith("attempts/"))]
    assert writes == Counter({f"checkpoints/{stem}/{name}" for name in FILES} | {f"manifests/{stem}.json"})
    assert any_store.snapshot("run/checkpoints/") == {
        f"run/checkpoints/{stem}/{name}": data for name, data in FILES.items()
    }
    assert list(journal_root(run_url(url)).rglob("*.json")) == []


def run_url(url: str) -> str:
    return RunDirectory.open(url).url


def test_an_unconfirmed_object_that_is_not_right_is_sent_again(
    any_store: Store,
    kill: Kill,
    new_tier: Callable[[RunDirectory], LocalTier],
    local_save: Callable[..., Stem],
    tmp_path: Path,
    ask: Ask,
) -> None:
    """An unconfirmed object that is not what it should be, as after a torn write, is replaced; the commit is whole."""
    url = f"{any_store.url}/run"
    run = RunDirectory.open_or_create(url)
    tier = new_tier(run)
    stem = local_save(tier, run, 100, FILES)
    assert kill("drain", url=url, tier=str(tier.root), kill={"verb": "put_file", "nth": 1, "when": "after"})
    any_store.put(f"run/checkpoints/{stem}/model.safetensors", b"x" * 5000)
    assert not kill("drain", url=url, tier=str(tier.root))
    assert any_store.get(f"run/checkpoints/{stem}/model.safetensors") == FILES["model.safetensors"]
    assert ask("verify", url) == {"checked": 1, "damaged": []}


class WithoutChecksums(WrappedBackend):
    """A store that keeps no checksum that could be asked for."""

    def _around(self, verb: str, path: str, call: Callable[[], T]) -> T:
        return call()

    def stored_crc(self, path: str) -> None:
        return None


def test_where_the_store_keeps_no_checksum_the_journal_is_enough(
    make_store: Callable[[str], Store], new_tier: Callable[[RunDirectory], LocalTier], local_save: Callable[..., Stem]
) -> None:
    """It cannot vouch for an object, but the journal says that it was confirmed: that one is not sent again."""
    fs, root = open_store(f"{make_store('oss').url}/run")
    faulty = FaultyBackend(WithoutChecksums(fs))
    run = RunDirectory.open_or_create(f"oss://{root}", fs=faulty, root=root)
    tier = new_tier(run)
    stem = local_save(tier, run, 100, FILES)
    faulty.add(StoreFault(verb="put_file", skip=2, error=transient))
    assert drain(tier, run).pending == (stem,)
    assert drain(tier, run).committed == (stem,)
    sent = [call.path.rsplit("/", 1)[1] for call in faulty.calls("put_file")]
    assert sent == ["model.safetensors", "optimizer.pt", "state.json", "state.json"]
