"""The null S3 server of `null_s3.c`: compiled, started, and seen through the counters that it shares."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType

_SOURCE = Path(__file__).with_name("null_s3.c")
_HOLD, _WAITING, _COMMITS, _RECEIVED = range(4)
_WORDS = 4
BUCKET = "bench"


class NullS3:
    """A server on 127.0.0.1 that hashes nothing and keeps no large body. A context manager; for one thread.

    Args:
        directory: where the program and its counters go.
        cores: where it may run; None for anywhere.
    """

    def __init__(self, directory: Path, *, cores: Collection[int] | None = None) -> None:
        program, counters = directory / "null_s3", directory / "null_s3.control"
        compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
        if compiler is None:
            sys.exit("error: the null server has to be compiled and there is no C compiler here; install gcc")
        subprocess.run([compiler, "-O2", "-pthread", str(_SOURCE), "-o", str(program)], check=True)
        self._process = subprocess.Popen([str(program), str(counters)], stdout=subprocess.PIPE, text=True)
        if cores is not None:
            # Before the first request: each connection's thread inherits it.
            os.sched_setaffinity(self._process.pid, cores)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        with counters.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * _WORDS)
        self._words = memoryview(self._map).cast("Q")

    @property
    def environment(self) -> dict[str, str]:
        """What points an S3 client at it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    @property
    def commits(self) -> int:
        """Manifests created so far. A read of memory: nothing is asked."""
        return self._words[_COMMITS]

    @property
    def received(self) -> int:
        """Bytes of all bodies that it was sent so far. A read of memory."""
        return self._words[_RECEIVED]

    def hold(self) -> None:
        """Let no multipart upload begin from now on, until `let_go`."""
        self._words[_HOLD] = 1

    def wait_for_held(self, timeout_s: float) -> None:
        """Return when an upload waits to begin."""
        deadline = monotonic() + timeout_s
        while self._words[_WAITING] == 0:
            if monotonic() > deadline:
                raise TimeoutError(f"no upload came to the server within {timeout_s:g} s")
            sleep(0.002)

    def let_go(self) -> None:
        """Let uploads begin."""
        self._words[_HOLD] = 0

    def __enter__(self) -> NullS3:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._words.release()
        self._map.close()
        self._process.kill()
        self._process.communicate()
