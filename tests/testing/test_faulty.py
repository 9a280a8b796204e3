"""The fault-injecting backend does what its faults say, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ckptmgr.backends.local import LocalBackend
from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendTimeoutError,
    DiskFullError,
    ObjectExistsError,
    ThrottledError,
    TransientBackendError,
)
from ckptmgr.testing.faulty import (
    Call,
    ErrorMaker,
    FaultyBackend,
    StoreFault,
    denied,
    disk_full,
    throttled,
    timed_out,
    transient,
)

DEADLINE_S = 60.0


@pytest.fixture
def store() -> FaultyBackend:
    return FaultyBackend(LocalBackend())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (transient, TransientBackendError),
        (throttled, ThrottledError),
        (timed_out, BackendTimeoutError),
        (denied, AccessDeniedError),
        (disk_full, DiskFullError),
    ],
)
def test_a_failure_before_has_no_effect_and_one_after_has(
    store: FaultyBackend, tmp_path: Path, error: ErrorMaker, kind: type[Exception]
) -> None:
    """A request that was lost left nothing; one whose answer was lost did its work."""
    store.add(StoreFault(verb="pipe_file", path="*/a", error=error))
    store.add(StoreFault(verb="pipe_file", path="*/b", error=error, when="after"))
    for name in ("a", "b"):
        with pytest.raises(kind):
            store.pipe_file(f"{tmp_path}/{name}", b"1")
    assert os.listdir(tmp_path) == ["b"]
    store.pipe_file(f"{tmp_path}/a", b"1")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_selectors_skip_and_times(store: FaultyBackend, tmp_path: Path) -> None:
    """Of the calls that match verb and path, the chosen ones fail and the others do not."""
    fault = store.add(StoreFault(verb="pipe_file", path="*/m/*", skip=1, times=2, error=transient))
    outcomes = []
    for number in range(5):
        store.pipe_file(f"{tmp_path}/other{number}", b"1")
        try:
            store.pipe_file(f"{tmp_path}/m/{number}", b"1")
        except TransientBackendError:
            outcomes.append("failed")
        else:
            outcomes.append("done")
    assert outcomes == ["done", "failed", "failed", "done", "done"]
    assert fault.hits == 2
    store.cat_file(f"{tmp_path}/m/0")


def test_clear_lifts_everything(store: FaultyBackend, tmp_path: Path) -> None:
    """After `clear` the backend is as good as the one inside."""
    store.add(StoreFault(times=None, error=transient))
    with pytest.raises(TransientBackendError):
        store.find(str(tmp_path))
    store.clear()
    assert store.find(str(tmp_path)) == []


@pytest.mark.parametrize("fault", [StoreFault(truncate=4), StoreFault(corrupt=True)], ids=["truncate", "corrupt"])
def test_damage_on_write_is_silent_and_at_rest(store: FaultyBackend, tmp_path: Path, fault: StoreFault) -> None:
    """The store keeps other bytes than it was given, and says nothing, not even when a digest was promised."""
    data = b"0123456789"
    (tmp_path / "src").write_bytes(data)
    store.add(fault)
    store.pipe_file(f"{tmp_path}/piped", data)
    store.add(fault)
    store.put_file(f"{tmp_path}/src", f"{tmp_path}/put", expected=digest_bytes(data))
    expected = data[:4] if fault.truncate else b"0123446789"
    assert (tmp_path / "piped").read_bytes() == expected
    assert (tmp_path / "put").read_bytes() == expected


@pytest.mark.parametrize("fault", [StoreFault(truncate=4), StoreFault(corrupt=True)], ids=["truncate", "corrupt"])
def test_damage_on_read_leaves_the_store_alone(store: FaultyBackend, tmp_path: Path, fault: StoreFault) -> None:
    """A bad read hands out other bytes than are stored; the next read is good."""
    data = b"0123456789"
    (tmp_path / "f").write_bytes(data)
    expected = data[:4] if fault.truncate else b"0123446789"
    store.add(fault)
    assert store.cat_file(f"{tmp_path}/f") == expected
    store.add(fault)
    store.get_file(f"{tmp_path}/f", f"{tmp_path}/got")
    assert (tmp_path / "got").read_bytes() == expected
    assert store.cat_file(f"{tmp_path}/f") == data


def test_a_store_that_lies_about_create(store: FaultyBackend, tmp_path: Path) -> None:
    """A store that ignores the condition overwrites and reports success."""
    (tmp_path / "src").write_bytes(b"third")
    store.pipe_file(f"{tmp_path}/f", b"first", mode="create")
    with pytest.raises(ObjectExistsError):
        store.pipe_file(f"{tmp_path}/f", b"second", mode="create")
    store.add(StoreFault(ignore_create=True, times=None))
    store.pipe_file(f"{tmp_path}/f", b"second", mode="create")
    assert (tmp_path / "f").read_bytes() == b"second"
    store.put_file(f"{tmp_path}/src", f"{tmp_path}/f", mode="create")
    assert (tmp_path / "f").read_bytes() == b"third"


@pytest.mark.parametrize(("when", "there"), [("before", False), ("after", True)])
def test_a_held_call_waits_at_its_gate(store: FaultyBackend, tmp_path: Path, when: str, there: bool) -> None:
    """A call can be stopped before or after its effect, watched, and let go; others pass meanwhile."""
    fault = store.add(StoreFault(verb="pipe_file", path="*/held", hold=True, when=when))  # type: ignore[arg-type]
    thread = threading.Thread(target=store.pipe_file, args=(f"{tmp_path}/held", b"1"), daemon=True)
    thread.start()
    assert fault.reached.wait(DEADLINE_S)
    assert (tmp_path / "held").exists() is there
    assert thread.is_alive()
    store.pipe_file(f"{tmp_path}/other", b"1")
    fault.release()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert (tmp_path / "held").read_bytes() == b"1"


_KILLED = """
import sys
from ckptmgr.backends.local import LocalBackend
from ckptmgr.testing.faulty import FaultyBackend, StoreFault
store = FaultyBackend(LocalBackend())
store.add(StoreFault(skip=1, kill=True, when=sys.argv[2]))
for name in "abc":
    store.pipe_file(f"{sys.argv[1]}/{name}", b"1")
