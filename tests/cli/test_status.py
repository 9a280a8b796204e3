"""`ckptmgr status`: what is not in the store yet, for people and for programs, without a look at the store unless asked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.run import locks
from ckptmgr.run.contents import describe
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import new_nonce, utc_now
from ckptmgr.run.start import claim_attempt
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.stores import Store
from ckptmgr.transfer.drain import drain
from ckptmgr.transfer.queue import QueueRules, make_room
from ckptmgr.transfer.status import TransferFile, UploadStatus

Cli = Callable[..., subprocess.CompletedProcess[str]]
SIZE = 100_000


class Scene:
    """A run with a local tier below `.ckptmgr`, as a trainer in this directory makes it."""

    def __init__(self, folder: Path, url: str, name: str = "run") -> None:
        self.run = RunDirectory.open_or_create(url)
        self.tier = LocalTier.open_or_create(folder / ".ckptmgr" / name, uuid=self.run.uuid)

    def save(self, step: int, *, ago_s: float = 0) -> Stem:
        stem = Stem(1, step, max((s.seq for s in self.tier.run.stems()), default=0) + 1, new_nonce())
        prepared = self.tier.prepare(stem)
        (prepared / "model.bin").write_bytes(os.urandom(SIZE))
        created = (utc_now() - timedelta(seconds=ago_s)).isoformat()
        manifest = Manifest(stem=stem, run_uuid=self.run.uuid, files=describe(prepared), created_at=created)
        self.tier.commit(manifest, prepared, target=self.run.url)
        return stem

    def upload(self) -> None:
        assert drain(self.tier, self.run).pending == ()

    def note(self, stem: Stem, **changes: Any) -> None:
        """Change the journal's entry."""
        entry = self.tier.journal.read(stem)
        assert entry is not None
        self.tier.journal.write(replace(entry, **changes))

    def drop_oldest(self) -> Stem:
        """The queue is full for one more."""
        waiting = len(self.tier.pending())
        (stem,) = make_room(self.tier, self.run.url, SIZE, QueueRules(max_bytes=waiting * SIZE)).dropped
        return stem


@pytest.fixture
def scene(tmp_path: Path, make_store: Callable[[str], Store]) -> Scene:
    return Scene(tmp_path, f"{make_store('local').url}/run")


@pytest.fixture
def said(cli_here: Cli) -> Callable[..., tuple[int, Any]]:
    """The exit code and the one document of `status --json`."""

    def run(*arguments: object) -> tuple[int, Any]:
        done = cli_here("status", *arguments, "--json")
        return done.returncode, json.loads(done.stdout)

    return run


def table(text: str) -> list[list[str]]:
    """The rows of the table in `text`."""
    lines = text.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("─"))
    return [line.split() for line in lines[at + 1 :] if len(line.split()) > 1 and line.split()[0].isdecimal()]


# --- exit codes ---------------------------------------------------------------------------------------------------------------


def test_everything_in_the_store_is_0(scene: Scene, cli_here: Cli) -> None:
    scene.save(100)
    scene.upload()
    done = cli_here("status")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        f"local tier: {scene.tier.root}\nrun:        {scene.run.url}\nstate:      everything is in the store\n"
        in done.stdout
    )
    assert [row[:2] for row in table(done.stdout)] == [["100", "uploaded"]]


def test_an_empty_tier_is_0(scene: Scene, cli_here: Cli) -> None:
    """Training has just begun."""
    scene.tier.hold()
    try:
        done = cli_here("status", scene.tier.root)
    finally:
        scene.tier.release()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "state:      nothing was saved yet"


@pytest.mark.parametrize("state", ["pending", "uploading", "failed"])
def test_pending_is_6(scene: Scene, said: Callable[..., tuple[int, Any]], state: str) -> None:
    stem = scene.save(100)
    scene.note(stem, state=state, tries=1)
    code, document = said()
    (tier,) = document["tiers"]
    assert (code, tier["pending"], tier["pending_bytes"], tier["durable"]) == (6, 1, SIZE, False)
    assert tier["entries"][0]["state"] == ("failed" if state == "failed" else "waiting")


