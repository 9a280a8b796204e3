"""Artifacts: versions that are never overwritten, the guarded latest, what is sent and what is not, damage, retention, links."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import Origin, artifacts, pull_artifact, push_artifact, show_artifact
from ckptmgr.backends.retry import RetryPolicy
from ckptmgr.core.errors import (
    AccessDeniedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    ConflictError,
    IntegrityError,
)
from ckptmgr.core.records import RunRecord, encode_run
from ckptmgr.core.retention import KeepBest, KeepLast
from ckptmgr.run import artifact_push
from ckptmgr.run.artifacts import tag_artifact, untag_artifact
from ckptmgr.run.contents import describe
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.journal import Journal
from ckptmgr.run.prune import prune
from ckptmgr.run.push import journal_root
from ckptmgr.run.replicate import replicate
from ckptmgr.run.verify import Depth, verify_run
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.stores import Store
from ckptmgr.training.places import open_places

MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]
Tree = Callable[[Mapping[str, bytes]], Path]
DEADLINE_S = 60.0
BIG = b"unchanged " * 200_000


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Writes a directory that holds exactly these files, always the same one."""

    def write(files: Mapping[str, bytes]) -> Path:
        directory = tmp_path / "final"
        for path in sorted(directory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        for name, data in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)
        return directory

    return write


