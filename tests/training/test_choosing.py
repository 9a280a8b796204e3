"""One rank chooses the checkpoint for all: what two processes see of it, on one machine and as if on two. The scenarios are in `choosing_ranks.py`."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from ckptmgr.backends.wrap import WrappedBackend
from ckptmgr.core.errors import AccessDeniedError, TransientBackendError
from ckptmgr.training import choosing
from ckptmgr.training.manager import CheckpointManager

T = TypeVar("T")
RANK = """
from training.choosing_ranks import run
join()
found = run(sys.argv[1])
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scenarios")


@pytest.fixture(scope="module")
def seen(in_two_ranks: Callable[..., list[Any]], root: Path) -> Callable[[str], tuple[Any, Any]]:
    """What ranks 0 and 1 saw in a scenario."""
    first, second = in_two_ranks(RANK, root)
    return lambda scenario: (first[scenario], second[scenario])


Seen = Callable[[str], tuple[Any, Any]]


def bits(step: int) -> str:
    torch.manual_seed(step)
    return torch.rand(64).numpy().tobytes().hex()


def test_k016_all_ranks_restore_the_same_step(seen: Seen) -> None:
    """A commit between the looks of two ranks, at 20 offsets: both have 200, or both have 300, to the last bit; and both outcomes occur."""
    first, second = seen("commits_meanwhile")
    assert first == second
    assert len(first) == 20
    assert {each["step"] for each in first} == {200, 300}
    assert all(each["bits"] == bits(each["step"]) for each in first)


def test_a_new_run_is_new_for_all(seen: Seen) -> None:
    """And rank 1 has touched nothing."""
    assert seen("new_run") == ([None, None, False], [None, None, False])


def test_what_fails_on_rank_0_fails_on_all(seen: Seen) -> None:
    """The same error, and nobody waits."""
    first, second = seen("fails_on_rank_0")
    assert first == second
    assert {what: each[0] for what, each in first.items() if isinstance(each, list)} == {
        "store": "AccessDeniedError",
        "path": "AccessDeniedError",
        "selector": "ConfigError",
        "not found": "CheckpointNotFoundError",
        "damaged": "IntegrityError",
        "state": "ConfigError",
        "begun": "ConflictError",
    }
    assert first["untouched"]


def test_what_fails_on_rank_1_fails_on_all(seen: Seen) -> None:
    """It says which rank it is about; a program that goes on nevertheless has restored nothing."""
    first, second = seen("fails_on_rank_1")
    assert first == second
    assert first["drift"][0] == "DriftError"
    assert first["drift"][1].startswith("rank 1: ")
    assert first["load"][0] == "IncompatibleStateError"
    assert "it does not fit" in first["load"][1]
    assert first["restored"] is False
    assert first["again"] == 200


def test_errors_of_others_reach_all(seen: Seen) -> None:
    """As they are, where another process can make them again; of two the one of the lower rank."""
    first, second = seen("foreign_errors")
    for what, found in (
        ("one", ["KeyError", "'key'"]),
        ("aside", ["ValueError", "value"]),
        ("both", ["ConflictError", "zero"]),
    ):
        assert [first[what], second[what]] == [found, found]
    assert first["unpicklable"] == ["CkptmgrError", "rank 1: Foreign: two words"]
    assert second["unpicklable"] == ["Foreign", "two words"]
    assert [first["afterwards"], second["afterwards"]] == [[0, 1], [0, 1]]


def test_ranks_of_one_machine_share_one_directory(seen: Seen) -> None:
    """Fetched once; `restore` removes it when all have loaded it, and not before."""
    first, second = seen("one_path")
    assert first == second
    assert first["restored"]
    assert "bits.safetensors" in first["files"]
    assert first["left"] == []


def test_another_machine_fetches_for_itself(seen: Seen, root: Path) -> None:
    """The same checkpoint, by its id; that rank 0 was asked for the newest is what counts."""
    first, second = seen("another_machine")
    for number, each in enumerate((first, second)):
        assert (each["step"], each["bits"], each["how"]) == (200, bits(200), "auto")
        assert Path(each["path"]).is_relative_to(root / "another_machine" / f"tier-{number}")


