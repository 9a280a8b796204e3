"""`gc`: what counts as abandoned, what never does; plan and deed, one run and a whole store."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.atomic import TEMP_PREFIX
from ckptmgr.backends.base import BucketFacts
from ckptmgr.backends.local import LocalBackend
from ckptmgr.backends.registry import open_store
from ckptmgr.core.errors import ConfigError
from ckptmgr.core.layout import Stem, manifest_key
from ckptmgr.core.manifest import ClosingRecord, encode_closing
from ckptmgr.core.records import encode_run
from ckptmgr.run import locks
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.gc import Collected, gc, plan_gc
from ckptmgr.run.journal import Journal, UploadEntry
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.faulty import FaultyBackend, StoreFault, denied
from ckptmgr.testing.stores import Store

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]

DAY_S = 24 * 3600.0
ABANDONED = Stem(1, 700, 7, "00112233")
SHARDED = Stem(1, 800, 8, "00112233")
CLOSED = Stem(1, 900, 9, "00112233")


def document(result: Result) -> dict[str, Any]:
    """What `gc --json` says; the exit code and the shape are asserted."""
    assert result.returncode == 0, result.stderr
    said: dict[str, Any] = json.loads(result.stdout)
    assert said.keys() == {"collect", "marked", "freed_bytes"}
    for item in said["collect"]:
        assert item.keys() - {"run"} == {"id", "kind", "age_s", "bytes"}
    assert said["freed_bytes"] == sum(item["bytes"] or 0 for item in said["collect"])
    return said


def things(said: dict[str, Any]) -> list[tuple[str, str]]:
    return [(item["kind"], item["id"]) for item in said["collect"]]


def removed(done: Collected) -> list[tuple[str, str]]:
    return [(litter.kind, litter.id) for litter in done.removed]


def later(days: float = 8.0) -> float:
    """The store's time so many days from now."""
    return time.time() + days * DAY_S


def abandon(store: Store, stem: Stem = ABANDONED) -> None:
    """What an upload leaves that dies before its manifest: 30 bytes."""
    store.put(f"run/checkpoints/{stem}/model.bin", b"x" * 20)
    store.put(f"run/checkpoints/{stem}/sub/opt.bin", b"x" * 10)


def close(store: Store, stem: Stem, how: str = "pruned", closed_at: str | None = None) -> None:
    record = ClosingRecord(stem=stem, closed="pruned" if how == "pruned" else "aborted", closed_at=closed_at)
    store.put(f"run/{manifest_key(stem)}", encode_closing(record))


def begin_upload(store: Store, key: str, run: str = "run") -> tuple[str, str]:
    """Begin an upload in parts to `key` of a run and leave it; returns its path and id."""
    fs: Any
    fs, root = open_store(f"{store.url}/{run}")
    while hasattr(fs, "inner"):
        fs = fs.inner
    return f"{root}/{key}", fs._begin(f"{root}/{key}", "overwrite")


# --- plan and deed ------------------------------------------------------------------------------------------------------


