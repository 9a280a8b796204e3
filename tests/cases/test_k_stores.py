"""Cases of stores that fail while they are looked at, and of writes that fail half-way."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptmgr.testing.faults import Fault, Seen
from ckptmgr.testing.stores import Store

Cli = Callable[..., subprocess.CompletedProcess[str]]
Ask = Callable[..., Any]
Tree = Callable[..., Path]
MakeStore = Callable[[str], Store]

# Goes up in three parts.
LARGE = (10 << 20) + 100_000


@pytest.fixture
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without the waits in between."""
    monkeypatch.setattr("ckptmgr.backends.retry._JITTER", SimpleNamespace(uniform=lambda low, high: 0.0))


@pytest.fixture(params=["moto", "oss"])
def store(request: pytest.FixtureRequest, make_store: MakeStore) -> Store:
    """Both dialects, with faults."""
    return make_store(request.param)


# --- K091 -----------------------------------------------------------------------------------------------------------------

# Whoever looks whether something is there: listings and HEADs.
LOOKS = {
    "list": lambda seen: seen.method == "GET" and not seen.key,
    "head": lambda seen: seen.method == "HEAD",
}
FAILURES: list[dict[str, Any]] = [{"status": 503, "code": "SlowDown"}, {"status": 500}, {"drop": "before"}]


@pytest.mark.usefixtures("_no_waiting")
@pytest.mark.parametrize("look", LOOKS)
def test_k091_a_look_that_fails_is_not_taken_for_nothing_there(
    store: Store, push_steps: Callable[..., list[str]], cli_here: Cli, tmp_path: Path, look: str
) -> None:
    """503 three times, 500 twice, then a dropped connection, to every listing or HEAD: as long as it goes on the commands say that the store is
    unavailable, and COMMAND does not start; where tries are left they are used, and the newest of 100..300 is found."""
    run = f"{store.url}/run"
    ids = push_steps(run, 100, 200, 300)
    before, faults = store.snapshot(), store.server.faults

    def inject(times: list[int | None]) -> None:
        for failure, count in zip(FAILURES, times, strict=True):
            if count != 0:
                faults.add(Fault(match=LOOKS[look], times=count, **failure))

    def resume(to: str) -> subprocess.CompletedProcess[str]:
        return cli_here("resume", run, "--or-start", "--to", tmp_path / to, "--", "touch", tmp_path / f"{to}-started")

    # Five failures in a row are outlived by one request.
    inject([3, 2, 0])
    assert resume("five").returncode == 0
    assert (tmp_path / "five" / "model.bin").read_bytes().endswith(b"300")
    inject([3, 1, 1])
    assert [row["id"] for row in json.loads(cli_here("ls", run, "--json").stdout)["checkpoints"]] == ids
    # Those that nobody met, for not every command asks both.
    faults.clear()
    # Six in a row may be one too many; then it says so. And it is never something else that it says.
    for number in range(2):
        inject([3, 2, 1])
        done = resume(f"six-{number}")
        faults.clear()
        assert done.returncode in (0, 4), done.stderr
        assert (tmp_path / f"six-{number}-started").exists() is (done.returncode == 0)
        if done.returncode == 0:
            assert (tmp_path / f"six-{number}" / "model.bin").read_bytes().endswith(b"300")
        else:
            assert "gave up after 6 tries" in done.stderr
    if look == "list":
        inject([0, None, 0])
        for words in (["ls", run], ["ls", store.url], ["resume", run, "--or-start", "--", "touch", tmp_path / "not"]):
            done = cli_here(*words)
            assert done.returncode == 4, done.stderr
            assert done.stdout == ""
            assert "gave up after" in done.stderr
            assert "no checkpoint" not in done.stderr
    assert not (tmp_path / "not").exists()
    faults.clear()
    assert store.snapshot() == before


# --- K029 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_no_waiting")
@pytest.mark.parametrize(
    ("how", "size"),
    [("unreadable", 100_000), ("refused", 100_000), *((how, LARGE) for how in ("unreadable", "truncated", "refused"))],
)
def test_k029_a_write_that_fails_half_way_is_not_closed_as_complete(
    store: Store, tree: Tree, cli_here: Cli, ask: Ask, monkeypatch: pytest.MonkeyPatch, how: str, size: int
) -> None:
    """optimizer.pt cannot be read beyond its middle, is truncated while it goes up, or its second part is refused for good: the push fails and names it,
    nothing is committed, no short object lies there, no upload is left pending; and once it is mended the repeat commits."""
    monkeypatch.setenv("CKPTMGR_PART_SIZE", "5MiB")
    run, data = f"{store.url}/run", os.urandom(size)
    directory = tree("checkpoint-100", {"model.bin": b"model", "optimizer.pt": data})
    victim = directory / "optimizer.pt"

    def truncate(seen: Seen) -> bool:
        os.truncate(victim, size // 2)
        return False

    def is_second(seen: Seen) -> bool:
        return seen.query.get("partNumber", "2") == "2"

    if how == "unreadable":
        _unreadable(monkeypatch, victim, size // 2)
    elif how == "truncated":
        store.server.faults.add(Fault(method="POST", key="*/optimizer.pt", query="uploads", match=truncate))
    else:
        refuse = Fault(
            method="PUT", key="*/optimizer.pt", match=is_second, status=400, code="InvalidRequest", times=None
        )
        store.server.faults.add(refuse)
    done = cli_here("push", directory, run)
    assert done.returncode == {"unreadable": 4, "truncated": 5, "refused": 4}[how], done.stderr
    assert "optimizer.pt" in done.stderr
    assert store.keys("run/manifests/") == []
    assert store.keys("run/checkpoints/") == [key for key in store.keys("run/") if key.endswith("/model.bin")]
    assert store.server.raw_uploads(store.url.split("/")[2]) == {}

    store.server.faults.clear()
    monkeypatch.undo()
    for name, value in store.env.items():
        monkeypatch.setenv(name, value)
    victim.write_bytes(data)
    ask("push", directory, run)
    (stem,) = [row["id"] for row in ask("ls", run)["checkpoints"]]
    assert store.get(f"run/checkpoints/{stem}/optimizer.pt") == data


def _unreadable(monkeypatch: pytest.MonkeyPatch, path: Path, beyond: int) -> None:
    """Reading that file fails from there on, once it was read to its end: as a disk that breaks between the look and the upload."""
    preadv, pread, state = os.preadv, os.pread, {"described": False}
    size = path.stat().st_size

    def check(fd: int, offset: int, length: int) -> None:
        if os.fstat(fd).st_ino != path.stat().st_ino:
            return
        if state["described"] and offset + length > beyond:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        state["described"] |= offset + length >= size

    def read(fd: int, length: int, offset: int) -> bytes:
        check(fd, offset, length)
        return pread(fd, length, offset)

    def read_into(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        check(fd, offset, sum(map(len, buffers)))
        return preadv(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "pread", read)
    monkeypatch.setattr(os, "preadv", read_into)