def test_a_full_disk_on_another_machine_stops_all(seen: Seen) -> None:
    """None has loaded anything; with room all go on."""
    first, second = seen("another_machine_is_full")
    assert first == second
    assert first["error"][0] == "DiskFullError"
    assert first["error"][1].startswith("rank 1: ")
    assert first["untouched"]
    assert (first["again"]["step"], first["again"]["bits"]) == (100, bits(100))


def test_what_waits_is_uploaded_before_the_choice(seen: Seen) -> None:
    """With several machines: others cannot get it from rank 0's disk."""
    first, second = seen("another_machine_waits_for_uploads")
    assert first == second
    assert (first["step"], first["bits"], first["skipped"]) == (200, bits(200), [])


def test_what_cannot_be_uploaded_is_no_candidate_and_is_named(seen: Seen) -> None:
    first, second = seen("another_machine_and_no_upload")
    assert first == second
    assert (first["step"], first["bits"]) == (100, bits(100))
    ((stem, why),) = first["skipped"]
    assert "-000000000200-" in stem
    assert "not in the store yet" in why
    assert first["named"][0] == "CheckpointNotFoundError"


def test_a_run_that_is_only_on_one_disk_is_not_new(seen: Seen) -> None:
    """Nobody starts from scratch, whatever `on_existing` says: it would abandon the only checkpoint."""
    first, second = seen("only_on_this_machine")
    assert first == second
    for attempt in ("refused", "new lineage"):
        assert first[attempt][0] == "NotCommittedError"
        assert "ckptmgr drain" in first[attempt][1]
    assert first["here"] == 200


def test_what_the_command_has_put_on_each_machine_is_used(seen: Seen) -> None:
    assert seen("rewound_on_each_machine") == ({"own": True, "how": "explicit"},) * 2


def test_a_long_fetch_keeps_no_collective_waiting(seen: Seen) -> None:
    """Ranks tell each other that it goes on: a process group gives up a collective after minutes."""
    for each in seen("takes_long"):
        assert (each["step"], each["bits"]) == (100, bits(100))
        assert each["rounds"] >= 8


def test_a_restart_goes_on_from_what_rank_0_finds_newer(seen: Seen) -> None:
    """On all ranks; and on none where not all have a manager to ask."""
    first, second = seen("restarted")
    assert first == second
    assert first["bits"] == bits(200)
    assert [first[name] for name in ("first", "nobody", "by one", "nothing")] == [True, True, True, None]


def test_ranks_that_are_told_differently_do_not_start(seen: Seen) -> None:
    first, second = seen("told_differently")
    assert first == second
    assert first["same"]
    for what in ("different", "one has none"):
        assert first[what][0] == "ConflictError"
        assert "rank 1" in first[what][1]


def test_a_trainer_that_cannot_load_on_one_rank_makes_no_step(seen: Seen) -> None:
    first, second = seen("trainer_fails_on_rank_1")
    assert first == second
    assert first["error"][0] == "IntegrityError"
    assert first["steps"] == 0


def test_a_callback_that_cannot_begin_on_rank_0_stops_all(seen: Seen) -> None:
    """Nobody makes a step, or waits in one; nor where ranks have been resumed from different checkpoints by other ways."""
    first, second = seen("callback_fails_on_rank_0")
    assert first == second
    assert first["begin"][0] == "ConflictError"
    assert first["apart"][0] == "ConflictError"
    assert "rank 1: step 1" in first["apart"][1]
    assert first["steps"] == 0