"""


@pytest.mark.parametrize(("when", "left"), [("before", ["a"]), ("after", ["a", "b"])])
def test_kill_at_the_nth_operation(tmp_path: Path, when: str, left: list[str]) -> None:
    """The process dies by SIGKILL at exactly the chosen operation."""
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path), when], timeout=DEADLINE_S, check=False, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == left


def test_the_log_names_every_call(store: FaultyBackend, tmp_path: Path) -> None:
    """Verb, path and bytes of each call are recorded, failed ones included; removals one by one."""
    (tmp_path / "src").write_bytes(b"123")
    store.pipe_file(f"{tmp_path}/a", b"12345")
    store.put_file(f"{tmp_path}/src", f"{tmp_path}/b")
    store.cat_file(f"{tmp_path}/a", 1, 3)
    store.add(StoreFault(error=transient))
    with pytest.raises(TransientBackendError):
        store.info(f"{tmp_path}/a")
    store.rm_files([f"{tmp_path}/a", f"{tmp_path}/b"])
    assert store.log == [
        Call(verb="pipe_file", path=f"{tmp_path}/a", size=5),
        Call(verb="put_file", path=f"{tmp_path}/b", size=3),
        Call(verb="cat_file", path=f"{tmp_path}/a", size=2),
        Call(verb="info", path=f"{tmp_path}/a"),
        Call(verb="rm_file", path=f"{tmp_path}/a"),
        Call(verb="rm_file", path=f"{tmp_path}/b"),
    ]
    assert [call.path for call in store.calls("rm_file", "*/b")] == [f"{tmp_path}/b"]


def test_every_operation_can_be_counted_through(tmp_path: Path) -> None:
    """The n-th operation of a sequence fails for n = 1, 2, … until no fault is reached any more."""

    def sequence(store: FaultyBackend, root: str) -> None:
        store.pipe_file(f"{root}/a", b"1")
        store.cat_file(f"{root}/a")
        store.rm_file(f"{root}/a")

    for step in range(10):
        store = FaultyBackend(LocalBackend())
        fault = store.add(StoreFault(skip=step, error=transient))
        try:
            sequence(store, f"{tmp_path}/{step}")
        except TransientBackendError:
            assert fault.hits == 1
        else:
            break
    assert step == 3
    assert fault.hits == 0