def test_plan_and_deed(store: Store, push_steps: PushSteps, cli_here: Cli) -> None:
    """Without --yes a plan that changes nothing; with it exactly that. What is committed, damaged or foreign is untouched."""
    run = f"{store.url}/run"
    _, newest = push_steps(run, 100, 200)
    garbled = Stem(1, 300, 30, "00112233")
    store.put(f"run/manifests/{garbled}.json", b"{")
    store.put(f"run/checkpoints/{garbled}/model.bin", b"its manifest cannot be read")
    store.put("run/checkpoints/checkpoint-50/model.bin", b"copied by hand")
    store.put("run/notes.txt", b"mine")
    committed = store.snapshot()
    abandon(store)
    store.put(f"run/parts/{SHARDED}/rank-00000-of-00008.json", b"{}")
    store.put(f"run/checkpoints/{SHARDED}/shard-0", b"12345")
    close(store, CLOSED, closed_at="2026-01-01T00:00:00Z")
    store.put(f"run/checkpoints/{CLOSED}/left.bin", b"123")
    store.put("run/attempts/.probe-00112233", b"first")
    store.put("run/.ckptmgr-doctor-00112233/a/b", b"1234")
    before = store.snapshot()
    expected = [
        ("uncommitted", str(ABANDONED)),
        ("uncommitted", str(SHARDED)),
        ("closed", str(CLOSED)),
        ("probe", ".ckptmgr-doctor-00112233"),
        ("probe", "attempts/.probe-00112233"),
    ]
    plan = document(cli_here("gc", run, "--grace", "0s", "--json"))
    assert things(plan) == expected
    assert [item["bytes"] for item in plan["collect"]] == [30, 7, 3, 4, 5]
    assert store.snapshot() == before
    told = cli_here("gc", run, "--grace", "0s")
    assert told.returncode == 0
    assert told.stdout.splitlines()[-1] == f"{run}: would remove 5 things and free 49 B; add --yes to do it"
    assert things(document(cli_here("gc", run, "--grace", "0s", "--yes", "--json"))) == expected
    after = store.snapshot()
    records = {f"run/manifests/{stem}.json" for stem in (ABANDONED, SHARDED, CLOSED)}
    assert {key: data for key, data in after.items() if key not in records} == committed
    assert [json.loads(after[key])["closed"] for key in sorted(records)] == ["aborted", "aborted", "pruned"]
    assert document(cli_here("gc", run, "--grace", "0s", "--json"))["collect"] == []
    assert json.loads(cli_here("ls", run, "--all", "--json").stdout)["checkpoints"][1]["id"] == newest
    if store.name == "local":
        folders = sorted(path.name for path in Path(store.root, "run/checkpoints").iterdir())  # type: ignore[attr-defined]
        assert str(ABANDONED) not in folders
        assert str(CLOSED) not in folders
        assert list(Path(store.root, "run/parts").iterdir()) == []  # type: ignore[attr-defined]
        assert not Path(store.root, "run/.ckptmgr-doctor-00112233").exists()  # type: ignore[attr-defined]


def test_what_is_young_stays(store: Store, push_steps: PushSteps, cli_here: Cli) -> None:
    """Seven days, by the store's times, unless told otherwise: until then an upload may be under way, and is only counted."""
    run = f"{store.url}/run"
    push_steps(run, 100)
    abandon(store)
    store.put("run/attempts/.probe-00112233", b"first")
    before = store.snapshot()
    for options in ([], ["--yes"], ["--grace", "1d", "--yes"]):
        told = cli_here("gc", run, *options)
        assert (told.returncode, told.stderr) == (0, "")
        assert told.stdout.endswith("; 2 younger things may be under way and stays\n")
        assert document(cli_here("gc", run, *options, "--json"))["collect"] == []
    assert store.snapshot() == before
    here = RunDirectory.open(run)
    assert removed(gc(here, now_s=later(6.9))) == []
    assert removed(gc(here, now_s=later(7.1)))[0] == ("uncommitted", str(ABANDONED))


def test_one_fresh_file_keeps_the_whole_save(make_store: MakeStore, push_steps: PushSteps) -> None:
    """The age is that of the last sign of life: a file, a partial manifest, an upload in parts that was begun."""
    store = make_store("oss")
    push_steps(f"{store.url}/run", 100)
    run = RunDirectory.open(f"{store.url}/run")
    abandon(store)
    late = f"run/checkpoints/{ABANDONED}/sub/opt.bin"

    class Aged(FaultyBackend):
        """The time of everything but one file is ten days ago."""

        def find(self, path: str, *arguments: Any, **kwargs: Any) -> Any:
            found = super().find(path, *arguments, **kwargs)
            for name, record in found.items() if isinstance(found, dict) else ():
                record["mtime"] -= 0.0 if name.endswith(self.young) else 10 * DAY_S
            return found

        young: str = late

    aged = Aged(run.fs)
    behind = replace(run, fs=aged)
    assert removed(gc(behind)) == []
    aged.young = "none"
    begin_upload(store, f"checkpoints/{ABANDONED}/big.bin")
    assert removed(gc(behind)) == []
    store.put(f"run/parts/{SHARDED}/rank-00000-of-00008.json", b"{}")
    store.put(f"run/checkpoints/{SHARDED}/shard-0", b"12345")
    aged.young = ".json"
    assert removed(gc(behind)) == []
    aged.young = "none"
    assert removed(gc(behind)) == [("uncommitted", str(SHARDED))]