def test_a_drop_is_6_until_it_is_acknowledged(scene: Scene, said: Callable[..., tuple[int, Any]]) -> None:
    """Also when everything else is in the store."""
    scene.save(100)
    scene.save(200)
    dropped = scene.drop_oldest()
    scene.upload()
    code, document = said()
    (tier,) = document["tiers"]
    assert (code, tier["pending"], tier["dropped"], tier["durable"]) == (6, 0, 1, False)
    assert tier["entries"][1] == {
        "id": str(dropped),
        "step": 100,
        "state": "dropped",
        "size_bytes": SIZE,
        "tries": 0,
        "run": scene.run.url,
        "why": "saves of 200 kB wait for upload, one of 100 kB comes, and 200 kB may wait",
    }
    scene.tier.forget_evicted(dropped)
    code, document = said()
    assert (code, document["tiers"][0]["dropped"]) == (0, 0)


@pytest.mark.parametrize("place", [(), ("nowhere",), ("file:///nowhere",)], ids=["none", "path", "url"])
def test_no_tier_there_is_3(cli_here: Cli, place: tuple[str, ...]) -> None:
    done = cli_here("status", *place)
    assert (done.returncode, done.stdout) == (3, "")
    assert len(done.stderr.splitlines()) == 1
    assert " - " in done.stderr


