"""The bench of OSS: that what it measures with tells the truth."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from ckptmgr.backends.registry import open_store
from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.errors import ObjectExistsError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the null server has to be compiled")


def test_the_null_server_answers_what_our_backend_asks(
    bench: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Create-only, the CRC of what was sent, in one piece or in parts, and zeros in return."""
    data = os.urandom((3 << 20) + 5)
    path = tmp_path / "file"
    path.write_bytes(data)
    with bench("_null_oss").NullOss(tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("CKPTMGR_PART_SIZE", "1MiB")
        fs, _ = open_store("oss://bench/run")
        fs.pipe_file("bench/run/small", b"one", mode="create")
        with pytest.raises(ObjectExistsError):
            fs.pipe_file("bench/run/small", b"two", mode="create")
        fs.put_file(str(path), "bench/run/large")
        assert fs.info("bench/run/large")["size"] == len(data)
        assert fs.stored_crc("bench/run/large") == ("crc64xz", digest_bytes(data).crc64xz)
        assert fs.stored_crc("bench/run/small") == ("crc64xz", digest_bytes(b"one").crc64xz)
        assert fs.cat_file("bench/run/small") == bytes(3)
        assert f"{server.crc('run/small'):016x}" == digest_bytes(b"one").crc64xz
        fs.rm_file("bench/run/small")
        with pytest.raises(KeyError):
            server.crc("run/small")
