"""Manifests cached on disk: what is known is not read again, and nothing is believed that the store does not list now."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.errors import BackendError, ManifestError
from ckptmgr.core.history import History
from ckptmgr.core.layout import Stem, attempt_key, data_key, manifest_key, tag_key
from ckptmgr.core.manifest import ClosingRecord, FileEntry, Manifest, decode_manifest, encode_closing, encode_manifest
from ckptmgr.core.records import (
    AttemptRecord,
    RunRecord,
    TagRecord,
    decode_tag,
    encode_attempt,
    encode_run,
    encode_tag,
)
from ckptmgr.core.retention import KeepLast
from ckptmgr.core.selectors import parse_selector
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.prune import prune
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.stores import Store

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]


UUID = "5f0c5f0c-0000-4000-8000-000000000000"
# Where ETags come from matters to these; all others go by one dialect.
both = pytest.mark.parametrize("store", ["moto", "oss"], indirect=True)


@pytest.fixture(params=["oss"])
def store(request: pytest.FixtureRequest, make_store: MakeStore) -> Store:
    """A dialect that logs what it is asked."""
    return make_store(request.param)


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own; where the files of the runs are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ckptmgr" / "runs"


def commit(
    store: Store, step: int, *, run: str = "run", uuid: str = UUID, metrics: Mapping[str, float] | None = None
) -> Stem:
    """What a commit of attempt 1 leaves in the store."""
    stem = Stem(1, step, step // 100, f"{step:08x}")
    data = b"w" * step
    entry = FileEntry.of("model.bin", digest_bytes(data))
    manifest = Manifest(
        stem=stem,
        run_uuid=uuid,
        files=(entry, FileEntry.of("sub/empty", digest_bytes(b""))),
        created_at="2026-01-01T00:00:00.000Z",
        metrics=metrics or {},
        producer={"framework": "test"},
    )
    for path, content in (("model.bin", data), ("sub/empty", b"")):
        store.put(f"{run}/{data_key(stem, path)}", content)
    store.put(f"{run}/{manifest_key(stem)}", encode_manifest(manifest))
    return stem


@pytest.fixture
def url(store: Store) -> str:
    """A run of the checkpoints 100, 200 and 300, of which 100 is tagged."""
    store.put("run/run.json", encode_run(RunRecord(uuid=UUID)))
    store.put(f"run/{attempt_key(1)}", encode_attempt(AttemptRecord(number=1, how="auto")))
    first, *_ = (
        commit(store, 100, metrics={"eval_loss": 0.5}),
        commit(store, 200, metrics={"eval_loss": inf}),
        commit(store, 300),
    )
    store.put(f"run/{tag_key('good')}", encode_tag(TagRecord(tag="good", stem=first)))
    return f"{store.url}/run"


@pytest.fixture
def reads(store: Store) -> Callable[[], list[str]]:
    """The folders of the run that something was read from since it was last asked, run.json aside: `["manifests", "tags"]`."""
    seen = 0

    def since() -> list[str]:
        nonlocal seen
        log = store.server.log
        new, seen = log[seen:], len(log)
        keys = [request.key.removeprefix("exp/run/") for request in new if request.method == "GET" and request.key]
        return sorted(key.split("/")[0] for key in keys if "/" in key)

    return since


def look(url: str) -> History:
    """As a process that begins now."""
    return RunDirectory.open(url).history()


def fresh(url: str) -> History:
    """What the store itself says."""
    return RunDirectory.open(url).history(cached=False)


def stems(history: History) -> list[int]:
    return [stem.step for stem in history.manifests]


# --- what is known is not read again --------------------------------------------------------------------------------------


@both
def test_a_second_look_reads_nothing_but_listings(url: str, reads: Callable[[], list[str]], caches: Path) -> None:
    """Neither manifests nor attempts nor tags; and it says the very same."""
    reads()
    first = look(url)
    assert reads() == ["attempts", "manifests", "manifests", "manifests", "tags"]
    second = look(url)
    assert reads() == []
    assert second == first == fresh(url)
    assert [manifest.files[0].path for manifest in second.manifests.values()] == ["model.bin"] * 3


def test_only_what_is_new_is_read(url: str, store: Store, reads: Callable[[], list[str]]) -> None:
    """One commit of another machine costs one read."""
    look(url)
    commit(store, 400)
    reads()
    assert stems(look(url)) == [100, 200, 300, 400]
    assert reads() == ["manifests"]


def test_listing_through_the_command_line_is_cached(url: str, cli_here: Cli, reads: Callable[[], list[str]]) -> None:
    """`ls`, `show`, `prune` (the plan) and `resume` of what is not there share what they have read."""
    look(url)
    reads()
    listed = json.loads(cli_here("ls", url, "--json").stdout)["checkpoints"]
    assert [(row["step"], row["metrics"], row["tags"], row["files"]) for row in listed] == [
        (100, {"eval_loss": 0.5}, ["good"], 2),
        (200, {"eval_loss": "Infinity"}, [], 2),
        (300, {}, [], 2),
    ]
    assert cli_here("show", url, "100").returncode == 0
    assert cli_here("prune", url, "--keep-last", "1").returncode == 0
    assert cli_here("resume", url, "999").returncode == 3
    assert reads() == []


# --- nothing is believed without the listing of now ------------------------------------------------------------------------


@both
def test_a_commit_of_another_process_is_seen_at_the_next_call(url: str, store: Store) -> None:
    """K112: in a process that has looked before, and again after the commit was removed."""
    run = RunDirectory.open(url)
    assert stems(run.history()) == [100, 200, 300]
    new = commit(store, 400)
    assert run.history().newest() == new
    store.delete(f"run/{manifest_key(new)}")
    assert stems(run.history()) == [100, 200, 300]
    assert stems(look(url)) == [100, 200, 300]


@both
def test_a_checkpoint_that_was_closed_is_not_offered_any_more(url: str, store: Store) -> None:
    """A closing record stands at the very key of the manifest that is cached."""
    history = look(url)
    stem = history.chain()[0]
    store.put(f"run/{manifest_key(stem)}", encode_closing(ClosingRecord(stem=stem, closed="pruned", closed_at="now")))
    for _ in range(2):
        again = look(url)
        assert stems(again) == [100, 200]
        assert again.closed == {stem: ClosingRecord(stem=stem, closed="pruned", closed_at="now")}
        assert again == fresh(url)


def test_pruning_and_looking_agree(url: str, cli_here: Cli) -> None:
    """Through the command line: what prune removes is gone for who has it cached."""
    look(url)
    assert cli_here("prune", url, "--keep-last", "1", "--yes").returncode == 0
    assert stems(look(url)) == [100, 300]  # 100 is tagged
    assert look(url) == fresh(url)


@both
def test_a_tag_that_was_moved_points_where_it_points_now(url: str, store: Store) -> None:
    """K126: the new record is as long as the old one."""
    first, second, _ = look(url).manifests
    assert look(url).tags == {"good": first}
    old = store.get(f"run/{tag_key('good')}")
    new = encode_tag(replace(decode_tag(old, where="good"), stem=second))
    assert len(new) == len(old)
    store.put(f"run/{tag_key('good')}", new)
    assert look(url).tags == {"good": second}
    store.delete(f"run/{tag_key('good')}")
    assert look(url).tags == {}


def test_a_claim_of_another_process_counts_at_once(url: str, store: Store) -> None:
    """An explicit rewind changes what is newest, with no new manifest at all."""
    first = next(iter(look(url).manifests))
    claim = AttemptRecord(number=2, how="explicit", parent=first, previous=1)
    store.put(f"run/{attempt_key(2)}", encode_attempt(claim))
    for _ in range(2):
        assert look(url).newest() == first
        assert look(url).attempts[2] == claim


def test_a_run_made_anew_under_the_same_name_is_another_run(url: str, store: Store) -> None:
    """Even if a manifest of the old one lies there again, byte for byte under its old key, it is a foreign one."""
    history = look(url)
    stem = next(iter(history.manifests))
    data = store.get(f"run/{manifest_key(stem)}")
    for key in store.keys("run/"):
        store.delete(key)
    store.put("run/run.json", encode_run(RunRecord(uuid="11111111-0000-0000-0000-000000000000")))
    store.put(f"run/{manifest_key(stem)}", data)
    again = look(url)
    assert again.manifests == {}
    assert set(again.broken) == {stem}
    assert "belongs to another checkpoint or run" in str(again.broken[stem])


def test_an_etag_that_comes_again_is_not_enough(
    url: str, store: Store, monkeypatch: pytest.MonkeyPatch, reads: Callable[[], list[str]]
) -> None:
    """A store whose ETags are less than they should be: as soon as the size or the time is another, the record is read."""
    look(url)
    listing = RunDirectory.records
    changes: dict[str, Any] = {}

    def records(run: RunDirectory, folder: str) -> dict[str, dict[str, Any]]:
        found = listing(run, folder)
        return {key: {**record, **changes} for key, record in found.items()} if folder == "manifests" else found

    monkeypatch.setattr(RunDirectory, "records", records)
    reads()
    for change in ({"mtime": 1.0}, {"size": 1}, {"etag": "x"}, {"etag": ""}, {"etag": 'W/"x"'}):
        changes = change
        assert stems(look(url)) == [100, 200, 300]
        assert reads() == ["manifests"] * 3, change


def test_what_is_not_what_was_listed_is_not_kept(
    url: str, store: Store, monkeypatch: pytest.MonkeyPatch, caches: Path
) -> None:
    """A read that is older than the listing (a cache between us and the store): it is used, as ever, but not remembered."""
    history = look(url)
    stem = history.chain()[0]
    old = store.get(f"run/{manifest_key(stem)}")
    store.put(f"run/{manifest_key(stem)}", encode_closing(ClosingRecord(stem=stem, closed="pruned")))
    read = RunDirectory.read
    with monkeypatch.context() as between:
        between.setattr(RunDirectory, "read", lambda run, key: old if str(stem) in key else read(run, key))
        assert stems(look(url)) == [100, 200, 300]
    assert stems(look(url)) == [100, 200]


def test_a_stale_tag_is_not_kept(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, where the size tells nothing."""
    first, second, _ = look(url).manifests
    old = store.get(f"run/{tag_key('good')}")
    store.put(f"run/{tag_key('good')}", encode_tag(TagRecord(tag="good", stem=second)))
    read = RunDirectory.read
    with monkeypatch.context() as between:
        between.setattr(RunDirectory, "read", lambda run, key: old if key.startswith("tags/") else read(run, key))
        assert look(url).tags == {"good": first}
    assert look(url).tags == {"good": second}