@pytest.mark.parametrize("kind", ["s3", "oss"])
def test_unfinished_uploads(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, kind: str) -> None:
    """Uploads in parts that never ended are thrown away, also those to a committed checkpoint; what is not ours, or only begins with the run's name,
    stays."""
    store = make_store(kind)
    run = f"{store.url}/run"
    (stem,) = push_steps(run, 100)
    keys = [f"checkpoints/{stem}/model.bin", f"checkpoints/{ABANDONED}/model.bin"]
    for key in keys:
        begin_upload(store, key)
    foreign = [begin_upload(store, key)[0] for key in ("foreign/big.bin", "checkpoints/checkpoint-5/model.bin")]
    foreign.append(begin_upload(store, f"checkpoints/{ABANDONED}/model.bin", run="run2")[0])
    bucket = store.url.split("/")[2]
    assert len(store.server.raw_uploads(bucket)) == 5
    assert document(cli_here("gc", run, "--json"))["collect"] == []
    plan = document(cli_here("gc", run, "--grace", "0s", "--json"))
    assert things(plan) == [("upload", key) for key in sorted(keys)]
    assert [item["bytes"] for item in plan["collect"]] == [None, None]
    assert things(document(cli_here("gc", run, "--grace", "0s", "--yes", "--json"))) == things(plan)
    assert sorted(f"{bucket}/{key}" for key in store.server.raw_uploads(bucket).values()) == sorted(foreign)
    assert json.loads(cli_here("verify", run, "--json").stdout)["damaged"] == []


def test_an_upload_that_this_machine_will_go_on_with_stays(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, tmp_path: Path
) -> None:
    """A journal here knows it and is younger than the grace, whatever the store's clock says; an older journal does not count."""
    store = make_store("oss")
    push_steps(f"{store.url}/run", 100)
    run = RunDirectory.open(f"{store.url}/run")
    _, upload_id = begin_upload(store, f"checkpoints/{ABANDONED}/big.bin")
    journal = Journal(tmp_path / "journal", makes_root=True)
    entry = UploadEntry(
        stem=ABANDONED.renamed("ffffffff"),
        remote=ABANDONED,
        state="failed",
        began_at_s=time.time() - DAY_S,
        multiparts={"big.bin": upload_id},
    )
    journal.write(entry)
    assert removed(gc(run, journals=[journal], now_s=later())) == []
    journal.write(replace(entry, began_at_s=time.time() - 8 * DAY_S))
    assert removed(gc(run, journals=[journal], now_s=later())) == [("upload", f"checkpoints/{ABANDONED}/big.bin")]


def test_uploads_that_may_not_be_listed(make_store: MakeStore, push_steps: PushSteps) -> None:
    """The right to list uploads is one of its own: without it the rest is done, and it is said what was not looked for."""
    store = make_store("oss")
    push_steps(f"{store.url}/run", 100)
    abandon(store)
    fs, root = open_store(f"{store.url}/run")
    faulty = FaultyBackend(fs)
    faulty.add(StoreFault(verb="list_uploads", error=denied, times=None))
    run = RunDirectory.open(f"{store.url}/run", fs=faulty, root=root)
    done = gc(run, now_s=later())
    assert removed(done) == [("uncommitted", str(ABANDONED))]
    assert "list_uploads" in done.plan.unseen


def test_closing_records_go_after_thirty_days(store: Store, push_steps: PushSteps) -> None:
    """By the younger of the store's time and the one in the record; one with data left, or with a time that is not over, stays."""
    push_steps(f"{store.url}/run", 100)
    run = RunDirectory.open(f"{store.url}/run")
    unsigned, signed = CLOSED, CLOSED.renamed("44556677")
    close(store, unsigned)
    close(store, signed, closed_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(later(20))))
    store.put(f"run/checkpoints/{ABANDONED}/left.bin", b"1")
    close(store, ABANDONED, "aborted")
    assert removed(gc(run, now_s=later(29))) == [("closed", str(ABANDONED))]
    assert removed(gc(run, now_s=later(31))) == [("record", str(ABANDONED)), ("record", str(unsigned))]
    assert removed(gc(run, now_s=later(51))) == [("record", str(signed))]
    assert run.history().closed == {}
    assert len(run.history().manifests) == 1