def held(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def sent(store: Store) -> dict[str, int]:
    """Bytes that arrived for each data file, by its name, since the log was cleared."""
    puts = [entry for entry in store.server.log if entry.method == "PUT" and "/checkpoints/" in entry.key]
    return {entry.key.rsplit("/", 1)[-1]: entry.size_bytes for entry in puts if entry.status == 200}


def refuse(key: str) -> Fault:
    return Fault(method="PUT", key=key, status=403, code="AccessDenied", times=None)


# --- versions -------------------------------------------------------------------------------------------------------------------


def test_two_versions(store: Store, tree: Tree, tmp_path: Path) -> None:
    """Plain copies under one name, each whole by itself, and each fetched as it was pushed."""
    url = f"{store.url}/final-model"
    one = {"model.bin": b"one", "tokenizer/vocab.json": b"{}", "empty": b""}
    two = {"model.bin": b"two!", "tokenizer/vocab.json": b"{}"}
    first, second = push_artifact(tree(one), url), push_artifact(tree(two), url, tags=["production"])
    assert [(a.version, a.is_latest, a.existed) for a in (first, second)] == [(1, True, False), (2, True, False)]
    assert second.reference == f"{url}@v2"
    for pushed, files in ((first, one), (second, two)):
        prefix = f"final-model/checkpoints/{pushed.manifest.id}/"
        assert store.snapshot(prefix) == {prefix + name: data for name, data in files.items()}
    assert json.loads(store.get("final-model/run.json"))["kind"] == "artifact"
    assert [(a.version, a.tags, a.is_latest) for a in artifacts(url)] == [(1, (), False), (2, ("production",), True)]
    for which, files in (("", two), ("@v1", one), ("@1", one), ("@latest", two), ("@production", two)):
        pulled = pull_artifact(url + which, tmp_path / f"got{which}")
        assert held(pulled.path) == files


def test_a_single_file(make_store: MakeStore, tmp_path: Path) -> None:
    """A report is an artifact of one file, which is fetched into a directory like any other."""
    store = make_store("local")
    (tmp_path / "report.html").write_bytes(b"<p>")
    (tmp_path / "beside").write_bytes(b"not pushed")
    push_artifact(tmp_path / "report.html", f"{store.url}/report")
    assert held(pull_artifact(f"{store.url}/report", tmp_path / "got").path) == {"report.html": b"<p>"}


def test_the_same_bytes_are_the_latest_version(make_store: MakeStore, tree: Tree) -> None:
    """Nothing is written but the tag that was asked for; the bytes of an older version are a further one."""
    store = make_store("oss")
    url = f"{store.url}/model"
    first = push_artifact(tree({"a": b"1"}), url)
    before = store.snapshot()
    again = push_artifact(tree({"a": b"1"}), url, tags=["rc"])
    assert (again.version, again.existed, again.tags) == (1, True, ("rc",))
    assert store.snapshot().keys() - before.keys() == {"model/tags/rc.json"}
    push_artifact(tree({"a": b"2"}), url)
    back = push_artifact(tree({"a": b"1"}), url)
    assert (back.version, back.existed) == (3, False)
    assert first.manifest.same_content(back.manifest)


def test_what_is_recorded_of_a_version_stays(
    make_store: MakeStore, tree: Tree, caplog: pytest.LogCaptureFixture
) -> None:
    """Other words about the same bytes are not kept, and that is told; the same words, or none, are nothing to tell."""
    url = f"{make_store('local').url}/model"
    words: dict[str, Any] = {"metrics": {"acc": float("nan")}, "metadata": {"dataset": "v2"}}
    push_artifact(tree({"a": b"1"}), url, **words)
    for repeated in (words, {}):
        assert push_artifact(tree({"a": b"1"}), url, **repeated).existed
    assert caplog.text == ""
    again = push_artifact(tree({"a": b"1"}), url, metrics={"acc": 0.5}, metadata={"dataset": "v2"})
    assert again.metadata == {"dataset": "v2"}
    assert "what is recorded of it stays: not the metrics given now" in caplog.text


def test_an_unchanged_file_is_copied_within_the_store(make_store: MakeStore, tree: Tree) -> None:
    """Of the second version only what changed is sent, and it is whole by itself; also under another name."""
    store = make_store("oss")
    url = f"{store.url}/model"
    push_artifact(tree({"model.bin": BIG, "config.json": b"{}"}), url)
    store.server.log.clear()
    second = push_artifact(tree({"weights.bin": BIG, "config.json": b'{"x": 1}'}), url)
    assert sent(store) == {"weights.bin": 0, "config.json": 8}
    prefix = f"model/checkpoints/{second.manifest.id}/"
    assert store.snapshot(prefix) == {f"{prefix}weights.bin": BIG, f"{prefix}config.json": b'{"x": 1}'}


def test_the_latest_is_the_highest_and_never_moves_back(make_store: MakeStore, tree: Tree) -> None:
    """A version of an explicit lower number does not become the latest; the next one follows the highest."""
    url = f"{make_store('local').url}/model"
    push_artifact(tree({"a": b"7"}), url, version=7)
    lower = push_artifact(tree({"a": b"5"}), url, version=5)
    assert not lower.is_latest
    assert show_artifact(url).version == 7
    assert push_artifact(tree({"a": b"8"}), url).version == 8


def test_a_lower_upload_that_ends_later_does_not_move_the_latest(make_store: MakeStore, tmp_path: Path) -> None:
    """The upload of v1 is held while v2 is committed, and ends then (K095)."""
    store = make_store("oss")
    url = f"{store.url}/model"
    for name in ("slow", "fast"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes(name.encode())
    done: list[Any] = []
    with store.server.faults.injected(Fault(method="PUT", key="*/slow", hold="before")) as gate:
        thread = threading.Thread(target=lambda: done.append(push_artifact(tmp_path / "slow", url)))
        thread.start()
        assert gate.reached.wait(DEADLINE_S)
        fast = push_artifact(tmp_path / "fast", url)
        assert (fast.version, show_artifact(url).version) == (2, 2)
        gate.release()
        thread.join(DEADLINE_S)
    assert [(slow.version, slow.is_latest) for slow in done] == [(1, False)]
    assert show_artifact(url).version == 2
    assert [artifact.version for artifact in artifacts(url)] == [1, 2]


@pytest.mark.parametrize("version", [0, -1, 10**12, True, "3"])
def test_no_such_version_to_push(make_store: MakeStore, tree: Tree, version: Any) -> None:
    """Refused before anything is made."""
    store = make_store("local")
    with pytest.raises(ConfigError, match="versions are whole numbers from 1"):
        push_artifact(tree({"a": b"1"}), f"{store.url}/model", version=version)
    assert store.keys() == []


def test_a_version_is_never_overwritten(make_store: MakeStore, tree: Tree) -> None:
    """With the same bytes it is the one there is; with others it is refused, committed, pruned or damaged."""
    store = make_store("local")
    url = f"{store.url}/model"
    for number in (1, 2, 3):
        push_artifact(tree({"a": b"%d" % number}), url)
    assert push_artifact(tree({"a": b"2"}), url, version=2).existed
    run = RunDirectory.open(url)
    prune(run, KeepLast(2))
    (key,) = [key for key in store.keys("model/manifests/") if "-000000000002-" in key]
    store.put(key, store.get(key).replace(b'"files"', b'"fules"'))
    before = store.snapshot()
    for number, says in ((1, "was pruned"), (2, "is damaged"), (3, "holds other files")):
        with pytest.raises(ConflictError, match=says):
            push_artifact(tree({"a": b"new"}), url, version=number)
    assert store.snapshot() == before


def test_a_version_that_somebody_else_is_pushing(make_store: MakeStore, tmp_path: Path) -> None:
    """Its number is taken from the moment it was claimed; the next one goes past it."""
    store = make_store("oss")
    url = f"{store.url}/model"
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes(name.encode())
    with (
        store.server.faults.injected(refuse("*/theirs")),
        pytest.raises(AccessDeniedError),
    ):
        push_artifact(tmp_path / "theirs", url, version=4)
    with pytest.raises(ConflictError, match=r"version 4 of .* was claimed by .*, and is not committed"):
        push_artifact(tmp_path / "mine", url, version=4)
    assert push_artifact(tmp_path / "mine", url).version == 5
    assert push_artifact(tmp_path / "theirs", url, version=4).version == 4


def test_a_store_that_does_not_decide_create_only_writes(make_store: MakeStore, tree: Tree) -> None:
    """Versions are claimed by bids there; files that changed after a failure take the next one, for the old commit might still arrive."""
    store = make_store("oss")
    url = f"{store.url}/model"
    store.put("model/run.json", encode_run(RunRecord(uuid="5f0c", kind="artifact", create_only=False)))
    assert [push_artifact(tree({"a": text}), url).version for text in (b"1", b"2", b"2")] == [1, 2, 2]
    assert push_artifact(tree({"a": b"7"}), url, version=7).version == 7
    with pytest.raises(ConflictError, match="holds other files"):
        push_artifact(tree({"a": b"8"}), url, version=7)
    with store.server.faults.injected(refuse("*/manifests/*")), pytest.raises(AccessDeniedError):
        push_artifact(tree({"a": b"old"}), url)
    assert push_artifact(tree({"a": b"new"}), url).version == 9


@pytest.mark.parametrize("kind", ["local", "oss"])
def test_many_at_once(make_store: MakeStore, kind: str, tmp_path: Path) -> None:
    """As many versions as pushers, one after another, each with the files of one of them."""
    url = f"{make_store(kind).url}/model"
    names = [f"pusher-{number}" for number in range(5)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_bytes(name.encode())
    with ThreadPoolExecutor(len(names)) as pool:
        pushed = list(pool.map(lambda name: push_artifact(tmp_path / name, url), names))
    assert sorted(artifact.version for artifact in pushed) == [1, 2, 3, 4, 5]
    for name, artifact in zip(names, pushed, strict=True):
        assert held(pull_artifact(artifact.reference, tmp_path / f"got-{name}").path) == {"data": name.encode()}


# --- failures -------------------------------------------------------------------------------------------------------------------


def test_a_repeat_sends_only_what_is_missing(make_store: MakeStore, tree: Tree) -> None:
    """Refused in the middle: no version; the repeat is the same version and sends the rest."""
    store = make_store("oss")
    url = f"{store.url}/model"
    directory = tree({"a.bin": b"a" * 100, "b.bin": b"b" * 100})
    with store.server.faults.injected(refuse("*/b.bin")), pytest.raises(AccessDeniedError, match=r"b\.bin"):
        push_artifact(directory, url)
    assert store.keys("model/manifests/") == []
    store.server.log.clear()
    pushed = push_artifact(directory, url)
    assert pushed.version == 1
    assert "b.bin" in sent(store)
    assert sum(sent(store).values()) <= 200
    assert len(store.keys("model/attempts/")) == 1
    assert list(Journal(journal_root(url)).entries()) == []
    store.server.log.clear()
    assert push_artifact(directory, url).existed
    assert sent(store) == {}


def test_a_lost_answer_to_the_commit_is_settled(make_store: MakeStore, tree: Tree) -> None:
    """One version, and nothing of it is left in the journal."""
    store = make_store("oss")
    url = f"{store.url}/model"
    with store.server.faults.injected(Fault(method="PUT", key="*/manifests/*", drop="after", times=1)) as fault:
        pushed = push_artifact(tree({"a": b"1"}), url)
    assert fault.hits == 1
    assert [artifact.version for artifact in artifacts(url)] == [pushed.version] == [1]


def test_a_commit_whose_answer_never_came(make_store: MakeStore, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the commit, and another version followed: the repeat finds its own, as it was committed."""
    store = make_store("oss")
    url = f"{store.url}/model"
    directory = tree({"a": b"1"})
    with monkeypatch.context() as patch:
        patch.setattr(artifact_push, "replicate", lambda *args, **options: _then_lost(*args, **options))
        with pytest.raises(AccessDeniedError):
            push_artifact(directory, url, metadata={"when": "first"})
    (directory.parent / "other").write_bytes(b"2")
    assert push_artifact(directory.parent / "other", url).version == 2
    again = push_artifact(directory, url, metadata={"when": "again"})
    assert (again.version, again.metadata, again.is_latest) == (1, {"when": "first"}, False)
    assert list(Journal(journal_root(url)).entries()) == []


def _then_lost(manifest: Any, source: Any, target: Any, journal: Journal, entry: Any, **options: Any) -> Any:
    """Commits, and leaves the journal as a kill right after the commit would."""
    replicate(manifest, source, target, journal, entry, **options)
    journal.write(replace(entry, state="uploading", tries=1))
    raise AccessDeniedError("the machine is gone")


def test_files_that_changed_after_a_failure_take_the_version_that_was_claimed(
    make_store: MakeStore, tree: Tree
) -> None:
    """The old name is closed, so that no late write can commit it, and what was sent under it is gone; no version is skipped."""
    store = make_store("oss")
    url = f"{store.url}/model"
    with store.server.faults.injected(refuse("*/manifests/*")), pytest.raises(AccessDeniedError):
        push_artifact(tree({"a": b"old"}), url)
    (old,) = {key.split("/")[2] for key in store.keys("model/checkpoints/")}
    pushed = push_artifact(tree({"a": b"new"}), url)
    assert (pushed.version, pushed.manifest.id > old) == (1, True)
    assert json.loads(store.get(f"model/manifests/{old}.json"))["closed"] == "aborted"
    assert store.snapshot("model/checkpoints/") == {f"model/checkpoints/{pushed.manifest.id}/a": b"new"}
    assert [artifact.version for artifact in artifacts(url)] == [1]
    assert push_artifact(tree({"a": b"newer"}), url).version == 2


def test_a_file_that_changes_while_it_is_pushed(
    make_store: MakeStore, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No version describes bytes other than those stored (I10)."""
    store = make_store("oss")
    url = f"{store.url}/model"
    directory = tree({"a": b"before"})

    def then_changed(path: Path, **options: Any) -> object:
        entries = describe(path, **options)
        (path / "a").write_bytes(b"after!")
        return entries

    with monkeypatch.context() as patch:
        patch.setattr(artifact_push, "describe", then_changed)
        with pytest.raises(IntegrityError, match="a"):
            push_artifact(directory, url)
    assert store.keys("model/manifests/") == []
    pushed = push_artifact(directory, url)
    assert store.get(f"model/checkpoints/{pushed.manifest.id}/a") == b"after!"


@pytest.mark.parametrize("kind", ["local", "oss"])
def test_damage_is_found_and_never_handed_out(make_store: MakeStore, kind: str, tree: Tree, tmp_path: Path) -> None:
    """A flipped byte in the latest version: named by verify and by pull, and no older one is given out in its place."""
    store = make_store(kind)
    url = f"{store.url}/model"
    push_artifact(tree({"a": b"good"}), url)
    second = push_artifact(tree({"a": b"bad?"}), url)
    store.put(f"model/checkpoints/{second.manifest.id}/a", b"bad!")
    run = RunDirectory.open(url)
    history = run.history()
    damage = verify_run(run, history, sorted(history.manifests), Depth())
    assert [(item.stem.step, item.file) for item in damage] == [(2, "a")]
    with pytest.raises(IntegrityError, match="damaged"):
        pull_artifact(url, tmp_path / "got")
    assert not (tmp_path / "got").exists()
    assert held(pull_artifact(f"{url}@v1", tmp_path / "got").path) == {"a": b"good"}


def test_what_else_lies_in_the_target_stays(make_store: MakeStore, tree: Tree, tmp_path: Path) -> None:
    """Refused, unless it is exactly the version, or is to be replaced."""
    url = f"{make_store('local').url}/model"
    push_artifact(tree({"a": b"1"}), url)
    push_artifact(tree({"a": b"2"}), url)
    target = tmp_path / "got"
    assert pull_artifact(f"{url}@v1", target).fetched_bytes
    assert not pull_artifact(f"{url}@v1", target).fetched_bytes
    with pytest.raises(CheckpointExistsError, match="holds something else"):
        pull_artifact(url, target)
    assert held(target) == {"a": b"1"}
    assert held(pull_artifact(url, target, overwrite=True).path) == {"a": b"2"}


# --- retention and tags -----------------------------------------------------------------------------------------------------------


def test_retention_guards_the_latest_and_what_is_tagged(make_store: MakeStore, tree: Tree) -> None:
    """By number and by metric; the latest is the highest version, not the one that was pushed last."""
    url = f"{make_store('local').url}/model"
    for number, loss in ((1, 0.9), (2, 0.1), (3, 0.5), (9, 0.8), (4, 0.7)):
        push_artifact(tree({"a": b"%d" % number}), url, version=number, metrics={"eval_loss": loss})
    tag_artifact(f"{url}@v3", "production")
    done = prune(RunDirectory.open(url), KeepBest("eval_loss"))
    assert [verdict.manifest.step for verdict in done.deleted] == [1, 4]
    kept = {verdict.manifest.step: verdict.reasons for verdict in done.plan.keep}
    assert kept == {2: ("best:eval_loss",), 3: ("tag:production",), 9: ("newest",)}
    assert [artifact.version for artifact in artifacts(url)] == [2, 3, 9]
    assert push_artifact(tree({"a": b"10"}), url).version == 10


def test_nothing_is_pruned_when_the_latest_is_damaged(make_store: MakeStore, tree: Tree) -> None:
    """The older ones may be all there is (I8)."""
    store = make_store("local")
    url = f"{store.url}/model"
    push_artifact(tree({"a": b"1"}), url)
    second = push_artifact(tree({"a": b"2"}), url)
    store.delete(f"model/checkpoints/{second.manifest.id}/a")
    with pytest.raises(IntegrityError, match="older ones are not deleted"):
        prune(RunDirectory.open(url), KeepLast(1))
    assert [artifact.version for artifact in artifacts(url)] == [1, 2]


def test_tags_move_and_go(make_store: MakeStore, tree: Tree) -> None:
    """A tag points to one version at a time; removing it leaves the version."""
    url = f"{make_store('local').url}/model"
    push_artifact(tree({"a": b"1"}), url, tags=["rc", "rc"])
    push_artifact(tree({"a": b"2"}), url, tags=["rc"])
    assert [artifact.tags for artifact in artifacts(url)] == [(), ("rc",)]
    assert tag_artifact(f"{url}@v1", "rc").tags == ("rc",)
    assert show_artifact(f"{url}@rc").version == 1
    assert untag_artifact(url, "rc").step == 1
    with pytest.raises(CheckpointNotFoundError, match="has no tag 'rc': it has no tags"):
        untag_artifact(url, "rc")
    assert len(artifacts(url)) == 2


# --- links ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", "oss"])
def test_linked_with_the_checkpoint_it_came_from(
    make_store: MakeStore, kind: str, tree: Tree, push_steps: PushSteps, cli_here: Callable[..., Any]
) -> None:
    """The manifest names run, id and step; the checkpoint names the artifact; nothing of it counts as foreign."""
    store = make_store(kind)
    ids = push_steps(f"{store.url}/run", 100, 200, options=["--metric", "eval_loss=0.5"])
    url = f"{store.url}/model"
    pushed = push_artifact(tree({"a": b"1"}), url, source=f"{store.url}/run@100", metadata={"dataset": "v2"})
    uuid = json.loads(store.get("run/run.json"))["uuid"]
    manifest = json.loads(store.get(f"model/manifests/{pushed.manifest.id}.json"))
    assert manifest["source"] == {"run": "run", "run_uuid": uuid, "id": ids[0], "step": 100, "location": "../run"}
    assert manifest["metadata"] == {"dataset": "v2"}
    shown = json.loads(cli_here("show", f"{store.url}/run", "100", "--json").stdout)
    link = {"name": "model", "version": 1, "id": pushed.manifest.id, "url": url, "removed": False}
    assert shown["artifacts"] == [link]
    assert f"{url}@v1\n" in cli_here("show", f"{store.url}/run", "100").stdout
    assert "artifacts" not in json.loads(cli_here("show", f"{store.url}/run", "200", "--json").stdout)
    rows = json.loads(cli_here("ls", f"{store.url}/run", "--all", "--json").stdout)["checkpoints"]
    assert [(row["id"], row["state"]) for row in rows] == [(stem, "committed") for stem in ids]
    push_artifact(tree({"a": b"2"}), url)
    assert cli_here("prune", url, "--keep-last", "1", "--yes").returncode == 0
    shown = json.loads(cli_here("show", f"{store.url}/run", "100", "--json").stdout)
    assert shown["artifacts"] == [{**link, "removed": True}]
    assert f"{url}@v1 (removed)\n" in cli_here("show", f"{store.url}/run", "100").stdout


def test_a_link_that_was_lost_is_made_by_the_repeat(make_store: MakeStore, tree: Tree, push_steps: PushSteps) -> None:
    """Killed between commit and link; and an artifact made from another checkpoint is not linked for its bytes alone."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100, 200)
    source = f"{store.url}/run@100"
    push_artifact(tree({"a": b"1"}), f"{store.url}/model", source=source)
    (link,) = store.keys("run/artifacts/")
    kept = store.get(link)
    store.delete(link)
    assert push_artifact(tree({"a": b"1"}), f"{store.url}/model", source=source).existed
    (again,) = store.keys("run/artifacts/")
    assert (again, json.loads(store.get(again))["id"]) == (link, json.loads(kept)["id"])
    assert push_artifact(tree({"a": b"1"}), f"{store.url}/model", source=f"{store.url}/run@200").existed
    assert store.keys("run/artifacts/") == [link]


def test_a_link_that_is_refused_is_a_warning(
    make_store: MakeStore, tree: Tree, push_steps: PushSteps, caplog: pytest.LogCaptureFixture
) -> None:
    """The artifact is committed and names its source itself."""
    store = make_store("oss")
    push_steps(f"{store.url}/run", 100)
    with store.server.faults.injected(refuse("*/run/artifacts/*")), caplog.at_level(logging.WARNING):
        pushed = push_artifact(tree({"a": b"1"}), f"{store.url}/model", source=f"{store.url}/run")
    assert pushed.source is not None
    assert pushed.source.stem.step == 100
    assert "could not be linked" in caplog.text


def test_an_origin_as_a_value(make_store: MakeStore, tree: Tree, push_steps: PushSteps) -> None:
    """A program that has the run at hand names the checkpoint itself, in the store or not yet."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    run = RunDirectory.open(f"{store.url}/run")
    (stem,) = run.stems()
    later = stem.renamed("ffffffff")
    pushed = push_artifact(tree({"a": b"1"}), f"{store.url}/model", source=Origin(run=run, stem=later))
    assert pushed.source is not None
    assert pushed.source.stem == later
    assert [key.split("/")[2] for key in store.keys("run/artifacts/")] == [str(later)]


@pytest.mark.parametrize(
    ("selector", "step"), [("", 200), ("@latest", 200), ("@100", 100), ("@best:hits@10", 100), ("@tag:rc", 100)]
)
def test_which_checkpoint_is_meant(
    make_store: MakeStore, tree: Tree, push_steps: PushSteps, selector: str, step: int
) -> None:
    """Any selector, behind the first '@' that has one behind it."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100, options=["--metric", "hits@10=0.9", "--tag", "rc"])
    push_steps(f"{store.url}/run", 200, options=["--metric", "hits@10=0.1"])
    suffix = f"{selector}:max" if "best" in selector else selector
    pushed = push_artifact(tree({"a": b"1"}), f"{store.url}/model", source=f"{store.url}/run{suffix}")
    assert pushed.source is not None
    assert pushed.source.stem.step == step


def test_a_source_that_is_not_there(make_store: MakeStore, tree: Tree, push_steps: PushSteps) -> None:
    """Nothing is made of an artifact whose origin is misspelled, or is itself an artifact."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    push_artifact(tree({"a": b"1"}), f"{store.url}/other")
    before = store.snapshot()
    for source in (f"{store.url}/run@300", f"{store.url}/rum"):
        with pytest.raises(CheckpointNotFoundError):
            push_artifact(tree({"a": b"1"}), f"{store.url}/model", source=source)
    with pytest.raises(ConfigError, match="is an artifact"):
        push_artifact(tree({"a": b"1"}), f"{store.url}/model", source=f"{store.url}/other")
    assert store.snapshot() == before


# --- one kind refuses the other -----------------------------------------------------------------------------------------------------


def test_runs_and_artifacts_do_not_mix(
    make_store: MakeStore, tree: Tree, push_steps: PushSteps, cli_here: Callable[..., Any], tmp_path: Path
) -> None:
    """Neither takes the other's saves, by push or by training; and no artifact is made inside a run."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    directory = tree({"a": b"1"})
    push_artifact(directory, f"{store.url}/model")
    before = store.snapshot()
    with pytest.raises(ConflictError, match="is a run of checkpoints, not an artifact"):
        push_artifact(directory, f"{store.url}/run")
    with pytest.raises(ConflictError, match="name it beside the run"):
        push_artifact(directory, f"{store.url}/run/model")
    refused = cli_here("push", directory, f"{store.url}/model", "--step", "1")
    assert (refused.returncode, "is an artifact" in refused.stderr) == (7, True)
    with pytest.raises(ConflictError, match="is an artifact, not a run of checkpoints"):
        open_places(
            f"{store.url}/model", tmp_path / "tier", retry=RetryPolicy(), stop=threading.Event(), wrap_backend=None
        )
    assert not (tmp_path / "tier").exists()
    assert store.snapshot() == before
    for look in (artifacts, show_artifact):
        with pytest.raises(CheckpointNotFoundError, match="not an artifact"):
            look(f"{store.url}/run")


# --- processes ----------------------------------------------------------------------------------------------------------------------


def start(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ckptmgr.cli.main", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_at_once_get_two_versions(make_store: MakeStore, tmp_path: Path) -> None:
    """Both go for v1 at the same moment; the one whose claim comes second takes v2, and nothing is overwritten."""
    store = make_store("oss")
    url = f"{store.url}/model"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_bytes(name.encode())
    claim = Fault(method="PUT", key="*/attempts/000001.json", hold="before", times=2)
    with store.server.faults.injected(claim) as gate:
        pushers = [start("artifact", "push", tmp_path / name, url) for name in ("first", "second")]
        deadline = threading.Event()
        while gate.hits < 2:
            assert all(pusher.poll() is None for pusher in pushers), [pusher.communicate() for pusher in pushers]
            deadline.wait(0.02)
        gate.release()
        told = [pusher.communicate(timeout=DEADLINE_S) for pusher in pushers]
    assert [pusher.returncode for pusher in pushers] == [0, 0], told
    assert {out.strip() for out, _ in told} == {f"{url}@v1", f"{url}@v2"}
    stored = {store.get(key) for key in store.keys("model/checkpoints/")}
    assert stored == {b"first", b"second"}
    assert [artifact.version for artifact in artifacts(url)] == [1, 2]


def test_killed_in_the_middle(make_store: MakeStore, tree: Tree) -> None:
    """SIGKILL while a file is on its way: no version; the repeat is the same version and sends only what is missing."""
    store = make_store("oss")
    url = f"{store.url}/model"
    directory = tree({"a.bin": b"a" * 1000, "b.bin": b"b" * 1000})
    with store.server.faults.injected(Fault(method="PUT", key="*/b.bin", hold="before")) as gate:
        pusher = start("artifact", "push", directory, url)
        assert gate.reached.wait(DEADLINE_S)
        wait = threading.Event()
        while not sent(store):
            assert pusher.poll() is None
            wait.wait(0.02)
        pusher.kill()
        pusher.communicate(timeout=DEADLINE_S)
    assert store.keys("model/manifests/") == []
    store.server.log.clear()
    pushed = push_artifact(directory, url)
    assert pushed.version == 1
    assert sent(store).keys() <= {"b.bin"}
    assert {key.rsplit("/", 1)[-1] for key in store.keys("model/checkpoints/")} == {"a.bin", "b.bin"}
    assert len(store.keys("model/attempts/")) == 1
