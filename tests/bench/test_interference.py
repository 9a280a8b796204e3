"""The bench of an upload beside training: that it runs, what its ratios are, and what its server answers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the null server has to be compiled")


@pytest.fixture
def interference(bench: Callable[[str], ModuleType]) -> ModuleType:
    return bench("interference")


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for training and one for the rest")
def test_one_round_with_a_real_transfer_process_ends_with_the_ratios(
    bench: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """In a process of its own, for it pins itself to a core; the last line is one JSON object that a script can read."""
    import subprocess
    import sys

    script = Path(str(bench("interference").__file__))
    options = ["--size-mib", "48", "--rounds", "1", "--boto3-rounds", "1", "--dir", str(tmp_path)]
    page = tmp_path / "benchmarks.md"
    done = subprocess.run(
        [sys.executable, str(script), *options, "--record", str(page)],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sorted(found) == ["matmul_loop_speed", "python_loop_speed", "upload_slowdown"]
    assert all(value > 0 for value in found.values())
    assert page.read_text().count("| transfer process |") == page.read_text().count("| boto3 in a thread |") == 3
    assert [path.name for path in tmp_path.iterdir()] == [page.name]


def test_ratios_are_medians_over_rounds_of_what_was_measured_in_the_same_round(interference: ModuleType) -> None:
    """A loop's speed beside an upload to its speed alone; the upload's time beside the worse loop to its time beside nothing."""

    def timed(seconds: Sequence[float], speeds: Sequence[float], alone: Sequence[float]) -> list[Any]:
        return [interference.Timed(*values) for values in zip(seconds, speeds, alone, strict=True)]

    measured = interference.Measured(
        ours={
            "idle": timed([1, 2, 10], [0, 0, 0], [0, 0, 0]),
            "python": timed([1, 2.2, 20], [50, 90, 99], [100, 100, 100]),
            "matmul": timed([1.5, 3, 10], [100, 100, 10], [100, 200, 100]),
        },
        boto3={},
        load=0.0,
    )
    assert interference.ratios(measured) == {"python_loop_speed": 0.9, "matmul_loop_speed": 0.5, "upload_slowdown": 1.5}


def test_the_null_server_answers_what_our_backend_and_boto3_ask(
    bench: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Create-only, checksums given back, parts that are listed, and a multipart upload that waits until it may begin."""
    import boto3

    from ckptmgr.backends.registry import open_store
    from ckptmgr.core.errors import ObjectExistsError

    null = bench("_null_s3")
    path = tmp_path / "file"
    path.write_bytes(os.urandom(40 << 20))
    with null.NullS3(tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        fs, _ = open_store("s3://bench/run")
        fs.pipe_file("bench/run/manifests/1.json", b"one", mode="create")
        with pytest.raises(ObjectExistsError):
            fs.pipe_file("bench/run/manifests/1.json", b"two", mode="create")
        assert fs.cat_file("bench/run/manifests/1.json") == b"one"
        assert server.commits == 1
        fs.put_file(str(path), "bench/run/checkpoints/a")
        assert fs.find("bench/run") == ["bench/run/checkpoints/a", "bench/run/manifests/1.json"]
        assert [entry["name"] for entry in fs.ls("bench/run")] == ["bench/run/checkpoints", "bench/run/manifests"]
        assert fs.info("bench/run/checkpoints/a")["size"] == 40 << 20
        crc = fs.stored_crc("bench/run/checkpoints/a")
        assert crc is not None
        assert crc[0] == "crc64nvme"

        client = boto3.client("s3")
        upload = client.create_multipart_upload(Bucket="bench", Key="b")["UploadId"]
        client.upload_part(Bucket="bench", Key="b", UploadId=upload, PartNumber=2, Body=b"part")
        (part,) = client.list_parts(Bucket="bench", Key="b", UploadId=upload)["Parts"]
        assert (part["PartNumber"], part["Size"]) == (2, 4)
        client.abort_multipart_upload(Bucket="bench", Key="b", UploadId=upload)
        with pytest.raises(client.exceptions.NoSuchUpload):
            client.list_parts(Bucket="bench", Key="b", UploadId=upload)
        client.upload_file(str(path), "bench", "b")
        assert client.head_object(Bucket="bench", Key="b")["ContentLength"] == 40 << 20
        fs.rm_file("bench/b")
        assert not fs.exists("bench/b")
        client.close()
