"""`ls` and `show`: what a run and a store hold, in exact shapes for scripts and in tables for people."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.cli.tables import Column, Table
from ckptmgr.core.layout import Stem, manifest_key
from ckptmgr.core.manifest import Manifest, encode_manifest
from ckptmgr.core.records import RunRecord, encode_run
from ckptmgr.testing.stores import Store

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]
MakeCheckpoint = Callable[..., Path]


def strict(text: str) -> Any:
    """The one JSON document that `text` is; NaN and Infinity are not JSON."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def attempt(store: Store, number: int, how: str, parent: str | None = None) -> None:
    """Claim an attempt of `run` as a restarted training would."""
    record = {"format": "ckptmgr", "version": 1, "attempt": number, "how": how, "parent": parent}
    store.put(f"run/attempts/{number:06d}.json", json.dumps(record).encode())


# --- a run --------------------------------------------------------------------------------------------------------------


def test_ls_of_a_run_as_json(store: Store, push_steps: PushSteps, cli_here: Cli) -> None:
    """Exactly the documented fields, oldest first; a metric that is no number is a string."""
    url = f"{store.url}/run"
    (first,) = push_steps(url, 100, options=["--metric", "eval_loss=nan", "--metric", "lr=inf", "--tag", "good"])
    (second,) = push_steps(url, 1000, options=["--metric", "eval_loss=0.25"])
    listed = cli_here("ls", url, "--json")
    assert (listed.returncode, listed.stderr) == (0, "")
    document = strict(listed.stdout)
    assert document.keys() == {"run", "checkpoints"}
    assert document["run"] == url
    for row in document["checkpoints"]:
        stamp = row.pop("created_at")
        assert len(stamp) == 24
        assert stamp.endswith("Z")
    common = {"epoch": None, "attempt": 1, "state": "committed", "lineage": "current", "files": 2, "reasons": ["push"]}
    assert document["checkpoints"] == [
        {
            "id": first,
            "step": 100,
            "size_bytes": 1002 + 100,
            "metrics": {"eval_loss": "NaN", "lr": "Infinity"},
            "tags": ["good"],
            **common,
        },
        {"id": second, "step": 1000, "size_bytes": 1003 + 1000, "metrics": {"eval_loss": 0.25}, "tags": [], **common},
    ]


