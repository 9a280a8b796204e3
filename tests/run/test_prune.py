"""`prune` through the command line: what is planned, what goes, what always stays."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.base import BucketFacts
from ckptmgr.backends.local import LocalBackend
from ckptmgr.core.manifest import Manifest, decode_manifest, encode_manifest
from ckptmgr.core.selectors import parse_selector
from ckptmgr.run import locks
from ckptmgr.run.directory import RunDirectory
from ckptmgr.testing.stores import Store

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]


def document(result: Result) -> dict[str, Any]:
    """What `prune --json` says; the exit code and the shape are asserted."""
    assert result.returncode == 0, result.stderr
    said: dict[str, Any] = json.loads(result.stdout)
    assert said.keys() == {"keep", "delete", "freed_bytes"}
    for item in [*said["keep"], *said["delete"]]:
        assert item.keys() == {"id", "step", "reasons"}
        assert item["reasons"]
    return said


def kept(result: Result) -> dict[int, list[str]]:
    """The steps that stay, with the reasons."""
    return {item["step"]: item["reasons"] for item in document(result)["keep"]}


def deleted(result: Result) -> list[int]:
    return [item["step"] for item in document(result)["delete"]]


def data_of(store: Store, stem: str) -> dict[str, bytes]:
    return store.snapshot(f"run/checkpoints/{stem}/")


@pytest.fixture
def url(make_store: MakeStore, push_steps: PushSteps) -> str:
    """A local run with the steps 100 to 500: losses 0.5, 0.1, NaN, 0.1, 0.9; 500 has an accuracy as well."""
    run = f"{make_store('local').url}/run"
    for step, loss in ((100, "0.5"), (200, "0.1"), (300, "nan"), (400, "0.1"), (500, "0.9")):
        more = ["--metric", "accuracy=0.7"] if step == 500 else []
        push_steps(run, step, options=["--metric", f"eval_loss={loss}", *more])
    return run


# --- plan and deed ------------------------------------------------------------------------------------------------------


def test_plan_changes_nothing_and_yes_does_it(store: Store, push_steps: PushSteps, cli_here: Cli) -> None:
    """Without --yes a plan; with it exactly that, closing records in the place of manifests; what stays is untouched."""
    run = f"{store.url}/run"
    first, second, third = push_steps(run, 100, 200, 300)
    before = store.snapshot()
    plan = document(cli_here("prune", run, "--keep-last", "1", "--json"))
    assert plan == {
        "keep": [{"id": third, "step": 300, "reasons": ["last:1", "newest"]}],
        "delete": [
            {"id": first, "step": 100, "reasons": ["no rule keeps it"]},
            {"id": second, "step": 200, "reasons": ["no rule keeps it"]},
        ],
        "freed_bytes": 1002 + 100 + 1002 + 200,
    }
    assert store.snapshot() == before

    done = cli_here("prune", run, "--keep-last", "1", "--yes", "--json")
    assert document(done) == plan
    after = store.snapshot()
    for stem in (first, second):
        assert data_of(store, stem) == {}
        assert json.loads(store.get(f"run/manifests/{stem}.json"))["closed"] == "pruned"
    untouched = {key: value for key, value in before.items() if first not in key and second not in key}
    assert {key: after[key] for key in untouched} == untouched
    assert [row["id"] for row in json.loads(cli_here("ls", run, "--all", "--json").stdout)["checkpoints"]] == [third]
    assert document(cli_here("prune", run, "--keep-last", "1", "--yes", "--json"))["delete"] == []


def test_plan_for_people(url: str, cli_here: Cli) -> None:
    """A row per checkpoint with what becomes of it and why, and how to do it; afterwards what was done."""
    plan = cli_here("prune", url, "--keep-last", "2", "--keep-best", "eval_loss")
    rows = [line.split() for line in plan.stdout.splitlines()[2:-1]]
    assert [(row[0], row[1]) for row in rows] == [
        ("remove", "100"),
        ("keep", "200"),
        ("remove", "300"),
        ("keep", "400"),
        ("keep", "500"),
    ]
    assert plan.stdout.splitlines()[-1].startswith(f"{url}: would remove 2 of 5 and free 2.4 kB; add --yes")
    done = cli_here("prune", url, "--keep-last", "2", "--keep-best", "eval_loss", "--yes")
    assert done.stdout.splitlines()[-1] == f"{url}: removed 2, kept 3, freed 2.4 kB"
    assert [line for line in done.stderr.splitlines() if line.startswith("removing step")] != []
    again = cli_here("prune", url, "--keep-last", "2", "--keep-best", "eval_loss", "--yes")
    assert again.stdout.splitlines()[-1] == f"{url}: removed 0, kept 3, freed 0 B"


# --- rules --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "keep"),
    [
        (["--keep-last", "2"], [400, 500]),
        (["--keep-last", "99"], [100, 200, 300, 400, 500]),
        (["--keep-best", "eval_loss"], [200, 500]),
        (["--keep-best", "eval_loss:min:2"], [200, 400, 500]),
        (["--keep-best", "eval_loss:max"], [500]),
        (["--keep-best", "eval_loss:max:2"], [100, 500]),
        (["--keep-worst", "eval_loss"], [500]),
        (["--keep-worst", "eval_loss:min:2"], [100, 500]),
        (["--keep-worst", "eval_loss:max:2"], [200, 400, 500]),
        (["--keep-every", "200"], [200, 400, 500]),
        (["--keep-within", "1h"], [100, 200, 300, 400, 500]),
        (["--keep-last", "1", "--keep-best", "eval_loss", "--keep-worst", "eval_loss:min:2"], [100, 200, 500]),
        (["--keep-best", "eval_loss", "--keep-best", "accuracy:max"], [200, 500]),
        (["--keep-every", "300", "--keep-last", "1"], [300, 500]),
    ],
)
def test_rules_add_up(url: str, cli_here: Cli, rules: list[str], keep: list[int]) -> None:
    """What any rule keeps stays, and the newest; ties go to the earlier step, NaN never wins."""
    planned = kept(cli_here("prune", url, *rules, "--json"))
    assert list(planned) == keep
    assert "newest" in planned[500]


def test_every_decision_has_all_its_reasons(url: str, cli_here: Cli) -> None:
    """A checkpoint that several rules keep says so."""
    planned = cli_here("prune", url, "--keep-last", "2", "--keep-every", "400", "--keep-worst", "eval_loss", "--json")
    assert kept(planned) == {400: ["last:2", "every:400"], 500: ["last:2", "worst:eval_loss", "newest"]}


def test_within(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """By the age in the record, whatever the unit; one without a time stays."""
    store = make_store("local")
    stems = push_steps(f"{store.url}/run", 1, 2, 3, 4)
    now = datetime.now(timezone.utc)
    for stem, age in zip(stems, (timedelta(days=8), timedelta(days=6), None, timedelta(0)), strict=True):
        key = f"run/manifests/{stem}.json"
        manifest = decode_manifest(store.get(key), where=key)
        assert isinstance(manifest, Manifest)
        created = None if age is None else (now - age).isoformat().replace("+00:00", "Z")
        fields = {name: getattr(manifest, name) for name in manifest.__dataclass_fields__}
        store.put(key, encode_manifest(Manifest(**{**fields, "created_at": created})))
    for within, keep in (
        ("7d", [2, 3, 4]),
        ("1w", [2, 3, 4]),
        ("168h", [2, 3, 4]),
        ("5.5d", [3, 4]),
        ("9d", [1, 2, 3, 4]),
    ):
        assert list(kept(cli_here("prune", f"{store.url}/run", "--keep-within", within, "--json"))) == keep


@pytest.mark.parametrize("kind", ["moto", "oss"])
def test_a_clock_that_is_ahead_makes_nothing_old(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """This machine's clock is a year ahead: the plan and what is done go by the store's, and nothing of the question stays there."""
    store = make_store(kind)
    push_steps(f"{store.url}/run", 100, 200, 300)
    later = datetime.now(timezone.utc) + timedelta(days=365)
    monkeypatch.setattr("ckptmgr.run.prune.utc_now", lambda: later)
    words = ("prune", f"{store.url}/run", "--keep-within", "7d", "--json")
    before = store.snapshot()
    assert deleted(cli_here(*words)) == []
    assert deleted(cli_here(*words, "--yes")) == []
    assert store.snapshot() == before


def test_unknown_metric_is_reported_and_blocks_nothing(url: str, cli_here: Cli) -> None:
    """With another rule that keeps something, a metric nobody has is a warning that names those there are."""
    result = cli_here("prune", url, "--keep-last", "1", "--keep-best", "bleu:max", "--json")
    assert list(kept(result)) == [500]
    assert "'bleu'" in result.stderr
    assert "accuracy, eval_loss" in result.stderr


# --- what always stays --------------------------------------------------------------------------------------------------


def test_tagged_ones_stay(store: Store, push_steps: PushSteps, cli_here: Cli) -> None:
    """Every tag that points to it is a reason."""
    run = f"{store.url}/run"
    (tagged,) = push_steps(run, 100, options=["--tag", "best"])
    push_steps(run, 100, options=["--tag", "released"])
    push_steps(run, 200, 300)
    data = data_of(store, tagged)
    done = cli_here("prune", run, "--keep-last", "1", "--yes", "--json")
    assert kept(done) == {100: ["tag:best", "tag:released"], 300: ["last:1", "newest"]}
    assert deleted(done) == [200]
    assert data_of(store, tagged) == data != {}


def test_tag_set_in_the_last_moment_holds(url: str, cli_here: Cli) -> None:
    """Tags are read again before each deletion: one that was not there when it was planned keeps its checkpoint, with that reason."""
    run = RunDirectory.open(url)
    stem = run.history().choose(parse_selector("100")).stem
    real, calls = RunDirectory.tags, []

    def tags(self: RunDirectory) -> dict[str, Any]:
        calls.append(1)
        if len(calls) == 1:  # the plan was made with what the history said
            run.tag("keep-me", stem)
        return real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "tags", tags)
        done = cli_here("prune", url, "--keep-last", "1", "--yes", "--json")
    assert kept(done) == {500: ["last:1", "newest"], 100: ["tag:keep-me"]}
    assert deleted(done) == [200, 300, 400]
    assert "keep-me" in done.stderr


def test_one_that_is_read_on_this_machine_stays(url: str, cli_here: Cli) -> None:
    """It goes the next time; both outputs say why it stayed."""
    run = RunDirectory.open(url)
    stem = run.history().choose(parse_selector("100")).stem
    with locks.reading(run.uuid, stem):
        done = cli_here("prune", url, "--keep-last", "1", "--yes", "--json")
    assert kept(done) == {500: ["last:1", "newest"], 100: ["in use by a reader"]}
    assert deleted(done) == [200, 300, 400]
    assert deleted(cli_here("prune", url, "--keep-last", "1", "--yes", "--json")) == [100]


def test_a_best_one_that_is_damaged_stands_for_nothing(store: Store, push_steps: PushSteps, cli_here: Cli) -> None:
    """The next best stays with it, in the plan and in the deed: nobody needs to have looked before."""
    run = f"{store.url}/run"
    stems = [
        push_steps(run, step, options=["--metric", f"eval_loss={loss}"])[0]
        for step, loss in ((100, 0.1), (200, 0.2), (300, 0.3), (400, 0.4))
    ]
    for stem in stems[:2]:
        store.delete(next(iter(data_of(store, stem))))
    rule = ("--keep-best", "eval_loss:min:1")
    expected = {100: ["best:eval_loss", "damaged: not counted"], 300: ["best:eval_loss"], 400: ["newest"]}
    assert kept(cli_here("prune", run, *rule, "--json")) == expected
    assert deleted(cli_here("prune", run, *rule, "--yes", "--json")) == [200]
    assert cli_here("verify", run, "300").returncode == 0


def test_what_was_seen_damaged_counts_for_no_rule(url: str, cli_here: Cli) -> None:
    """--keep-last as well; once it is whole again, it counts."""
    run = RunDirectory.open(url)
    stem = run.history().choose(parse_selector("400")).stem
    (victim, *_) = sorted(Path(run.path(f"checkpoints/{stem}")).iterdir())
    data = victim.read_bytes()
    victim.write_bytes(b"")
    assert cli_here("verify", url).returncode == 5
    assert list(kept(cli_here("prune", url, "--keep-last", "2", "--json"))) == [300, 400, 500]
    victim.write_bytes(data)
    assert cli_here("verify", url).returncode == 0
    assert list(kept(cli_here("prune", url, "--keep-last", "2", "--json"))) == [400, 500]


def test_lineages(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """What a rewind left behind, and what the present attempt resumed from, stay; --all-lineages asks for the first, never for the second."""
    store = make_store("local")
    run = f"{store.url}/run"
    first, second, third = push_steps(run, 100, 200, 300)
    record = {"format": "ckptmgr", "version": 1, "attempt": 2, "how": "explicit", "parent": second, "previous": 1}
    store.put("run/attempts/000002.json", json.dumps(record).encode())
    fourth, fifth = push_steps(run, 250, 260)
    expected = {200: ["resumed from"], 260: ["last:1", "newest"]}
    assert kept(cli_here("prune", run, "--keep-last", "1", "--json")) == {**expected, 300: ["another lineage"]}
    done = cli_here("prune", run, "--keep-last", "1", "--all-lineages", "--yes", "--json")
    assert kept(done) == expected
    assert [item["id"] for item in document(done)["delete"]] == [first, third, fourth]
    assert data_of(store, second) != {}
    assert data_of(store, fifth) != {}


def test_k055_data_without_a_manifest_is_untouched(store: Store, push_steps: PushSteps, cli_here: Cli) -> None:
    """A directory copied by hand, an upload that is under way, other files in the run, other runs: none of prune's business, whatever the options."""
    run = f"{store.url}/run"
    *_, unfinished, newest = push_steps(run, 100, 150, 200)
    push_steps(f"{store.url}/run2", 100)
    store.delete(f"run/manifests/{unfinished}.json")
    store.put("run/checkpoints/checkpoint-100/model.bin", b"copied by hand")
    store.put("run/checkpoint-50/model.bin", b"copied by hand")
    store.put("run/manifests/notes.txt", b"mine")
    store.put("other/file", b"mine")
    before = store.snapshot()
    done = cli_here("prune", run, "--keep-last", "1", "--keep-within", "1s", "--all-lineages", "--yes", "--json")
    assert deleted(done) in ([100], [])
    after = store.snapshot()
    gone = {key for key in before if before[key] != after.get(key)}
    assert all("-000000000100-" in key for key in gone)
    listed = json.loads(cli_here("ls", run, "--json").stdout)["checkpoints"]
    states = {row["id"]: row["state"] for row in listed}
    assert states["checkpoint-100"] == states["checkpoint-50"] == "foreign"
    assert (states[unfinished], states[newest]) == ("uncommitted", "committed")
    # The way in for what was copied by hand.
    assert cli_here("push", "trained/checkpoint-100", run).returncode == 0


