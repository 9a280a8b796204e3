"""`drain`, and what `resume -- COMMAND` does at its end: beside a process that still uploads, and with saves that were given up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.run.contents import describe
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.stores import Store
from ckptmgr.transfer.drain import drain
from ckptmgr.transfer.status import TransferFile

Cli = Callable[..., subprocess.CompletedProcess[str]]

DEADLINE_S = 60.0
TRAINER = Path(__file__).parents[1] / "faults" / "trainer.py"


class Scene:
    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.url = f"{store.url}/run"
        self.run = RunDirectory.open_or_create(self.url)
        self.tier = LocalTier.open_or_create(folder, uuid=self.run.uuid)

    def save(self, step: int, data: bytes = b"bytes") -> Stem:
        stem = Stem(1, step, len(self.tier.journal.entries()) + 1, f"{step:08x}")
        prepared = self.tier.prepare(stem)
        (prepared / "model.bin").write_bytes(data)
        manifest = Manifest(stem=stem, run_uuid=self.run.uuid, files=describe(prepared))
        self.tier.commit(manifest, prepared, target=self.url)
        return stem

    def give_up(self, stem: Stem) -> None:
        self.tier.evict(stem, size_bytes=12_300_000, why="saves of 2 GB wait for upload, and 1 GB may wait")


@pytest.fixture
def scene(make_store: Callable[[str], Store], tmp_path: Path) -> Iterator[Scene]:
    made = Scene(make_store("moto"), tmp_path / "tier")
    yield made
    made.store.server.faults.clear()
    view = TransferFile(made.tier.root).read()
    if view is not None and view.alive and view.pid not in (None, os.getpid()):
        os.kill(view.pid or 0, signal.SIGKILL)


def test_what_was_given_up_is_named_once(scene: Scene, cli_here: Cli) -> None:
    """Exit 6 and a line each, the others are uploaded; the second time there is nothing to say."""
    gone, kept = scene.save(100), scene.save(200)
    scene.give_up(gone)
    first = cli_here("drain", scene.tier.root)
    assert first.returncode == 6
    lines = [line for line in first.stderr.splitlines() if str(gone) in line]
    assert lines == [
        f"ckptmgr: warning: step 100 ({gone}, 12.3 MB) was given up before it was uploaded: saves of 2 GB wait for upload, and 1 GB may wait"
    ]
    assert scene.run.stems() == [kept]
    second = cli_here("drain", scene.tier.root, "--json")
    assert second.returncode == 0
    assert json.loads(second.stdout) == {"local_dir": str(scene.tier.root), "pending": [], "dropped": []}
    assert str(gone) not in second.stderr
    assert [entry.stem for entry in scene.tier.journal.entries()] == [kept]


def test_what_was_given_up_is_in_the_document(scene: Scene, cli_here: Cli) -> None:
    gone = scene.save(100)
    scene.give_up(gone)
    done = cli_here("drain", scene.tier.root, "--json")
    assert done.returncode == 6
    assert json.loads(done.stdout) == {"local_dir": str(scene.tier.root), "pending": [], "dropped": [str(gone)]}


def test_what_a_process_was_killed_over_while_it_gave_it_up_is_uploaded(scene: Scene, cli_here: Cli) -> None:
    """The journal says that it goes, and it is still whole: it is no loss."""
    stem = scene.save(100)
    entry = scene.tier.journal.read(stem)
    assert entry is not None
    scene.tier.journal.write(replace(entry, state="evicted", error="no room"))
    done = cli_here("drain", scene.tier.root, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["dropped"] == []
    assert scene.run.stems() == [stem]


def test_the_parts_of_what_was_given_up_are_thrown_away(scene: Scene, cli_here: Cli) -> None:
    """Its upload had begun, in parts that nobody sees and that are paid for; whoever gave it up asked no store."""
    stem = scene.save(100, os.urandom(33 << 20))
    bucket = scene.url.split("/")[2]
    refuse = Fault(method="PUT", query="partNumber", status=403, code="AccessDenied", times=None)
    with scene.store.server.faults.injected(refuse):
        assert drain(scene.tier, scene.run).pending == (stem,)
    assert len(scene.store.server.raw_uploads(bucket)) == 1
    scene.give_up(stem)
    assert cli_here("drain", scene.tier.root).returncode == 6
    assert scene.store.server.raw_uploads(bucket) == {}
    assert scene.tier.journal.entries() == []


def test_the_uploads_of_a_training_throw_such_parts_away_as_well(scene: Scene) -> None:
    """The loop that goes on with the others does."""
    stem = scene.save(100, os.urandom(33 << 20))
    bucket = scene.url.split("/")[2]
    refuse = Fault(method="PUT", query="partNumber", status=403, code="AccessDenied", times=None)
    with scene.store.server.faults.injected(refuse):
        drain(scene.tier, scene.run)
    scene.give_up(stem)
    newer = scene.save(200)
    assert drain(scene.tier, scene.run).committed == (newer,)
    assert scene.store.server.raw_uploads(bucket) == {}
    # Nobody was told of it yet.
    assert [entry.stem for entry in scene.tier.evicted()] == [stem]


@pytest.mark.parametrize(("code", "expected"), [(0, 6), (3, 3)])
def test_resume_names_what_its_command_gave_up(scene: Scene, cli_here: Cli, code: int, expected: int) -> None:
    """Once, after COMMAND; the exit code is 6, unless COMMAND's own says more."""
    scene.save(100)
    drain(scene.tier, scene.run)
    gone = scene.save(200)
    scene.give_up(gone)
    words = ("resume", scene.url, "--local-dir", scene.tier.root, "--")
    done = cli_here(*words, "sh", "-c", f"exit {code}")
    assert done.returncode == expected
    assert done.stderr.count(f"step 200 ({gone}, 12.3 MB) was given up") == 1
    again = cli_here(*words, "true")
    assert (again.returncode, "given up" in again.stderr) == (0, False)


