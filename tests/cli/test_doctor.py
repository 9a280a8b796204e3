"""`ckptmgr doctor` as people and scripts see it: lines, JSON, exit codes, and no secret."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckptmgr.run import trials
from ckptmgr.testing.identities import ADMIN, READ_ONLY

if TYPE_CHECKING:
    from ckptmgr.testing.servers import MotoServer
    from ckptmgr.testing.stores import Store

pytestmark = pytest.mark.usefixtures("small_s3_parts")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def _little_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_FIRST_BYTES", 64 << 10)
    monkeypatch.setattr(trials, "_SECOND_BYTES", 128 << 10)


def test_one_line_per_verdict(make_store: Callable[[str], Store], cli_here: Run) -> None:
    """Level, question, what was found; the last line sums up; all of it on stdout, and exit 0."""
    store = make_store("local")
    done = cli_here("doctor", store.url, "--size", "1kB", "--grace", "2min")
    *lines, summary = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert all(line.split()[0] in ("ok", "warning", "problem", "unknown") for line in lines)
    assert [line.split()[1] for line in lines][:3] == ["versions", "list", "put"]
    assert summary == f"{store.url}: can be used"


def test_json(make_store: Callable[[str], Store], cli_here: Run) -> None:
    """One document: the store, whether it can be used, and the verdicts with their facts."""
    store = make_store("moto")
    done = cli_here("doctor", f"{store.url}/", "--json", "--size", "1TB", "--grace", "1s")
    document = json.loads(done.stdout)
    assert (done.returncode, document["store"], document["usable"]) == (0, store.url, True)
    verdicts = {verdict["check"]: verdict for verdict in document["verdicts"]}
    assert set(verdicts["put"]) == {"check", "level", "text", "advice", "seconds"}
    assert verdicts["upload_rate"]["level"] == "warning"
    assert verdicts["upload_rate"]["facts"]["size_bytes"] == 10**12
    assert verdicts["endpoint"]["facts"]["profile"] == "other"
    assert verdicts["endpoint"]["facts"]["tested"] is False


def test_a_store_that_cannot_be_used(
    make_store: Callable[[str], Store], moto_server: MotoServer, cli_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 4, the reason in its line, and no traceback."""
    store = make_store("moto")
    for name, value in moto_server.env_of("read-only").items():
        monkeypatch.setenv(name, value)
    done = cli_here("doctor", store.url)
    assert done.returncode == 4
    assert any(line.startswith("problem  put") and "AccessDenied" in line for line in done.stdout.splitlines())
    assert "1 problem" in done.stdout.splitlines()[-1]
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--size", "huge"], "--size"),
        (["--size", "0"], "--size"),
        (["--grace", "soon"], "--grace"),
    ],
)
def test_wrong_words(cli_here: Run, tmp_path: Path, words: list[str], says: str) -> None:
    """Exit 2, nothing tried."""
    done = cli_here("doctor", tmp_path / "store", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert not (tmp_path / "store").exists()


def test_wrong_configuration(cli_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of ours, a URL with a secret in it, an unknown scheme: exit 2, and the secret is not repeated."""
    monkeypatch.setenv("CKPTMGR_STORE_PROFILE", "mino")
    done = cli_here("doctor", "s3://bucket/run")
    assert (done.returncode, "did you mean minio" in done.stderr) == (2, True)
    monkeypatch.delenv("CKPTMGR_STORE_PROFILE")
    done = cli_here("doctor", "s3://AKIA:hush-hush@bucket/run")
    assert (done.returncode, "hush" in done.stderr + done.stdout) == (2, False)
    assert cli_here("doctor", "s4://bucket").returncode == 2


def test_no_secret_is_told(
    make_store: Callable[[str], Store], moto_server: MotoServer, cli_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the lines, not in the JSON, not with -v: where credentials were found is said, and not what they are."""
    store = make_store("moto")
    token = "a-session-token-of-the-test"
    secrets = (ADMIN.secret_key, ADMIN.access_key, token, READ_ONLY.secret_key)
    monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    for words in (["-v"], ["-v", "--json"]):
        done = cli_here("doctor", store.url, *words)
        assert done.returncode == 0, done.stderr
        assert not [secret for secret in secrets if secret in done.stdout + done.stderr]
    assert "found in the environment" in done.stdout
    assert moto_server.log[-1].headers["x-amz-security-token"] == token


def test_time_to_save_counts(
    make_store: Callable[[str], Store], cli_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What saves of this machine took is read from the figures of the local tier: nine in ten fast, and some slow."""
    store = make_store("local")
    tier = tmp_path / "tier"
    tier.mkdir()
    times = [1.0] * 18 + [200.0] * 2
    lines = [json.dumps({"kind": "save", "stall_s": 0.5, "write_s": seconds}) for seconds in times]
    (tier / "metrics.jsonl").write_text("\n".join([*lines, "not a record", '{"kind": "upload"}']) + "\n")
    monkeypatch.setenv("CKPTMGR_LOCAL_DIR", str(tier))
    done = cli_here("doctor", store.url, "--size", "1kB", "--json")
    verdicts = {verdict["check"]: verdict for verdict in json.loads(done.stdout)["verdicts"]}
    assert verdicts["upload_rate"]["facts"]["saving_s"] == 200.5
    assert verdicts["upload_rate"]["level"] == "warning"
    assert verdicts["local_disk"]["facts"]["local_dir"] == str(tier)


def test_interrupted(make_store: Callable[[str], Store], cli_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C: exit 130, and nothing stays in the store."""
    store = make_store("moto")

    def interrupt(self: object) -> None:
        assert store.keys() != []
        raise KeyboardInterrupt

    monkeypatch.setattr(trials.Trials, "copy", interrupt)
    done = cli_here("doctor", store.url)
    assert done.returncode == 130
    assert store.keys() == []


def test_what_a_killed_one_left_is_no_run(
    make_store: Callable[[str], Store], cli_here: Run, push_steps: Callable[..., list[str]]
) -> None:
    """`ls` shows the runs and nothing else, and says of a store without any that there is none."""
    store = make_store("moto")
    store.put(".ckptmgr-doctor-0123abcd/small", b"x")
    assert cli_here("ls", store.url).returncode == 3
    push_steps(f"{store.url}/run", 1)
    store.put("run/.ckptmgr-doctor-0123abcd/small", b"x")
    listed = json.loads(cli_here("ls", store.url, "--json").stdout)
    assert [run["run"] for run in listed["runs"]] == ["run"]
    listed = json.loads(cli_here("ls", f"{store.url}/run", "--json").stdout)
    assert [row["state"] for row in listed["checkpoints"]] == ["committed"]