def test_local_tier_is_not_pruned(url: str, cli_here: Cli) -> None:
    """What is only in the queue of uploads may be the only copy there is (I6): refused (2), nothing deleted."""
    root = Path(url.removeprefix("file://"))
    (root / "uploads").mkdir()
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    for yes in ([], ["--yes"]):
        refused = cli_here("prune", url, "--keep-last", "1", *yes)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "local tier" in refused.stderr
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("facts", "said"), [({"noncurrent_days": 3}, "for 3 days"), ({}, "until a rule")])
def test_a_bucket_that_keeps_versions(
    url: str, cli_here: Cli, monkeypatch: pytest.MonkeyPatch, facts: dict[str, int], said: str
) -> None:
    """There deleting frees nothing at once: plan and deed say so, unless nothing is deleted."""
    kept_by_bucket = BucketFacts(versioning="enabled", **facts)  # type: ignore[arg-type]
    monkeypatch.setattr(LocalBackend, "bucket_facts", lambda self, path: kept_by_bucket)
    for yes in ([], ["--yes"]):
        told = cli_here("prune", url, "--keep-last", "1", *yes)
        (line,) = (line for line in told.stderr.splitlines() if line.startswith("ckptmgr: warning: "))
        assert said in line
    assert cli_here("prune", url, "--keep-last", "1").stderr == ""


