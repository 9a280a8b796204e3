"""One action of ckptmgr's own path, measured without its imports: `python _ours.py ACTION PATH URL [--profile FILE | --calls FILE] [--die-after MIB]`.

create  -    RUN      make the run, not measured
save    DIR  RUN      commit a directory to the local tier `tier` of the working directory, not measured: what training does before an upload
upload  -    RUN      upload what is saved there, as the transfer process does: its CRC, compared with the manifest and by the store; journal, manifest
push    DIR  RUN      commit a directory: BLAKE3 and CRCs, and then as upload
resume  DIR  RUN      fetch the newest checkpoint to DIR: download, every byte verified, synced, renamed
put     FILE OBJECT   the upload alone, of one file: its CRC, which the store compares, no BLAKE3, no manifest
get     FILE OBJECT   the download alone, of one object
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from _clock import measured
from _sampler import counted_calls, sampled

from ckptmgr.backends.registry import open_store
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.selectors import parse_selector
from ckptmgr.run.contents import describe
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import new_nonce
from ckptmgr.run.push import push
from ckptmgr.run.resume import resume
from ckptmgr.run.tier import LocalTier
from ckptmgr.transfer.drain import drain

MIB = 1 << 20
TIER = Path("tier")


def create(path: Path, url: str, moved: Callable[[int], None]) -> None:
    """An empty run."""
    RunDirectory.open_or_create(url)


def save(path: Path, url: str, moved: Callable[[int], None]) -> None:
    """By hard links, as what a trainer has written is taken."""
    run = RunDirectory.open_or_create(url)
    tier = LocalTier.open_or_create(TIER, uuid=run.uuid)
    stem = Stem(1, 1, 1, new_nonce())
    prepared = tier.prepare(stem)
    for file in path.iterdir():
        os.link(file, prepared / file.name)
    tier.commit(Manifest(stem=stem, run_uuid=run.uuid, files=describe(prepared)), prepared, target=run.url)


def upload(path: Path, url: str, moved: Callable[[int], None]) -> None:
    """As `ckptmgr drain` does it, and the transfer process beside a training."""
    run = RunDirectory.open(url)
    assert drain(LocalTier.open(TIER), run).committed


def push_directory(path: Path, url: str, moved: Callable[[int], None]) -> None:
    """As `ckptmgr push` does it; the number at the end of the directory's name is the step."""
    push(path, RunDirectory.open_or_create(url), moved=moved)


def resume_newest(path: Path, url: str, moved: Callable[[int], None]) -> None:
    """As `ckptmgr resume` does it."""
    resume(RunDirectory.open(url), parse_selector("latest"), to=path)


def put(path: Path, url: str, moved: Callable[[int], None]) -> None:
    """Without digests to compare: what the backend does for anybody who asks."""
    fs, key = open_store(url)
    fs.put_file(str(path), key)


def get(path: Path, url: str, moved: Callable[[int], None]) -> None:
    """Length checked, content not."""
    fs, key = open_store(url)
    fs.get_file(key, str(path))


def ls(path: Path, url: str, moved: Callable[[int], None]) -> None:
    """Ends as the command does, but for the process."""
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())), contextlib.suppress(SystemExit):
        from ckptmgr.cli.main import main

        sys.argv = ["ckptmgr", "ls", url, "--json"]
        main()


ACTIONS = {
    "create": create,
    "save": save,
    "upload": upload,
    "push": push_directory,
    "resume": resume_newest,
    "put": put,
    "get": get,
    "ls": ls,
}


class Syncs:
    """How long this process waits for the disk, which those who do not sync do not."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("fsync", "fdatasync"):
            setattr(os, name, self._timed(getattr(os, name)))

    def _timed(self, sync: Callable[[Any], None]) -> Callable[[Any], None]:
        def timed(file: Any) -> None:
            start = perf_counter()
            sync(file)
            self.seconds += perf_counter() - start

        return timed


def die_after(mib: int | None) -> Callable[[int], None]:
    """A `moved` that kills this process, as a machine that is gone would, once so much was moved."""
    total = 0

    def moved(count: int) -> None:
        nonlocal total
        total += count
        if mib is not None and total >= mib * MIB:
            os.kill(os.getpid(), signal.SIGKILL)

    return moved


def main() -> int:
    """Do it once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("path", type=Path)
    parser.add_argument("url")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--calls", type=Path)
    parser.add_argument("--die-after", type=int, metavar="MIB")
    options = parser.parse_args()
    # Imports the modules of its backend; no request, no client.
    open_store(re.sub(r"^(\w+://[^/]*).*", r"\1", options.url))
    action, moved = ACTIONS[options.action], die_after(options.die_after)
    syncs = Syncs()
    with (
        sampled(options.profile) if options.profile else contextlib.nullcontext(),
        counted_calls(options.calls) if options.calls else contextlib.nullcontext(),
    ):
        measured(lambda: action(options.path, options.url, moved), lambda: {"synced_s": syncs.seconds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
