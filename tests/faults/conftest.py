"""Helpers of the fault tests: a process that can be killed at any operation, and saves in a local tier without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import new_nonce
from ckptmgr.run.tier import LocalTier, describe

Ask = Callable[..., Any]


class Kill(Protocol):
    """Does a job of `killer.py` in a process of its own; True if it was killed. Any other end but success fails the test."""

    def __call__(self, do: str, **job: Any) -> bool:
        """See `killer.py` for the jobs."""


@pytest.fixture(scope="session")
def _killer() -> Iterator[subprocess.Popen[str]]:
    script = str(Path(__file__).with_name("killer.py"))
    process = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    yield process
    process.stdin.close()
    assert process.wait(30) == 0
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def kill(_killer: subprocess.Popen[str]) -> Kill:
    """See `Kill`. The environment of the test, with its store, is that of the job."""

    def run(do: str, **job: Any) -> bool:
        assert _killer.stdin is not None
        assert _killer.stdout is not None
        environment = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "OSS_", "CKPT"))}
        print(json.dumps({"do": do, **job, "env": environment | job.get("env", {})}), file=_killer.stdin, flush=True)
        reply = json.loads(_killer.stdout.readline())
        assert reply in ({"signal": 9}, {"code": 0}), reply
        return "signal" in reply

    return run


@pytest.fixture
def ask(cli_here: Callable[..., subprocess.CompletedProcess[str]]) -> Ask:
    """Runs a command line that must succeed, and returns its JSON document."""

    def run(*arguments: object) -> Any:
        done = cli_here(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def new_tier(tmp_path: Path) -> Callable[[RunDirectory], LocalTier]:
    """Makes the local tier of a run."""
    return lambda run: LocalTier.open_or_create(tmp_path / "disk", uuid=run.uuid)


@pytest.fixture
def local_save() -> Callable[..., Stem]:
    """Commits a save into a local tier, as a trainer does, and returns its id; nothing is uploaded by that."""

    def save(tier: LocalTier, run: RunDirectory, step: int, files: Mapping[str, bytes] | None = None) -> Stem:
        stem = Stem(1, step, max((s.seq for s in tier.run.stems()), default=0) + 1, new_nonce())
        prepared = tier.prepare(stem)
        for name, data in (files or {"a.bin": b"a%d" % step, "b.bin": b"b%d" % step}).items():
            (prepared / name).write_bytes(data)
        manifest = Manifest(stem=stem, run_uuid=run.uuid, files=describe(prepared))
        tier.commit(manifest, prepared, target=run.url)
        return stem

    return save
