"""Creating a run, and what lies in the way: residue of a killed creation, lost identities, other runs, a run that vanished."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.core.errors import ConflictError
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.stores import Store
from ckptmgr.transfer.drain import drain

Cli = Callable[..., Any]


def test_what_a_killed_creation_leaves_is_nothing(store: Store, cli_here: Cli) -> None:
    """A kill between the probe and its removal must not refuse the restart of the job for ever."""
    store.put("run/attempts/.probe-7fc01583", b"first")
    done = cli_here("resume", f"{store.url}/run", "--or-start", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] is None


def test_a_probe_beside_foreign_data_does_not_hide_it(store: Store, cli_here: Cli) -> None:
    """Only the residue counts as nothing."""
    store.put("run/attempts/.probe-7fc01583", b"first")
    store.put("run/weights.bin", b"somebody's")
    assert cli_here("resume", f"{store.url}/run", "--or-start").returncode == 3


def test_a_lost_run_json_is_made_again_from_the_manifests(
    store: Store, push_steps: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A new identity would turn every checkpoint of the run into somebody else's."""
    push_steps(f"{store.url}/run", 100, 200)
    uuid = RunDirectory.open(f"{store.url}/run").uuid
    store.delete("run/run.json")
    with caplog.at_level(logging.WARNING):
        run = RunDirectory.open_or_create(f"{store.url}/run")
    assert run.uuid == uuid
    assert "has lost its run.json" in caplog.text
    assert [manifest.step for manifest in run.history().readable_chain()] == [200, 100]


def test_manifests_of_two_runs_are_nobodys_to_adopt(store: Store, push_steps: Callable[..., Any]) -> None:
    """Which of them it was cannot be told, so nothing is made."""
    push_steps(f"{store.url}/a", 100)
    push_steps(f"{store.url}/b", 200)
    for name in ("a", "b"):
        (key,) = store.keys(f"{name}/manifests/")
        store.put(key.replace(f"{name}/", "mixed/", 1), store.get(key))
    before = store.snapshot()
    with pytest.raises(ConflictError, match="manifests of another run"):
        RunDirectory.open_or_create(f"{store.url}/mixed")
    assert store.snapshot() == before


def test_a_store_of_runs_is_not_made_a_run(
    store: Store, push_steps: Callable[..., Any], cli_here: Cli, make_checkpoint: Callable[..., Path]
) -> None:
    """A forgotten run name would hide every run of the store from `ls`."""
    push_steps(f"{store.url}/a", 100)
    before = store.snapshot()
    done = cli_here("push", make_checkpoint(300), store.url)
    assert done.returncode == 7, done.stderr
    assert (
        f"{store.url} is a store of runs (a), not a run - name a run in it, such as {store.url}/NEW; nothing"
        in done.stderr
    )
    done = cli_here("artifact", "push", make_checkpoint(300), store.url)
    assert done.returncode == 7, done.stderr
    assert "is a store of runs (a), not an artifact - name an artifact in it" in done.stderr
    assert store.snapshot() == before


@pytest.mark.parametrize(
    "words",
    [
        ("prune", "--keep-last", "1"),
        ("verify",),
        ("resume",),
        ("resume", "--or-start"),
        ("show",),
        ("pull", "--to", "x"),
        ("status",),
    ],
    ids=" ".join,
)
def test_who_wants_a_run_of_a_store_hears_its_names(
    make_store: Callable[[str], Store], push_steps: Callable[..., Any], cli_here: Cli, words: tuple[str, ...]
) -> None:
    """The URL of the store is the URL of a run with the name forgotten."""
    store = make_store("local")
    for name in "abcd":
        push_steps(f"{store.url}/{name}", 100)
    done = cli_here(words[0], store.url, *words[1:])
    assert (done.returncode, done.stdout) == (3, "")
    said = f"ckptmgr: error: {store.url} is a store of runs (a, b, c, …), not a run - name one of them, such as {store.url}/a; `ckptmgr ls` lists them"
    assert done.stderr.splitlines() == [said]


@pytest.mark.parametrize("below", ["sub", "checkpoints", "deep/er"])
def test_no_run_within_a_run(
    store: Store, push_steps: Callable[..., Any], cli_here: Cli, make_checkpoint: Callable[..., Path], below: str
) -> None:
    """It would be foreign data of the other one, or a save of it that nothing wrote."""
    push_steps(f"{store.url}/run", 100)
    before = store.snapshot()
    done = cli_here("push", make_checkpoint(300), f"{store.url}/run/{below}")
    assert done.returncode == 7, done.stderr
    assert "lies within the run" in done.stderr
    assert store.snapshot() == before


def test_another_programs_run_json_above_is_no_run(tmp_path: Path) -> None:
    """Many a tool has such a file."""
    (tmp_path / "run.json").write_text('{"name": "mine"}')
    assert RunDirectory.open_or_create(str(tmp_path / "exp" / "run")).uuid


def test_a_bucket_that_others_use_is_not_made_a_run(make_store: Callable[[str], Any]) -> None:
    """A URL that ends before the run's name, above stores two levels below; a bucket with nothing in it may be a run."""
    store = make_store("moto")
    root = f"s3://{store.bucket}"
    store.put("team/run/other.bin", b"x")
    before = store.snapshot()
    with pytest.raises(ConflictError, match=r"holds other things \(exp, …\)"):
        RunDirectory.open_or_create(root)
    assert store.snapshot() == before
    store.delete("team/run/other.bin")
    assert RunDirectory.open_or_create(root).uuid


def test_nothing_is_committed_to_a_run_that_is_gone(tmp_path: Path) -> None:
    """An unmounted disk looks like an empty directory: a commit there could never be found again, and must stay pending."""
    from ckptmgr.backends.atomic import digest_file
    from ckptmgr.core.layout import Stem
    from ckptmgr.core.manifest import FileEntry, Manifest

    run = RunDirectory.open_or_create(str(tmp_path / "store" / "run"))
    tier = LocalTier.open_or_create(tmp_path / "tier", uuid=run.uuid)
    prepared = tier.prepare(Stem(1, 10, 1, "00000001"))
    (prepared / "model.pt").write_bytes(b"weights")
    entry = FileEntry.of("model.pt", digest_file(prepared / "model.pt"))
    tier.commit(Manifest(stem=Stem(1, 10, 1, "00000001"), run_uuid=run.uuid, files=(entry,)), prepared, target=run.url)
    (tmp_path / "store").rename(tmp_path / "unmounted")

    done = drain(tier, run)
    assert [stem.step for stem in done.pending] == [10]
    assert "is gone" in str(done.errors[done.pending[0]])
    assert not (tmp_path / "store").exists()

    (tmp_path / "unmounted").rename(tmp_path / "store")
    assert [stem.step for stem in drain(tier, run).committed] == [10]


def test_a_lost_run_json_is_said(store: Store, push_steps: Callable[..., Any], cli_here: Cli) -> None:
    """Whoever only looks is told that checkpoints are there, and how they come back; nothing starts from scratch."""
    push_steps(f"{store.url}/run", 100, 200)
    store.delete("run/run.json")
    for words in (["verify"], ["show"], ["resume"], ["resume", "--or-start"]):
        result = cli_here(words[0], f"{store.url}/run", *words[1:])
        assert result.returncode == 3
        assert "has lost its run.json, while 2 checkpoints are there" in result.stderr