def test_a_tier_that_the_environment_names_must_be_there(
    scene: Scene, cli_here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not replaced by whatever lies below the working directory."""
    monkeypatch.setenv("CKPTMGR_LOCAL_DIR", str(scene.tier.root.parent / "gone"))
    done = cli_here("status")
    assert done.returncode == 3
    assert "gone" in done.stderr


# --- which tier -----------------------------------------------------------------------------------------------------------------


def test_every_tier_of_this_directory(
    scene: Scene,
    tmp_path: Path,
    make_store: Callable[[str], Store],
    said: Callable[..., tuple[int, Any]],
    cli_here: Cli,
) -> None:
    """One that waits is enough for 6; what lies there and is no tier is passed over."""
    scene.save(100)
    scene.upload()
    other = Scene(tmp_path, f"{make_store('local').url}/other", "other")
    other.save(200)
    (tmp_path / ".ckptmgr" / "notes").mkdir()
    code, document = said()
    assert code == 6
    assert [tier["local_dir"] for tier in document["tiers"]] == [str(other.tier.root), str(scene.tier.root)]
    assert cli_here("status").stdout.count("local tier: ") == 2


@pytest.mark.parametrize("as_url", [False, True])
def test_a_tier_by_its_path(scene: Scene, said: Callable[..., tuple[int, Any]], as_url: bool) -> None:
    scene.save(100)
    code, document = said(f"file://{scene.tier.root}" if as_url else scene.tier.root)
    assert (code, document["run"], len(document["tiers"])) == (6, None, 1)


def test_a_run_and_its_tier(
    store: Store, tmp_path: Path, said: Callable[..., tuple[int, Any]], cli_here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the store has, who trains, and, with CKPTMGR_LOCAL_DIR, what waits here; the store knows best what is durable."""
    scene = Scene(tmp_path, f"{store.url}/run")
    claim_attempt(scene.run, how="auto", parent=None)
    durable = scene.save(100, ago_s=600)
    scene.upload()
    waiting = scene.save(300, ago_s=60)
    scene.tier.remove(durable)
    code, document = said(scene.run.url)
    assert (code, document["tiers"]) == (0, [])
    run = document["run"]
    assert (run["url"], run["latest_id"], run["latest_step"]) == (scene.run.url, str(durable), 100)
    assert 600 <= run["latest_age_s"] < 700
    (attempt,) = run["attempts"]
    assert attempt.keys() == {"attempt", "how", "parent", "host", "created_at"}
    assert (attempt["attempt"], attempt["how"], attempt["parent"]) == (1, "auto", None)

    monkeypatch.setenv("CKPTMGR_LOCAL_DIR", str(scene.tier.root))
    code, document = said(scene.run.url)
    assert code == 6
    lag = document["tiers"][0]["lag"]
    assert (lag["id"], lag["durable_id"], lag["steps_ahead"]) == (str(waiting), str(durable), 200)
    text = cli_here("status", scene.run.url).stdout
    assert re.search(rf"^in store:   step 100, saved 10 min( \d+ s)? ago \({durable}\)$", text, re.MULTILINE)
    assert re.search(r"^newest:     step 300, saved 1 min( \d+ s)? ago, only on this disk$", text, re.MULTILINE)


def test_a_tier_of_another_run_is_not_taken_for_its(
    scene: Scene, tmp_path: Path, make_store: Callable[[str], Store], cli_here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Scene(tmp_path, f"{make_store('local').url}/other", "other")
    other.save(200)
    scene.save(100)
    scene.upload()
    monkeypatch.setenv("CKPTMGR_LOCAL_DIR", str(other.tier.root))
    done = cli_here("status", scene.run.url)
    assert done.returncode == 0
    assert "local tier of another run" in done.stderr
    assert "step 200" not in done.stdout


def test_the_store_is_not_asked_for_a_tier(tmp_path: Path, scene: Scene, said: Callable[..., tuple[int, Any]]) -> None:
    """It may be down: that is when people look."""
    scene.save(100)
    (tmp_path / "store").rename(tmp_path / "unmounted")
    assert said()[0] == 6


# --- what it says ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def busy(scene: Scene) -> Iterator[Scene]:
    """Six saves in every state, and a process that uploads the newest: this one."""
    scene.save(500, ago_s=4000)
    scene.upload()
    for step in (1000, 1500, 2000, 2500):
        scene.save(step, ago_s=4500 - step)
    scene.drop_oldest()
    newest = scene.save(3000, ago_s=100)
    failed = scene.tier.pending()[1][1].stem
    scene.note(failed, state="failed", tries=3, error="403 AccessDenied - check the credentials")
    file = TransferFile(scene.tier.root)
    status = UploadStatus(
        uploading=newest,
        sent_bytes=43_000,
        total_bytes=SIZE,
        rate_bytes_s=210e6,
        eta_s=11,
        failures=3,
        retries=4,
        last_error="503 SlowDown",
        host="process",
    )
    assert file.write(status, target=scene.run.url, force=True)
    yield scene
    file.close()


def test_for_people(busy: Scene, cli_here: Cli) -> None:
    """In 80 columns but for paths, URLs and reasons: what is up, what is behind, what failed, what is gone."""
    done = cli_here("status")
    assert (done.returncode, done.stderr) == (6, "")
    assert done.stdout.splitlines()[:8] == [
        f"local tier: {busy.tier.root}",
        f"run:        {busy.run.url}",
        "waiting:    4 saves, 400 kB",
        f"uploads:    step 3000, 43 % of 100 kB, 210 MB/s, 11 s left (process {os.getpid()})",
        "dropped:    1 save, never uploaded - `ckptmgr drain` acknowledges",
        "newest:     step 3000, saved 1 min 40 s ago, only on this disk",
        "in store:   step 500, saved 1 h 6 min ago, 2500 steps behind",
        "last error: 503 SlowDown",
    ]
    assert [row[:2] for row in table(done.stdout)] == [
        ["3000", "uploading"],
        ["2500", "failed"],
        ["2000", "waiting"],
        ["1500", "waiting"],
        ["1000", "dropped"],
        ["500", "uploaded"],
    ]
    assert done.stdout.splitlines()[-2:] == [
        "step 2500 failed: 403 AccessDenied - check the credentials",
        "step 1000 dropped: saves of 400 kB wait for upload, one of 100 kB comes, and 400 kB may wait",
    ]
    assert max(map(len, done.stdout.splitlines()[2:-2])) <= 80


def test_for_programs(busy: Scene, said: Callable[..., tuple[int, Any]]) -> None:
    """The documented shape, every key of it."""
    code, document = said()
    assert code == 6
    assert document.keys() == {"run", "tiers"}
    (tier,) = document["tiers"]
    assert tier.keys() == {
        *("local_dir", "durable", "pending", "pending_bytes", "dropped", "uploader", "lag", "entries", "restored"),
    }
    uploader = tier["uploader"]
    assert uploader == {
        "alive": True,
        "pid": os.getpid(),
        "host": "process",
        "run": busy.run.url,
        "uploading": str(busy.tier.pending()[0][0].stem),
        "sent_bytes": 43_000,
        "total_bytes": SIZE,
        "percent": 43,
        "rate_bytes_s": 210e6,
        "eta_s": 11.0,
        "committed": 0,
        "failures": 3,
        "retries": 4,
        "last_error": "503 SlowDown",
    }
    lag = tier["lag"]
    assert lag.keys() == {"id", "step", "age_s", "steps_ahead", "durable_id", "durable_step", "durable_age_s"}
    assert (lag["step"], lag["durable_step"], lag["steps_ahead"]) == (3000, 500, 2500)
    assert 100 <= lag["age_s"] < 200
    assert [(entry["step"], entry["state"], entry["tries"]) for entry in tier["entries"]] == [
        (3000, "uploading", 0),
        (2500, "failed", 3),
        (2000, "waiting", 0),
        (1500, "waiting", 0),
        (1000, "dropped", 0),
        (500, "uploaded", 1),
    ]
    keys = {"id", "step", "state", "size_bytes", "tries", "run", "why"}
    assert all(entry.keys() == keys for entry in tier["entries"])


def test_many_drops_do_not_hide_the_rest(scene: Scene, cli_here: Cli, said: Callable[..., tuple[int, Any]]) -> None:
    """After days of an outage: people see the newest of them and how many there are, programs all."""
    for step in range(100, 1100, 100):
        scene.save(step)
    rules = QueueRules(max_bytes=3 * SIZE, min_free_bytes=0)
    assert len(make_room(scene.tier, scene.run.url, SIZE, rules).dropped) == 8
    text = cli_here("status").stdout
    assert "dropped:    8 saves, never uploaded" in text
    rows = [row[:2] for row in table(text)]
    assert rows == [
        ["1000", "waiting"],
        ["900", "waiting"],
        *([str(step), "dropped"] for step in (800, 700, 600, 500, 400)),
    ]
    assert text.splitlines()[-1] == "and 3 more dropped"
    assert [entry["step"] for entry in said()[1]["tiers"][0]["entries"]] == list(range(1000, 0, -100))


def test_a_dead_uploader_is_not_said_to_upload(
    busy: Scene, cli_here: Cli, said: Callable[..., tuple[int, Any]]
) -> None:
    """It left its last words; what to do is said instead."""
    status = TransferFile(busy.tier.root).read()
    assert status is not None
    (busy.tier.root / ".transfer.lock").unlink()  # nobody has the lock that is there now
    document = said()[1]["tiers"][0]
    uploader = document["uploader"]
    assert (uploader["alive"], uploader["uploading"], uploader["eta_s"], uploader["rate_bytes_s"]) == (
        False,
        None,
        None,
        0,
    )
    assert document["entries"][0]["state"] == "waiting"
    assert "uploads:    no process is there - run `ckptmgr drain`, or resume training\n" in cli_here("status").stdout


def test_one_that_another_process_drains_is_uploading(scene: Scene, said: Callable[..., tuple[int, Any]]) -> None:
    """Seen by its lock, although that process says nothing of itself; looking does not take the lock away."""
    stem = scene.save(100)
    with locks.exclusive(scene.run.uuid, stem, "upload"):
        assert said()[1]["tiers"][0]["entries"][0]["state"] == "uploading"
        assert locks.is_held(scene.run.uuid, stem, "upload")
    assert said()[1]["tiers"][0]["entries"][0]["state"] == "waiting"


def test_what_an_uploader_knew_to_be_durable_counts(scene: Scene, said: Callable[..., tuple[int, Any]]) -> None:
    """The local copy of the newest upload is gone; without the words of whoever uploaded it, nothing is known to be durable."""
    durable = scene.save(100, ago_s=600)
    scene.upload()
    scene.save(150)
    scene.tier.remove(durable)
    lag = said()[1]["tiers"][0]["lag"]
    assert (lag["durable_id"], lag["durable_step"], lag["steps_ahead"]) == (str(durable), 100, 50)
    assert 600 <= lag["durable_age_s"] < 700
    (scene.tier.root / "transfer.json").unlink()
    lag = said()[1]["tiers"][0]["lag"]
    assert (lag["durable_id"], lag["durable_step"], lag["steps_ahead"]) == (None, None, None)


def test_a_lost_journal_and_a_garbled_file(scene: Scene, said: Callable[..., tuple[int, Any]]) -> None:
    """Without a journal's entry a save waits, wherever it belongs; a transfer.json that says nothing is no error."""
    stem = scene.save(100)
    (scene.tier.root / f"uploads/{stem}.json").unlink()
    (scene.tier.root / "transfer.json").write_text("{")
    code, document = said(scene.tier.root)
    (tier,) = document["tiers"]
    assert (code, tier["uploader"], tier["entries"][0]["state"], tier["entries"][0]["run"]) == (6, None, "waiting", "")


def test_control_characters_of_a_store_reach_no_terminal(scene: Scene, cli_here: Cli) -> None:
    stem = scene.save(100)
    scene.note(stem, state="failed", error="bad\x1b[31m\nworse")
    assert "step 100 failed: bad\N{REPLACEMENT CHARACTER}[31m worse\n" in cli_here("status").stdout


def test_it_starts_without_torch_and_clients_of_stores(scene: Scene) -> None:
    """A look at a tier is quick."""
    scene.save(100)
    code = (
        "import sys\nfrom ckptmgr.cli.main import run\n"
        f"code = run(['status', {str(scene.tier.root)!r}])\n"
        "print(code, [name for name in ('torch', 'numpy', 'boto3', 'oss2', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "6 []"