def test_a_manifest_that_cannot_be_read_is_read_again_each_time(url: str, store: Store) -> None:
    """Damage is never cached: repaired under the same key it is a checkpoint again."""
    stem = look(url).chain()[0]
    good = store.get(f"run/{manifest_key(stem)}")
    store.put(f"run/{manifest_key(stem)}", good[:-30])
    for _ in range(2):
        assert set(look(url).broken) == {stem}
    store.put(f"run/{manifest_key(stem)}", good)
    assert look(url).broken == {}


# --- commands that must not go by the cache ---------------------------------------------------------------------------------


@pytest.fixture
def rotten(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> Stem:
    """The newest checkpoint, whose manifest rots in the store while the listing says what it said."""
    run = RunDirectory.open(url)
    stem = run.history().chain()[0]
    before = run.records("manifests")
    data = store.get(f"run/{manifest_key(stem)}")
    store.put(f"run/{manifest_key(stem)}", data.replace(b'"size_bytes": 3', b'"size_bytes": 2'))
    listing = RunDirectory.records
    monkeypatch.setattr(
        RunDirectory, "records", lambda run, folder: before if folder == "manifests" else listing(run, folder)
    )
    assert look(url).broken == {}
    assert set(fresh(url).broken) == {stem}
    return stem


def test_verify_reads_the_manifests_that_are_there(url: str, rotten: Stem, cli_here: Cli) -> None:
    """All of them, whatever is known from before."""
    done = cli_here("verify", url, "--json")
    assert done.returncode == 5
    assert [found["id"] for found in json.loads(done.stdout)["damaged"]] == [str(rotten)]
    assert cli_here("ls", url, "--check", "--json").stdout.count('"damaged"') == 1


def test_prune_deletes_nothing_when_the_newest_has_rotted(url: str, rotten: Stem, cli_here: Cli, store: Store) -> None:
    """I8: its manifest included."""
    before = store.snapshot()
    done = cli_here("prune", url, "--keep-last", "1", "--yes")
    assert done.returncode == 5
    assert str(rotten) in done.stderr
    assert store.snapshot() == before


# --- a cache that is not there, or not right ---------------------------------------------------------------------------------


def the_file(caches: Path) -> Path:
    (path,) = caches.iterdir()
    return path


def test_a_damaged_cache_is_as_good_as_none(
    url: str, caches: Path, reads: Callable[[], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    """It is ignored, said to nobody, and written again."""
    before = look(url)
    whole = the_file(caches).read_bytes()
    for damaged in (b"", whole[:48], whole[:-1], whole[:-9] + b"?" + whole[-8:], b"x" + whole[1:]):
        the_file(caches).write_bytes(damaged)
        reads()
        assert look(url) == before
        assert reads().count("manifests") == 3
        assert look(url) == before
        assert reads() == []
    assert capfd.readouterr() == ("", "")


def test_a_cache_of_another_run_is_not_taken(url: str, caches: Path, store: Store) -> None:
    """Put in its place by hand."""
    before = look(url)
    mine = the_file(caches)
    store.put("run2/run.json", encode_run(RunRecord(uuid="11111111-0000-0000-0000-000000000000")))
    commit(store, 700, run="run2", uuid="11111111-0000-0000-0000-000000000000")
    look(f"{store.url}/run2")
    (other,) = set(caches.iterdir()) - {mine}
    mine.write_bytes(other.read_bytes())
    assert look(url) == before


def test_a_cache_of_somebody_else_is_not_taken(
    url: str, caches: Path, monkeypatch: pytest.MonkeyPatch, reads: Callable[[], list[str]]
) -> None:
    """In a directory that others can write to, their word is not the store's."""
    before = look(url)
    reads()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert look(url) == before
    assert reads().count("manifests") == 3


@pytest.mark.parametrize("home", ["a file", "not writable", "full"])
def test_without_a_place_for_it_everything_works_in_silence(
    url: str,
    home: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli_here: Cli,
    disk_of: Callable[..., Path],
) -> None:
    """A home directory that is read-only, full, or none."""
    place = tmp_path / "home"
    if home == "a file":
        place.write_bytes(b"")
    elif home == "full":
        place = disk_of(64)
        with contextlib.suppress(OSError), (place / "ballast").open("wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(512))
    else:
        place = Path("/proc/self")  # where not even root makes a directory
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    for _ in range(2):
        listed = cli_here("ls", url)
        assert (listed.returncode, listed.stderr) == (0, "")
        assert "3 checkpoints" in listed.stdout
    if home == "full":
        assert [path.name for path in place.rglob("*") if path.is_file()] == ["ballast"]


def test_a_store_without_etags_is_not_cached(make_store: MakeStore, push_steps: PushSteps, caches: Path) -> None:
    """A disk: its listings cost as much as its reads."""
    url = f"{make_store('local').url}/run"
    push_steps(url, 100)
    look(url)
    assert not caches.exists()


def test_the_file_is_for_its_owner_alone_and_holds_no_credentials(url: str, caches: Path, store: Store) -> None:
    """Mode 0600 in a directory of mode 0700, whatever the umask."""
    look(url)
    path = the_file(caches)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(caches.stat().st_mode) == 0o700
    data = path.read_bytes()
    for name, value in store.env.items():
        if "KEY" in name or "SECRET" in name or "TOKEN" in name:
            assert value.encode() not in data, name


# --- interrupted and concurrent ---------------------------------------------------------------------------------------------


def test_what_was_read_before_a_failure_is_kept(
    url: str, store: Store, caches: Path, reads: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long first look that fails, or is interrupted, does not begin anew."""
    stem = fresh(url).chain()[0]
    monkeypatch.setattr("ckptmgr.run.directory._READERS", 1)
    with (
        store.server.faults.injected(Fault(method="GET", key=f"*{stem}*", status=403, code="AccessDenied", times=None)),
        pytest.raises(BackendError),
    ):
        look(url)
    reads()
    assert stems(look(url)) == [100, 200, 300]
    assert reads().count("manifests") == 1


def test_processes_that_look_at_once_leave_a_whole_file(url: str, caches: Path, reads: Callable[[], list[str]]) -> None:
    """The last one wins; nobody reads half of it, and no temporary file stays."""
    look(url)
    path = the_file(caches)
    path.unlink()
    outcomes: list[History] = []
    start = threading.Barrier(4)

    def one() -> None:
        start.wait(60)
        for _ in range(3):
            outcomes.append(look(url))
            path.unlink(missing_ok=True)
            outcomes.append(look(url))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == [fresh(url)] * 24
    assert list(caches.iterdir()) in ([path], [])
    look(url)
    reads()
    look(url)
    assert reads() == []


def test_a_broken_record_is_told_as_without_a_cache(url: str, store: Store) -> None:
    """A tag that cannot be read must not make its checkpoint look untagged, now or at the next look: nothing is deleted then."""
    look(url)
    store.put(f"run/{tag_key('good')}", b"{}")
    for _ in range(2):
        history = look(url)
        assert (history.tags, [*history.unreadable]) == ({}, [tag_key("good")])
        with pytest.raises(ManifestError, match="not a ckptmgr record"):
            history.choose(parse_selector("tag:good"))
        with pytest.raises(ManifestError, match="not certain what must stay"):
            prune(RunDirectory.open(url), KeepLast(1))


def test_the_manifests_that_are_kept_are_those_of_the_store(url: str, store: Store) -> None:
    """Field by field, files included."""
    look(url)
    for stem, manifest in look(url).manifests.items():
        stored = decode_manifest(store.get(f"run/{manifest_key(stem)}"), where="x")
        assert repr(manifest) == repr(stored)