def test_order_is_by_number(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """Oldest first: 9, 10, 100, 1000, whatever order they came in as words."""
    url = f"{make_store('local').url}/run"
    push_steps(url, 9, 10, 100, 1000)
    assert [row["step"] for row in strict(cli_here("ls", url, "--json").stdout)["checkpoints"]] == [9, 10, 100, 1000]


def test_abandoned_lineages(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """What a rewind left behind is shown with --all only, and as abandoned."""
    store = make_store("local")
    url = f"{store.url}/run"
    first, second = push_steps(url, 100, 200)
    attempt(store, 2, "explicit", parent=first)
    (third,) = push_steps(url, 150)

    def rows(*options: str) -> list[tuple[str, str]]:
        document = strict(cli_here("ls", url, "--json", *options).stdout)
        return [(row["id"], row["lineage"]) for row in document["checkpoints"]]

    assert rows() == [(first, "current"), (third, "current")]
    assert rows("--all") == [(first, "current"), (second, "abandoned"), (third, "current")]
    head, *table = cli_here("ls", url, "--all").stdout.splitlines()
    assert [second in line for line in table if "abandoned" in line] == [True]
    assert "newest: step 150" in head


def test_folders_of_what_is_gone_are_nothing(store: Store, push_steps: PushSteps, cli_here: Cli) -> None:
    """A store may list the folder of keys that were deleted (SeaweedFS does): that is no data, and a run of nothing else has none."""
    url = f"{store.url}/run"
    wiped, kept = push_steps(url, 100, 200)
    for key in [*store.keys(f"run/checkpoints/{wiped}/"), f"run/manifests/{wiped}.json"]:
        store.delete(key)
    rows = strict(cli_here("ls", url, "--json").stdout)["checkpoints"]
    assert [(row["id"], row["state"]) for row in rows] == [(kept, "committed")]
    for key in [*store.keys(f"run/checkpoints/{kept}/"), f"run/manifests/{kept}.json"]:
        store.delete(key)
    assert strict(cli_here("ls", url, "--json").stdout)["checkpoints"] == []
    started = cli_here("resume", url, "--or-start")
    assert (started.returncode, started.stdout) == (0, "")


def test_uncommitted_and_foreign_data(store: Store, push_steps: PushSteps, cli_here: Cli) -> None:
    """Data without a manifest is listed as what it is, and not counted as a checkpoint."""
    url = f"{store.url}/run"
    kept, unfinished = push_steps(url, 100, 200)
    store.delete(f"run/manifests/{unfinished}.json")
    store.put("run/checkpoints/checkpoint-500/model.bin", b"copied by hand")
    store.put("run/notes.txt", b"mine")
    before = store.snapshot()
    document = strict(cli_here("ls", url, "--json").stdout)
    assert [(row["id"], row["state"]) for row in document["checkpoints"]] == [
        (kept, "committed"),
        (unfinished, "uncommitted"),
        ("checkpoint-500", "foreign"),
        ("notes.txt", "foreign"),
    ]
    foreign = document["checkpoints"][2]
    assert foreign == {
        "id": "checkpoint-500",
        "step": None,
        "epoch": None,
        "attempt": None,
        "state": "foreign",
        "lineage": None,
        "size_bytes": None,
        "files": None,
        "metrics": {},
        "reasons": [],
        "tags": [],
        "created_at": None,
    }
    assert (document["checkpoints"][1]["step"], document["checkpoints"][1]["attempt"]) == (200, 1)
    assert "1 checkpoint," in cli_here("ls", url).stdout
    assert store.snapshot() == before


def test_half_copied_manifest_is_foreign_to_this_run(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli
) -> None:
    """A checkpoint that was copied from another run, manifest and all, is not one of this run: damaged, with the reason."""
    store = make_store("local")
    (stem,) = push_steps(f"{store.url}/other", 500)
    push_steps(f"{store.url}/run", 100)
    for key, data in store.snapshot("other/").items():
        if stem in key:
            store.put(key.replace("other/", "run/"), data)
    listed = cli_here("ls", f"{store.url}/run", "--json", "--all")
    assert [(row["step"], row["state"]) for row in strict(listed.stdout)["checkpoints"]] == [
        (100, "committed"),
        (500, "damaged"),
    ]
    assert "another checkpoint or run" in listed.stderr
    assert "ckptmgr push" in listed.stderr
    resumed = cli_here("resume", f"{store.url}/run", "--json")
    assert strict(resumed.stdout)["step"] == 100


@pytest.mark.parametrize("damage", ["missing", "shorter", "other bytes"])
def test_check(store: Store, push_steps: PushSteps, cli_here: Cli, damage: str) -> None:
    """--check asks the store: presence and size everywhere, the content where the store keeps a checksum; exit 0, it is a list."""
    url = f"{store.url}/run"
    _, newest = push_steps(url, 100, 200)
    key = f"run/checkpoints/{newest}/model.bin"
    data = store.get(key)
    if damage == "missing":
        store.delete(key)
    else:
        store.put(key, data[:-1] if damage == "shorter" else b"X" + data[1:])
    states = [row["state"] for row in strict(cli_here("ls", url, "--json").stdout)["checkpoints"]]
    assert states == ["committed", "committed"]
    checked = cli_here("ls", url, "--json", "--check")
    assert checked.returncode == 0
    states = [row["state"] for row in strict(checked.stdout)["checkpoints"]]
    # A local disk keeps no checksum; `verify` reads the bytes.
    seen = store.name == "oss" or damage != "other bytes"
    assert states == ["committed", "damaged" if seen else "committed"]
    assert ("model.bin" in checked.stderr) is seen
    assert ("newest: step 200 (damaged)" in cli_here("ls", url, "--check").stdout) is seen


# --- a store ------------------------------------------------------------------------------------------------------------


def test_ls_of_a_store(store: Store, push_steps: PushSteps, cli_here: Cli) -> None:
    """The runs one level below, by name, with what is newest in each; what is no run is left out."""
    (a,) = push_steps(f"{store.url}/a", 100)
    *_, b = push_steps(f"{store.url}/b", 9, 10)
    push_steps(f"{store.url}/deep/er", 1)
    store.put("no-run/file", b"x")
    store.put("file", b"x")
    listed = cli_here("ls", store.url, "--json")
    assert (listed.returncode, listed.stderr) == (0, "")
    common = {"kind": "checkpoints"}
    assert strict(listed.stdout) == {
        "store": store.url,
        "runs": [
            {"run": "a", "checkpoints": 1, "latest_step": 100, "latest_id": a, "size_bytes": 1002 + 100, **common},
            {"run": "b", "checkpoints": 2, "latest_step": 10, "latest_id": b, "size_bytes": 2001 + 19, **common},
        ],
    }
    lines = cli_here("ls", store.url).stdout.splitlines()
    assert lines[0] == f"{store.url}: 2 runs"
    assert lines[3].split() == ["a", "1", "100", "1.1", "kB", a]


def test_ls_of_a_run_without_checkpoints(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """A run that has nothing yet is a run: exit 0, an empty list."""
    store = make_store("local")
    (stem,) = push_steps(f"{store.url}/run", 100)
    for key in store.keys("run/"):
        if stem in key:
            store.delete(key)
    assert strict(cli_here("ls", f"{store.url}/run", "--json").stdout) == {"run": f"{store.url}/run", "checkpoints": []}
    assert cli_here("ls", f"{store.url}/run").stdout == f"{store.url}/run: 0 checkpoints, 0 B\n"


# --- show ---------------------------------------------------------------------------------------------------------------


def test_show_as_json_is_the_manifest(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """The document that is stored, its digest included."""
    store = make_store("local")
    (stem,) = push_steps(f"{store.url}/run", 100, options=["--metric", "eval_loss=nan"])
    shown = cli_here("show", f"{store.url}/run", "--json")
    assert strict(shown.stdout) == json.loads(store.get(f"run/manifests/{stem}.json"))
    assert strict(shown.stdout)["metrics"] == {"eval_loss": "NaN"}


def test_show_for_people(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """What it is, why it was saved, and every file with its digest in full."""
    store = make_store("local")
    (stem,) = push_steps(f"{store.url}/run", 100, options=["--metric", "eval_loss=0.5", "--tag", "good"])
    text = cli_here("show", f"{store.url}/run").stdout
    for part in (
        stem,
        f"{store.url}/run",
        "eval_loss=0.5",
        "push",
        "good",
        "1.1 kB in 2 files",
        "model.bin",
        "sub/opt.bin",
    ):
        assert part in text
    for entry in json.loads(store.get(f"run/manifests/{stem}.json"))["files"]:
        assert entry["blake3"] in text


# --- tables -------------------------------------------------------------------------------------------------------------


def _table() -> Table:
    table = Table(
        Column(title="step", right=True),
        Column(title="empty"),
        Column(title="why", least=6, leave=2),
        Column(title="saved", leave=1),
        Column(title="id"),
    )
    table.add("9", "", "every_n_steps, best:eval_loss", "2026-01-01 12:00", "000001-000000000009-000001-aaaaaaaa")
    table.add("1000", "", "push", "2026-01-01 12:30", "000001-000000001000-000002-bbbbbbbb")
    return table


def test_table_of_full_width() -> None:
    """Aligned columns; one that is empty all the way down is not shown; no blanks at the ends of lines."""
    assert _table().lines() == [
        "step  why                            saved             id",
        "  ".join("─" * cells for cells in (4, 29, 16, 35)),
        "   9  every_n_steps, best:eval_loss  2026-01-01 12:00  000001-000000000009-000001-aaaaaaaa",
        "1000  push                           2026-01-01 12:30  000001-000000001000-000002-bbbbbbbb",
    ]


@pytest.mark.parametrize("width", range(20, 130))
def test_table_gives_way_without_breaking_ids(width: int) -> None:
    """Whatever the width: ids stay whole and on one line, and the table fits if leaving out and cutting can bring that about."""
    lines = _table().lines(width=width)
    ids = ("000001-000000000009-000001-aaaaaaaa", "000001-000000001000-000002-bbbbbbbb")
    assert [line.split()[-1] for line in lines[2:]] == list(ids)
    # Step and id stay; `saved` needs 18 cells more, and a shortened `why` 8.
    assert max(map(len, lines)) <= max(width, 41)
    assert ("why" in lines[0], "saved" in lines[0]) == (width >= 41 + 18 + 8, width >= 41 + 18)
    assert ("every_n_steps, best:eval_loss" in lines[2]) is (width >= 41 + 18 + 31)


def test_cells_are_one_line_without_control_characters() -> None:
    """Names come from stores: they must not drive a terminal, nor break the table."""
    table = Table(Column(title="name"), Column(title="x"))
    table.add("red\x1b[31m\nnext\ttab", "1")
    assert table.lines()[2].endswith("  1")
    assert "\x1b" not in "".join(table.lines())
    assert len(table.lines()) == 3


def test_wide_characters_keep_the_columns_aligned() -> None:
    """A cell of CJK takes two cells per character."""
    table = Table(Column(title="run"), Column(title="x"))
    table.add("实验", "1")
    table.add("ab", "2")
    assert table.lines()[2:] == ["实验  1", "ab    2"]


def test_colours_are_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipe there is nothing but text, at full width; on a terminal with NO_COLOR as well."""
    from ckptmgr.cli import tables

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    outputs = []
    for out, no_color in ((io.StringIO(), False), (Terminal(), False), (Terminal(), True)):
        monkeypatch.setattr("sys.stdout", out)
        if no_color:
            monkeypatch.setenv("NO_COLOR", "1")
        tables.show(_table())
        outputs.append(out.getvalue())
    pipe, terminal, plain = outputs
    assert pipe.splitlines() == _table().lines()
    assert "\x1b[1m" in terminal
    assert plain.splitlines() == _table().lines(width=60)
    assert max(map(len, plain.splitlines())) <= 60


# --- which metrics ------------------------------------------------------------------------------------------------------

HF_METRICS = {
    "eval_loss": 0.5,
    "eval_accuracy": 0.9,
    "eval_f1": 0.8,
    "eval_runtime": 12.5,
    "eval_samples_per_second": 80.0,
    "eval_steps_per_second": 10.0,
    "eval_model_preparation_time": 0.01,
    "train_speed(iter/s)": 3.0,
    "memory(GiB)": 17.0,
    "total_flos": 1e18,
    "num_tokens": 1e9,
    "grad_norm": 1.0,
    "learning_rate": 1e-5,
    "z_rank": 2.0,
}


def heads(url: str, cli_here: Cli) -> list[str]:
    """The metrics among the heads of the table."""
    titles = cli_here("ls", url).stdout.splitlines()[1].split()
    return [title for title in titles if title not in ("step", "epoch", "saved", "(UTC)", "size", "why", "state", "id")]


def commit(store: Store, step: int, **fields: Any) -> None:
    """A checkpoint of a run, by its manifest alone."""
    stem = Stem(1, step, 1, f"{step:08x}")
    store.put(f"run/{manifest_key(stem)}", encode_manifest(Manifest(stem=stem, run_uuid="u", files=(), **fields)))


@pytest.fixture
def trained(make_store: MakeStore) -> Store:
    """A run with what Hugging Face's Trainer and ms-swift report at each evaluation."""
    store = make_store("local")
    store.put("run/run.json", encode_run(RunRecord(uuid="u")))
    commit(store, 100, metrics=HF_METRICS)
    return store


def test_metrics_of_the_model_come_before_those_of_the_machine(trained: Store, cli_here: Cli) -> None:
    """Losses first; how fast it ran only where there is room; the document has all."""
    url = f"{trained.url}/run"
    assert heads(url, cli_here) == ["eval_loss", "eval_accuracy", "eval_f1", "grad_norm", "learning_rate", "z_rank"]
    (row,) = strict(cli_here("ls", url, "--json").stdout)["checkpoints"]
    assert row["metrics"] == HF_METRICS


@pytest.mark.parametrize(
    "fields",
    [
        {"reasons": ("every_n_steps:200", "best:eval_samples_per_second")},
        {"reasons": ("worst:eval_samples_per_second:max",)},
        {"metric_modes": {"eval_samples_per_second": "max"}},
    ],
    ids=str,
)
def test_the_metric_that_something_was_saved_for_comes_first(
    trained: Store, cli_here: Cli, fields: dict[str, Any]
) -> None:
    """Whatever it is of: somebody has chosen it."""
    commit(trained, 200, metrics=HF_METRICS, **fields)
    names = heads(f"{trained.url}/run", cli_here)
    assert names[:2] == ["eval_samples_per_second", "eval_loss"]
    assert len(names) == 6


def test_metrics_of_the_machine_are_shown_when_there_is_room(make_store: MakeStore, cli_here: Cli) -> None:
    """After all others."""
    store = make_store("local")
    store.put("run/run.json", encode_run(RunRecord(uuid="u")))
    commit(store, 100, metrics={"eval_runtime": 1.0, "val_bleu": 2.0, "memory_used": 5.0})
    assert heads(f"{store.url}/run", cli_here) == ["val_bleu", "eval_runtime", "memory_used"]


# --- the document -------------------------------------------------------------------------------------------------------


def test_a_document_is_ascii_and_strict_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of any kind, also those that are no UTF-8; numbers that are not finite are a mistake of ours, not null."""
    from ckptmgr.cli.output import emit_json

    document: dict[str, Any] = {
        "run": "实验",
        "bytes": "na\udce9",
        "numbers": [1e-7, 10**20, -0.0, True, None],
        "none": [{}, []],
    }
    for is_finite in (False, True):
        emit_json(document, is_finite=is_finite)
        text = capsys.readouterr().out
        assert text.isascii()
        assert json.loads(text) == document
        assert text == json.dumps(document, indent=2) + "\n"
    emit_json({"plain": {"a": [1.5, "b"]}}, is_finite=True)
    assert capsys.readouterr().out == '{\n  "plain": {\n    "a": [\n      1.5,\n      "b"\n    ]\n  }\n}\n'
    with pytest.raises(ValueError, match="JSON"):
        emit_json({"x": float("nan")})