def start(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ckptmgr.cli.main", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if words in line:
            return
    raise AssertionError("".join(lines))


def test_resume_waits_for_what_its_command_left_a_process_with(scene: Scene, tmp_path: Path) -> None:
    """COMMAND is killed in the middle of an upload, which its transfer process goes on with: waited for, done once, and no 6."""
    held = scene.store.server.faults.add(Fault(method="PUT", key="*/checkpoints/*", hold="before"))
    scene.store.server.log.clear()
    orders = tmp_path / "orders"
    os.mkfifo(orders)
    command = f"{sys.executable} {TRAINER} {scene.tier.root} {scene.url} '{{\"linger_s\": 300}}' < {orders}"
    words = ("resume", scene.url, "--or-start", "--local-dir", scene.tier.root, "--", "sh", "-c", command)
    with start(*words) as resume:
        # Open for both, so that a command that never reads it blocks nobody.
        with open(os.open(orders, os.O_RDWR), "w") as say:
            for order in ({"do": "save", "step": 7, "files": {"a.bin": 10}}, {"do": "notify"}):
                print(json.dumps(order), file=say, flush=True)
            assert held.reached.wait(DEADLINE_S)
            print('{"do": "die"}', file=say, flush=True)
            wait_for(resume, "is being uploaded by another process: waiting for it")
        held.release()
        _, said = resume.communicate(timeout=DEADLINE_S)
    assert resume.returncode == 137, said
    assert "another process" not in said
    assert [stem.step for stem in scene.run.stems()] == [7]
    puts = [request.key for request in scene.store.server.log if request.method == "PUT"]
    assert len(puts) == len(set(puts)) == 2


def test_a_drain_takes_up_what_a_process_dies_over(scene: Scene) -> None:
    """Waiting for a transfer process that is killed, it finishes the work itself."""
    held = scene.store.server.faults.add(Fault(method="PUT", key="*/checkpoints/*", hold="before"))
    stem = scene.save(100)
    trainer = subprocess.Popen(
        [sys.executable, str(TRAINER), str(scene.tier.root), scene.url, "{}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with trainer:
        assert trainer.stdin is not None
        print('{"do": "notify"}', file=trainer.stdin, flush=True)
        assert held.reached.wait(DEADLINE_S)
        trainer.kill()
    view = TransferFile(scene.tier.root).read()
    assert view is not None
    assert view.alive
    with start("drain", scene.tier.root) as draining:
        wait_for(draining, f"step 100 ({stem}) is being uploaded by another process")
        os.kill(view.pid or 0, signal.SIGKILL)
        said, _ = draining.communicate(timeout=DEADLINE_S)
    assert (draining.returncode, said) == (0, f"{scene.tier.root}: nothing pending\n")
    assert scene.run.stems() == [stem]