# --- in use -------------------------------------------------------------------------------------------------------------


def test_what_this_machine_uploads_or_reads_stays(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """A lock is a sign of life that no age overrules, in the plan as in the deed; also that of a save whose upload goes on under another nonce."""
    store = make_store("local")
    run = f"{store.url}/run"
    push_steps(run, 100)
    abandon(store)
    uuid = RunDirectory.open(run).uuid
    for stem, purpose in ((ABANDONED, "upload"), (ABANDONED, "read"), (ABANDONED.renamed("99999999"), "upload")):
        for yes in ((), ("--yes",)):
            with locks.exclusive(uuid, stem, purpose):  # type: ignore[arg-type]
                result = cli_here("gc", run, "--grace", "0s", *yes, "--json")
            assert document(result)["collect"] == []
            assert f"{ABANDONED} stays: it is " in result.stderr
    with locks.exclusive(uuid, Stem(1, 700, 8, "99999999"), "upload"):  # another save
        assert len(document(cli_here("gc", run, "--grace", "0s", "--yes", "--json"))["collect"]) == 1


def test_local_tier_is_not_collected(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """What is not committed there is being saved (I6): refused (2), nothing deleted."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    abandon(store)
    store.put("run/.lock", b"")
    before = store.snapshot()
    for yes in ([], ["--yes"]):
        refused = cli_here("gc", f"{store.url}/run", "--grace", "0s", *yes)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "local tier" in refused.stderr
    assert store.snapshot() == before


# --- on a disk ----------------------------------------------------------------------------------------------------------


def test_leftovers_of_a_disk(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """Temporary files of killed writes, and bare folders of saves; the owner of a claim on a name stays, or nobody could take it over."""
    store = make_store("local")
    run = f"{store.url}/run"
    (stem,) = push_steps(run, 100)
    root = Path(store.root, "run")  # type: ignore[attr-defined]
    temps = [f"checkpoints/{stem}/{TEMP_PREFIX}1-aa", f"manifests/{TEMP_PREFIX}1-bb"]
    for temp in temps:
        store.put(f"run/{temp}", b"half a file")
    store.put(f"run/manifests/{ABANDONED}.json.claim/{TEMP_PREFIX}owner", b"{}")
    (root / f"checkpoints/{ABANDONED}/sub").mkdir(parents=True)
    (root / "checkpoints/mine").mkdir()
    store.put(f"run/checkpoints/{SHARDED}/{TEMP_PREFIX}1-cc", b"half a file")
    expected = [
        ("uncommitted", str(SHARDED)),
        *(("temporary", temp) for temp in temps),
        ("folder", str(ABANDONED)),
    ]
    assert things(document(cli_here("gc", run, "--grace", "0s", "--json"))) == expected
    assert things(document(cli_here("gc", run, "--grace", "0s", "--yes", "--json"))) == expected
    left = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if TEMP_PREFIX in path.name)
    assert left == [f"manifests/{ABANDONED}.json.claim/{TEMP_PREFIX}owner"]
    assert sorted(path.name for path in (root / "checkpoints").iterdir()) == [stem, "mine"]


def test_a_copy_that_keeps_times_is_not_old(make_store: MakeStore, push_steps: PushSteps) -> None:
    """`cp -a` and rsync give a file that is a minute old the time of its source; data comes before manifests, and must not be taken for abandoned."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    abandon(store)
    for path in Path(store.root, f"run/checkpoints/{ABANDONED}").rglob("*.bin"):  # type: ignore[attr-defined]
        os.utime(path, (1e9, 1e9))
    run = RunDirectory.open(f"{store.url}/run")
    assert plan_gc(run).collect == ()
    assert [litter.id for litter in plan_gc(run, now_s=later()).collect] == [str(ABANDONED)]


# --- a store ------------------------------------------------------------------------------------------------------------


def test_a_whole_store(store: Store, push_steps: PushSteps, cli_here: Cli) -> None:
    """Each run one level below, and what a killed doctor has left beside them; nothing else."""
    for name in ("run", "run2"):
        push_steps(f"{store.url}/{name}", 100)
        store.put(f"{name}/checkpoints/{ABANDONED}/model.bin", b"12345")
    store.put(".ckptmgr-doctor-00112233/x", b"12")
    store.put("other/checkpoints/x", b"foreign")
    store.put(f"other/checkpoints/{ABANDONED}/x", b"foreign")
    before = store.snapshot("other/")
    plan = document(cli_here("gc", store.url, "--grace", "0s", "--json"))
    assert [(item.get("run"), item["kind"]) for item in plan["collect"]] == [
        ("run", "uncommitted"),
        ("run2", "uncommitted"),
        (None, "probe"),
    ]
    assert things(document(cli_here("gc", store.url, "--grace", "0s", "--yes", "--json"))) == things(plan)
    assert document(cli_here("gc", store.url, "--grace", "0s", "--json"))["collect"] == []
    assert store.snapshot("other/") == before
    assert not store.keys(".ckptmgr-doctor")
    assert cli_here("gc", f"{store.url}/other", "--grace", "0s").returncode == 3


def test_a_tier_and_a_damaged_run_in_a_store(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """A local tier in the store, and a run whose run.json cannot be read, are passed over by name, and the others are done."""
    store = make_store("local")
    for name in ("run", "tier", "zero"):
        push_steps(f"{store.url}/{name}", 100)
        store.put(f"{name}/checkpoints/{ABANDONED}/model.bin", b"12345")
    store.put("tier/uploads/x", b"")
    store.put("zero/run.json", b"{")
    result = cli_here("gc", store.url, "--grace", "0s", "--yes", "--json")
    assert [(item["run"], item["kind"]) for item in document(result)["collect"]] == [("run", "uncommitted")]
    assert "tier is passed over: " in result.stderr
    assert "zero could not be cleaned up: " in result.stderr
    assert len(store.keys(f"tier/checkpoints/{ABANDONED}")) == len(store.keys(f"zero/checkpoints/{ABANDONED}")) == 1


# --- a store that does not decide create-only writes ----------------------------------------------------------------------


class Clocked(FaultyBackend):
    """A store whose data is `age_s` old, and whose marks are `marked_s` old."""

    age_s = 8 * DAY_S
    marked_s = 0.0

    def find(self, path: str, *arguments: Any, **kwargs: Any) -> Any:
        found = super().find(path, *arguments, **kwargs)
        for name, record in found.items() if isinstance(found, dict) else ():
            record["mtime"] -= self.marked_s if "/.gc/" in name else self.age_s
        return found


@pytest.fixture
def without_create_only(make_store: MakeStore, push_steps: PushSteps) -> tuple[Store, RunDirectory, Clocked]:
    """A run with abandoned data on a store of which run.json says that it does not decide create-only writes."""
    store = make_store("moto")
    push_steps(f"{store.url}/run", 100)
    record = RunDirectory.open(f"{store.url}/run").record
    store.put("run/run.json", encode_run(replace(record, create_only=False)))
    abandon(store)
    fs, root = open_store(f"{store.url}/run")
    clocked = Clocked(fs)
    clocked.add(StoreFault(verb="pipe_file", ignore_create=True, times=None))
    return store, RunDirectory.open(f"{store.url}/run", fs=clocked, root=root), clocked


def test_two_passes_without_create_only(without_create_only: tuple[Store, RunDirectory, Clocked]) -> None:
    """The first pass marks, and one that comes a day later removes; what has changed since, or was committed, is marked anew or let be."""
    store, run, clocked = without_create_only
    data = store.snapshot(f"run/checkpoints/{ABANDONED}/")
    plan = plan_gc(run)
    assert (plan.collect, [litter.id for litter in plan.marked]) == ((), [str(ABANDONED)])
    assert store.keys("run/.gc/") == []
    assert removed(gc(run)) == []
    assert store.keys("run/.gc/") == [f"run/.gc/{ABANDONED}.json"]
    clocked.marked_s = 23.9 * 3600.0
    assert removed(gc(run)) == []
    assert store.snapshot(f"run/checkpoints/{ABANDONED}/") == data
    # It lives: what it was marked for is no longer what it is.
    clocked.marked_s = 25 * 3600.0
    store.put(f"run/checkpoints/{ABANDONED}/more.bin", b"1")
    mark = store.get(f"run/.gc/{ABANDONED}.json")
    assert removed(gc(run)) == []
    assert store.get(f"run/.gc/{ABANDONED}.json") != mark
    assert removed(gc(run)) == [("uncommitted", str(ABANDONED))]
    assert store.keys(f"run/checkpoints/{ABANDONED}/") == store.keys("run/.gc/") == []
    assert json.loads(store.get(f"run/manifests/{ABANDONED}.json"))["closed"] == "aborted"


def test_a_mark_goes_with_its_reason(without_create_only: tuple[Store, RunDirectory, Clocked]) -> None:
    """Data that is gone or committed by the second pass needs no mark."""
    store, run, _ = without_create_only
    gc(run)
    for key in store.keys(f"run/checkpoints/{ABANDONED}/"):
        store.delete(key)
    assert removed(gc(run)) == []
    assert store.keys("run/.gc/") == []


def test_no_haste_without_create_only(without_create_only: tuple[Store, RunDirectory, Clocked], cli_here: Cli) -> None:
    """A writer there gives its name up after half the grace: a shorter grace would cross it. Refused (2)."""
    store, run, _ = without_create_only
    with pytest.raises(ConfigError, match="at least 7 d"):
        gc(run, grace_s=6 * DAY_S)
    refused = cli_here("gc", run.url, "--grace", "6d", "--yes")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert len(store.keys(f"run/checkpoints/{ABANDONED}/")) == 2


def test_a_store_that_has_lost_create_only(
    without_create_only: tuple[Store, RunDirectory, Clocked], caplog: pytest.LogCaptureFixture
) -> None:
    """Versioning was switched on since the run was made: asked before each removal, the store ignores the condition, and a warning says so."""
    store, run, _ = without_create_only
    store.put("run/run.json", encode_run(replace(run.record, create_only=True)))
    run = RunDirectory.open(run.url, fs=run.fs, root=run.root)
    done = gc(run)
    assert (removed(done), [litter.id for litter in done.plan.marked]) == ([], [str(ABANDONED)])
    assert "no longer decides create-only writes" in caplog.text
    assert len(store.keys(f"run/checkpoints/{ABANDONED}/")) == 2


# --- what is said -------------------------------------------------------------------------------------------------------


def test_the_stores_clock_counts(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine's clock is a year ahead: the plan and what is done go by the store's; who may only read plans by this one, and is told."""
    store = make_store("oss")
    push_steps(f"{store.url}/run", 100)
    abandon(store)
    words = ("gc", f"{store.url}/run", "--json")
    monkeypatch.setattr("ckptmgr.run.gc.wall_s", lambda: later(365))
    assert things(document(cli_here(*words))) == []
    assert things(document(cli_here(*words, "--yes"))) == []
    assert store.keys("run/attempts/.probe") == []
    with store.server.faults.injected(Fault(method="PUT", status=403, code="AccessDenied", times=None)):
        told = cli_here(*words)
    assert things(document(told)) == [("uncommitted", str(ABANDONED))]
    (line,) = told.stderr.splitlines()
    assert line.startswith("ckptmgr: warning: ages are by this machine's clock, for the store could not be asked: ")


def test_a_bucket_that_keeps_versions(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting frees nothing there: it is said, with what helps."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    abandon(store)
    monkeypatch.setattr(LocalBackend, "bucket_facts", lambda self, path: BucketFacts(versioning="suspended"))
    told = cli_here("gc", f"{store.url}/run", "--grace", "0s")
    assert told.returncode == 0
    (line,) = told.stderr.splitlines()
    assert line.startswith("ckptmgr: warning: the bucket of ")
    assert "older versions" in line


@pytest.mark.parametrize("grace", ["soon", "-1d", "7 days"])
def test_wrong_grace(make_store: MakeStore, cli_here: Cli, grace: str) -> None:
    """A usage error, before anything is opened."""
    refused = cli_here("gc", "s3://nowhere/run", f"--grace={grace}")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--grace" in refused.stderr