class Threads:
    """Ranks as threads of this process, on `disks` that only ranks of the same disk see."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, disks: str, hosts: str) -> None:
        self.folder, self.disks, self._mine = folder, disks, threading.local()
        self.brought: list[int] = []
        self._barrier, self._rows = threading.Barrier(len(disks), timeout=60), [Any] * len(disks)
        is_here, bring = choosing._File.is_here, choosing.Chooser._bring

        def brings(chooser: choosing.Chooser, place: Any) -> Any:
            self.brought.append(self.rank())
            return bring(chooser, place)

        patch.setattr(choosing, "rank", self.rank)
        patch.setattr(choosing, "can_agree", lambda: True)
        patch.setattr(choosing, "on_all_ranks", self.exchange)
        patch.setattr(choosing, "host_name", lambda: hosts[self.rank()])
        patch.setattr(choosing._File, "is_here", lambda file: os.fspath(self.disk()) in file.path and is_here(file))
        patch.setattr(choosing.Chooser, "_bring", brings)

    def rank(self) -> int:
        return int(self._mine.rank)

    def disk(self) -> Path:
        return self.folder / f"disk-{self.disks[self.rank()]}"

    def exchange(self, part: Callable[[], Any], *, aside: bool = False) -> list[Any]:
        self._rows[self.rank()] = part()
        self._barrier.wait()
        rows = list(self._rows)
        self._barrier.wait()
        return rows

    def choose(self, run_dir: Path) -> list[choosing.Chosen]:
        found: dict[int, choosing.Chosen | None] = {}

        def work(number: int) -> None:
            self._mine.rank = number
            manager = CheckpointManager(run_dir, local_dir=self.disk())
            found[number] = manager._restoring._chooser.choose("latest", lambda manifest: None)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(self.disks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [chosen for _, chosen in sorted(found.items()) if chosen is not None]


@pytest.mark.parametrize(
    ("disks", "hosts", "brought"),
    [
        ("aabb", "aabb", {2}),
        ("abab", "abab", {1}),
        ("abbc", "zzzz", {1, 3}),
        ("aaa", "abc", set()),
    ],
)
def test_one_process_of_each_machine_fetches(
    disks: str,
    hosts: str,
    brought: set[int],
    manager: Callable[..., CheckpointManager],
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others of its machine take its files. Host names only save work: what counts is who sees the files."""
    with manager() as saving:
        saving.save(100, {"n": {"value": 1}})
    ranks = Threads(monkeypatch, tmp_path, disks, hosts)
    found = ranks.choose(run_dir)
    assert len(found) == len(disks)
    assert set(ranks.brought) == brought
    assert {number for number, chosen in enumerate(found) if chosen.is_own} == brought | {0}
    for disk, chosen in zip(disks, found, strict=True):
        assert chosen.resumed.directory.is_relative_to(tmp_path / f"disk-{disk}")
        assert json.loads((chosen.resumed.directory / "n.json").read_bytes()) == {"value": 1}
        assert chosen.resumed.how == "auto"


def test_uploads_before_a_choice_are_bounded(
    manager: Callable[..., CheckpointManager], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that takes for ever: what waits goes on waiting, and is named."""
    stops: list[threading.Event | None] = []

    class Slow(WrappedBackend):
        def _around(self, verb: str, path: str, call: Callable[[], T]) -> T:
            if verb in ("put_file", "pipe_file") and "-000000000100-" in path:
                if not stops:
                    raise AccessDeniedError("not yet")
                assert stops[-1] is not None
                assert stops[-1].wait(60)
                raise TransientBackendError("stopped")
            return call()

    saving = manager(transfer="thread", wrap_backend=Slow)
    saving.save(100, {"n": {"value": 1}}, wait=True)
    assert saving.close().pending

    def open_places(stop: threading.Event | None) -> Any:
        stops.append(stop)
        return saving._open(stop)

    chooser = choosing.Chooser(open_places, tmp_path / "disk", url=saving.url, new_lineage=False, drain_s=0.2)
    (left,) = chooser._drain()
    assert left.step == 100
    assert f"{left} is only in {tmp_path / 'disk'}" in caplog.text


def test_without_a_process_group_it_is_said_once(
    manager: Callable[..., CheckpointManager], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torchrun has started several ranks, and they cannot talk yet: each chooses for itself."""
    choosing._warned.clear()
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with caplog.at_level(logging.WARNING), manager() as saving:
        assert saving.restore({"n": {}}) is None
        assert saving.resume_path() is None
    said = [record.getMessage() for record in caplog.records if "init_process_group" in record.getMessage()]
    assert len(said) == 1
    assert "each of 4 ranks" in said[0]
    choosing._warned.clear()
