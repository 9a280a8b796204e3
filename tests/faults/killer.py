"""A process that does one job after another, each in a fork that can be killed with SIGKILL at an exact operation.

Reads one job per line of standard input, as JSON, and answers each with a line: `{"signal": 9}` if it was killed, `{"code": 0}` if it ended.
Imports once, so that dozens of kills cost what one interpreter does. Never imports torch and stays single-threaded: a fork is safe.

    {"do": "drain", "url": …, "tier": …, "kill": {"verb": "put_file", "path": "*", "nth": 1, "when": "after"}, "log": FILE, "env": {…}}

Instead of an operation, `kill` may name an amount, `{"sent_bytes": 1000}` of one file, or a single request, `{"request": "_complete"}`. `part_bytes` has larger files go up in parts of that size. `log` gets a line of JSON for each call that has had its effect on the store.
"""

from __future__ import annotations

import fnmatch
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ckptmgr.backends import oss, s3  # noqa: F401 - imported before the forks, not in each of them
from ckptmgr.backends.base import Backend
from ckptmgr.backends.registry import open_store
from ckptmgr.backends.wrap import WrappedBackend
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.retention import KeepLast
from ckptmgr.run.contents import describe
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.gc import gc
from ckptmgr.run.prune import prune
from ckptmgr.run.push import push
from ckptmgr.run.tier import LocalTier
from ckptmgr.transfer.drain import drain

T = TypeVar("T")
Job = dict[str, Any]
CHANGES = ("pipe_file", "put_file", "rm_file", "rm_files", "cp_file")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal(WrappedBackend):
    """Notes each call that has had its effect, and kills this process before or after the n-th that matches."""

    def __init__(self, inner: Backend, job: Job) -> None:
        super().__init__(inner)
        self._kill: Job = job.get("kill") or {}
        self._seen = 0
        self._log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND) if job.get("log") else None

    def _around(self, verb: str, path: str, call: Callable[[], T]) -> T:
        hit = self._is_hit(verb, path)
        if hit and self._kill["when"] == "before":
            die()
        result = call()
        if self._log is not None:
            os.write(self._log, json.dumps({"verb": verb, "path": path}).encode() + b"\n")
        if hit:
            die()
        return result

    def rm_files(self, paths: Sequence[str]) -> None:
        """One change per path, so that a death between two of them can be aimed at."""
        for path in paths:
            self.rm_file(path)

    def put_file(self, lpath: str, rpath: str, callback: Any = None, *args: Any, **kwargs: Any) -> None:
        limit = self._kill.get("sent_bytes")
        super().put_file(lpath, rpath, callback if limit is None else _Dying(limit), *args, **kwargs)

    def _is_hit(self, verb: str, path: str) -> bool:
        if "nth" not in self._kill:
            return False
        verbs = [self._kill["verb"]] if self._kill.get("verb") else CHANGES
        self._seen += verb in verbs and fnmatch.fnmatchcase(path, self._kill.get("path", "*"))
        return bool(self._seen == self._kill["nth"])


class _Dying:
    """A callback of a transfer that kills this process once so many bytes were sent."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def relative_update(self, inc: int = 1) -> None:
        self._left -= inc
        if self._left <= 0:
            die()


def _prepare(fs: Any, job: Job) -> None:
    while isinstance(fs, WrappedBackend):
        fs = fs.inner
    if "part_bytes" in job:
        fs._part_bytes = fs._multipart_threshold = job["part_bytes"]
    if "request" in job.get("kill", {}):
        setattr(fs, job["kill"]["request"], lambda *arguments: die())


def _run(job: Job) -> RunDirectory:
    fs, root = open_store(job["url"])
    _prepare(fs, job)
    return RunDirectory.open(job["url"], fs=Mortal(fs, job), root=root)


def _drain(job: Job) -> int:
    return 6 if drain(LocalTier.open(job["tier"]), _run(job)).pending else 0


def _push(job: Job) -> None:
    push(Path(job["directory"]), _run(job))


def _prune(job: Job) -> None:
    prune(_run(job), KeepLast(job["keep_last"]))


def _gc(job: Job) -> None:
    gc(_run(job), grace_s=0.0)


def _save(job: Job) -> None:
    """Commit a save into the local tier; killed before its n-th change of the file system, whatever makes that change."""
    tier, stem = LocalTier.open(job["tier"]), Stem.parse(job["stem"])
    seen = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.mkdir", "os.rename", "os.link", "os.remove"):
            seen += 1
            if seen == job["nth"]:
                die()

    sys.addaudithook(count)
    prepared = tier.prepare(stem)
    for name, text in job["files"].items():
        (prepared / name).write_bytes(text.encode())
    manifest = Manifest(stem=stem, run_uuid=tier.run.uuid, files=describe(prepared))
    tier.commit(manifest, prepared, target=job["url"])


_DO: dict[str, Callable[[Job], int | None]] = {
    "drain": _drain,
    "push": _push,
    "prune": _prune,
    "gc": _gc,
    "save": _save,
}


def _in_a_fork(job: Job) -> dict[str, int]:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.environ.update(job.get("env", {}))
            code = _DO[job["do"]](job) or 0
        except Exception:  # noqa: BLE001 - told to the parent by the exit code
            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    return {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"code": os.WEXITSTATUS(status)}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(_in_a_fork(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