def test_empty_run(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """A run without checkpoints has nothing to remove: exit 0."""
    store = make_store("local")
    (stem,) = push_steps(f"{store.url}/run", 100)
    for key in store.keys("run/"):
        if stem in key:
            store.delete(key)
    result = cli_here("prune", f"{store.url}/run", "--keep-last", "1", "--yes", "--json")
    assert document(result) == {"keep": [], "delete": [], "freed_bytes": 0}
    assert (
        cli_here("prune", f"{store.url}/run", "--keep-best", "eval_loss").stdout
        == f"{store.url}/run: nothing to remove\n"
    )


def test_a_removal_that_ended_is_not_finished_again(store: Store, push_steps: PushSteps, cli_here: Cli) -> None:
    """Also where the store still lists the folders of what was removed; one that was interrupted is."""
    url = f"{store.url}/run"
    stems = push_steps(url, 100, 200, 300)
    words = ("prune", url, "--keep-last", "1", "--yes")
    assert cli_here(*words).returncode == 0
    again = cli_here(*words)
    assert (again.returncode, "interrupted" in again.stderr) == (0, False)
    store.put(f"run/checkpoints/{stems[0]}/left.bin", b"1")
    assert f"finished the interrupted removal of {stems[0]}\n" in cli_here(*words).stderr
    assert store.keys("run/checkpoints/") == store.keys(f"run/checkpoints/{stems[2]}/")
