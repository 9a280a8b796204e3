"""What an upload costs in memory: the same for any amount of data (row 23), measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.run.contents import describe
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import new_nonce
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.discarding import DiscardingServer
from ckptmgr.testing.relay import Relay

MIB = 1 << 20
#: Above what the process has once everything is imported, and a client made.
LIMIT_MIB = 64
# The numbers that a test prints are for whoever changes this.
CHILD = """
import json, sys
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.transfer.drain import drain

def peak_mib():
    # Not ru_maxrss, which a process has from its parent, of before it was another program.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024

tier, run = LocalTier.open(sys.argv[1]), RunDirectory.open(sys.argv[2])
floor = peak_mib()
done = drain(tier, run)
print(json.dumps({"floor": floor, "peak": peak_mib(), "left": len(done.pending)}))
"""


@pytest.fixture
def discarding(monkeypatch: pytest.MonkeyPatch) -> Iterator[DiscardingServer]:
    """A store that throws away what it gets, and so is not what is measured, nor waited for."""
    with DiscardingServer() as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def save_files(tmp_path: Path) -> Callable[[RunDirectory, int, int], LocalTier]:
    """Commits a save of files into a local tier; they are holes, and cost no disk."""

    def save(run: RunDirectory, count: int, size_bytes: int) -> LocalTier:
        tier = LocalTier.open_or_create(tmp_path / "disk", uuid=run.uuid)
        stem = Stem(1, 100, 1, new_nonce())
        prepared = tier.prepare(stem)
        for number in range(count):
            with open(prepared / f"model-{number}.safetensors", "wb") as file:
                file.truncate(size_bytes)
        tier.commit(Manifest(stem=stem, run_uuid=run.uuid, files=describe(prepared)), prepared, target=run.url)
        return tier

    return save


def measure(tier: LocalTier, run: RunDirectory) -> float:
    """Drain the tier in a process of its own; how many MiB that took at most beyond what the process has anyway."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tier.root), run.url], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    print(measured)
    assert measured["left"] == 0
    return float(measured["peak"] - measured["floor"])


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the peak is read from /proc")
@pytest.mark.parametrize("scheme", ["s3", "oss"])
class TestPeak:
    @pytest.mark.parametrize(
        ("count", "size_bytes"),
        [
            pytest.param(2, 64 * MIB, id="2x64MiB"),
            pytest.param(3, 32 * MIB, id="3x32MiB whole"),
            pytest.param(8, 256 * MIB, id="8x256MiB", marks=pytest.mark.slow),
        ],
    )
    def test_it_does_not_depend_on_the_amount(
        self,
        scheme: str,
        count: int,
        size_bytes: int,
        discarding: DiscardingServer,
        save_files: Callable[[RunDirectory, int, int], LocalTier],
    ) -> None:
        """2 GiB in eight files take no more than 64 MiB; neither parts nor whole small files are held."""
        run = RunDirectory.open_or_create(f"{scheme}://bkt/run")
        assert measure(save_files(run, count, size_bytes), run) <= LIMIT_MIB
        assert discarding.received_bytes == count * size_bytes
        assert discarding.uploads == {}

    def test_nor_on_the_link(
        self,
        scheme: str,
        discarding: DiscardingServer,
        save_files: Callable[[RunDirectory, int, int], LocalTier],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Row 23: what a slow link does not take stays on disk."""
        with Relay(discarding.url, bytes_per_s=24 * MIB, buffer_bytes=64 << 10) as relay:
            for name in ("AWS_ENDPOINT_URL", "OSS_ENDPOINT"):
                monkeypatch.setenv(name, relay.url)
            run = RunDirectory.open_or_create(f"{scheme}://bkt/run")
            assert measure(save_files(run, 1, 96 * MIB), run) <= LIMIT_MIB
