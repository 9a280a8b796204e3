"""A process that does one job after another, each in a fork that waits to be traced, so that strace counts the job's own system calls.

Reads lines of JSON from standard input. A job is answered with `{"pid": N}`: a fork of this process, stopped just before the job. After a line
`"go"` it goes on, and once it has ended the answer is how: `{"signal": 9}` or `{"code": 0}`, with `"said"`, what the job had said by then:
`["acknowledged"]` after its success, `["failed", ERROR]` after an error of ours; any other error is a code of 1.

Imports once, so that hundreds of runs cost what one interpreter does. Never imports torch and stays single-threaded: a fork is safe.
The window to be traced begins and ends with a harmless call that nothing else makes, `access` of `BEGIN` and of `END`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ckptmgr.backends.atomic import fsync_file, write_atomic
from ckptmgr.backends.localfile import write_all
from ckptmgr.backends.oserrors import os_errors
from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.run.contents import describe
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.transfer.queue import QueueRules, make_room
from ckptmgr.transfer.upload import upload_one

Job = dict[str, Any]

BEGIN, END = "/ckptmgr-trace-begin", "/ckptmgr-trace-end"
_PR_SET_PTRACER, _ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)


@contextmanager
def _window() -> Iterator[None]:
    os.access(BEGIN, os.F_OK)
    yield
    os.access(END, os.F_OK)


def _commit(job: Job) -> None:
    """Commit a save of `files` into the tier, as a trainer does: small files atomically, the others in one go, each one synced."""
    tier, stem = LocalTier.open(job["tier"]), Stem.parse(job["stem"])
    with _window():
        prepared = tier.prepare(stem)
        try:
            for name, text in job["files"].items():
                _write(prepared / name, text.encode())
            manifest = Manifest(stem=stem, run_uuid=tier.run.uuid, files=describe(prepared))
            tier.commit(manifest, prepared, target=job["url"])
        except BaseException:
            tier.discard(prepared)
            raise


def _write(path: Path, data: bytes) -> None:
    if path.suffix == ".json":
        write_atomic(path, data)
        return
    with os_errors("write", str(path)):
        if not path.parent.is_dir():
            path.parent.mkdir()
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            write_all(fd, data)
        finally:
            os.close(fd)
    fsync_file(path)


def _upload(job: Job) -> None:
    """Upload what is pending, one after another: its journal goes from pending to uploading, to what is confirmed, to uploaded."""
    tier, run = LocalTier.open(job["tier"]), RunDirectory.open(job["url"])
    with _window():
        for manifest, entry in tier.pending(run.url):
            upload_one(tier, run, manifest, entry)


def _remove(job: Job) -> None:
    """Remove the local copy of a checkpoint that the store has."""
    tier = LocalTier.open(job["tier"])
    with _window():
        tier.remove(Stem.parse(job["stem"]))


def _evict(job: Job) -> None:
    """Make room in a queue of at most `max_bytes` for a save of `incoming_bytes`, by giving up what waits longest."""
    tier, rules = LocalTier.open(job["tier"]), QueueRules(max_bytes=job["max_bytes"])
    with _window():
        room = make_room(tier, job["url"], job["incoming_bytes"], rules)
    if not room.admitted:
        raise CkptmgrError(room.why)


_DO: dict[str, Callable[[Job], None]] = {"commit": _commit, "upload": _upload, "remove": _remove, "evict": _evict}


def _child(job: Job, tell: int) -> None:
    """Stop until somebody traces this process and lets it go on; then do the job."""
    # Where Yama allows only ancestors to trace, this names everybody; elsewhere it is refused and not needed.
    with suppress(OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)
    os.environ["CKPTMGR_LOCK_DIR"] = job["locks"]
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        _DO[job["do"]](job)
        said = ["acknowledged"]
    except CkptmgrError as error:
        said = ["failed", f"{type(error).__name__}: {error}"]
    # Not `write`, which may be made to fail from some call on.
    os.writev(tell, [json.dumps(said).encode()])


def _start(job: Job) -> tuple[int, int]:
    """A stopped child, and the descriptor where it will say how it went."""
    listen, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(listen)
            _child(job, tell)
            code = 0
        except BaseException:  # noqa: BLE001 - told to the parent by the exit code
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(tell)
    os.waitpid(pid, os.WUNTRACED)
    return pid, listen


def _finish(pid: int, listen: int) -> dict[str, Any]:
    os.kill(pid, signal.SIGCONT)
    status = os.waitpid(pid, 0)[1]
    with open(listen, "rb") as pipe:
        said = json.loads(pipe.read() or b"[]")
    ended = {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"code": os.WEXITSTATUS(status)}
    return {**ended, "said": said}


def _rehearse() -> None:
    """Do every job once, untraced: what is imported and opened at a first use belongs into this process, not into each fork."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CKPTMGR_LOCK_DIR"] = f"{folder}/locks"
        url, stem = (Path(folder) / "run").as_uri(), str(Stem(1, 1, 1, "0123abcd"))
        tier = f"{folder}/tier"
        LocalTier.open_or_create(tier, uuid=RunDirectory.open_or_create(url).uuid)
        _commit({"tier": tier, "url": url, "stem": stem, "files": {"a.json": "{}", "b.bin": "b"}})
        _upload({"tier": tier, "url": url})
        _remove({"tier": tier, "stem": stem})
        _evict({"tier": tier, "url": url, "max_bytes": 1, "incoming_bytes": 1})


def main() -> None:
    _rehearse()
    for line in sys.stdin:
        pid, listen = _start(json.loads(line))
        print(json.dumps({"pid": pid}), flush=True)
        sys.stdin.readline()
        print(json.dumps(_finish(pid, listen)), flush=True)


if __name__ == "__main__":
    main()
