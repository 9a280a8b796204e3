"""The null OSS server of `null_oss.c`: compiled and started."""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType

_SOURCE = Path(__file__).with_name("null_oss.c")
BUCKET = "bench"


class NullOss:
    """A server on 127.0.0.1 that keeps no body, and computes the CRC-64 of what it is sent. A context manager; for one thread.

    Args:
        directory: where the program goes.
    """

    def __init__(self, directory: Path) -> None:
        program = directory / "null_oss"
        compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
        if compiler is None:
            sys.exit("error: the null server has to be compiled and there is no C compiler here; install gcc")
        subprocess.run([compiler, "-O3", "-pthread", str(_SOURCE), "-o", str(program)], check=True)
        self._process = subprocess.Popen([str(program)], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    @property
    def environment(self) -> dict[str, str]:
        """What points an OSS client at it, and at nothing else."""
        return {
            "OSS_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OSS_ACCESS_KEY_ID": "bench",
            "OSS_ACCESS_KEY_SECRET": "bench",
            "OSS_REGION": "cn-hangzhou",
            "NO_PROXY": "127.0.0.1",
        }

    def crc(self, key: str) -> int:
        """The CRC-64 that the server keeps of an object."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("HEAD", f"/{BUCKET}/{key}")
            found = connection.getresponse().getheader("x-oss-hash-crc64ecma")
        finally:
            connection.close()
        if found is None:
            raise KeyError(key)
        return int(found)

    def __enter__(self) -> NullOss:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


def environment_without_stores() -> dict[str, str]:
    """This process's variables but for those that configure a store or a proxy."""
    prefixes = ("OSS_", "ALIBABA_CLOUD_", "CKPTMGR_")
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(prefixes) and not name.lower().endswith("_proxy")
    }
