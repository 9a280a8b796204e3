"""A backend that fails on demand, between ckptmgr and any real backend.

    store = FaultyBackend(LocalBackend())
    lost = store.add(StoreFault(verb="pipe_file", path="*/manifests/*", when="after", error=transient))
    ...                                   # the next commit is made, and its answer lost
    assert lost.hits == 1

The faults are those of the verb's caller's view. To fail single requests inside an upload in parts, use the faults of the servers in
`ckptmgr.testing.servers`. To stop at every operation in turn, count up `skip` until `hits` stays 0.
"""

from __future__ import annotations

import fnmatch
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ckptmgr.backends.base import Backend, WriteMode
from ckptmgr.backends.wrap import WrappedBackend
from ckptmgr.core.checksums import Digests, digest_bytes
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendError,
    BackendTimeoutError,
    ChecksumMismatchError,
    DiskFullError,
    SizeMismatchError,
    ThrottledError,
    TransientBackendError,
)

T = TypeVar("T")
When = Literal["before", "after"]
ErrorMaker = Callable[[str, str], BackendError]

#: No held call waits longer than this, so that a test which forgets to release it fails instead of hanging.
HOLD_LIMIT_S = 60.0


def transient(verb: str, path: str) -> BackendError:
    """The store answered with a failure that may pass."""
    return TransientBackendError(f"injected: {verb} {path}", operation=verb, key=path)


def throttled(verb: str, path: str) -> BackendError:
    """The store asks for fewer requests."""
    return ThrottledError(f"injected: {verb} {path}", operation=verb, key=path, retry_after_s=0.01)


def timed_out(verb: str, path: str) -> BackendError:
    """No answer came in time."""
    return BackendTimeoutError(f"injected: {verb} {path}", operation=verb, key=path)


def denied(verb: str, path: str) -> BackendError:
    """The store refuses these credentials."""
    return AccessDeniedError(f"injected: {verb} {path}", operation=verb, key=path)


def disk_full(verb: str, path: str) -> BackendError:
    """The store has no room left."""
    return DiskFullError(f"injected: {verb} {path}", operation=verb, key=path, free_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFault:
    """Which calls go wrong, and how. Without a selector it is for every call.

    Attributes:
        verb: only this verb (`pipe_file`, `rm_file`, …); None for all.
        path: only paths that match this shell pattern (`*` also matches `/`); None for all.
        skip: how many matching calls pass first.
        times: how many calls are hit; None for no end.
        error: raise what this makes of verb and path.
        when: raise, hold or kill before the call has its effect, or after it (a lost acknowledgement).
        hold: wait for `ActiveStoreFault.release()`.
        kill: end this process with SIGKILL.
        truncate: a write stores, or a read hands out, only that many bytes.
        corrupt: a write stores, or a read hands out, one flipped bit in the middle.
        ignore_create: `mode="create"` overwrites, as on a store that ignores the condition.
    """

    verb: str | None = None
    path: str | None = None
    skip: int = 0
    times: int | None = 1
    error: ErrorMaker | None = None
    when: When = "before"
    hold: bool = False
    kill: bool = False
    truncate: int | None = None
    corrupt: bool = False
    ignore_create: bool = False

    def damage(self, data: bytes) -> bytes:
        """What becomes of bytes under this fault."""
        if self.truncate is not None:
            data = data[: self.truncate]
        if self.corrupt and data:
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call that reached the faulty backend. `size` counts the bytes that a write was given or a read returned."""

    verb: str
    path: str
    size: int = 0


class ActiveStoreFault:
    """A fault in force.

    Attributes:
        fault: what it does.
        hits: how many calls it has hit.
        reached: set once a call was hit.
    """

    def __init__(self, fault: StoreFault) -> None:
        self.fault = fault
        self.hits = 0
        self.reached = threading.Event()
        self._released = threading.Event()
        self._seen = 0

    def release(self) -> None:
        """Let every held call, now and later, go on."""
        self._released.set()

    def wants(self, verb: str, path: str) -> bool:
        """Whether this call is hit; counts it. The caller holds the backend's lock."""
        fault = self.fault
        if fault.verb not in (None, verb) or (fault.path is not None and not fnmatch.fnmatchcase(path, fault.path)):
            return False
        self._seen += 1
        if self._seen <= fault.skip or (fault.times is not None and self.hits >= fault.times):
            return False
        self.hits += 1
        return True

    def strike(self, when: When, verb: str, path: str) -> None:
        """Do what the fault does at this moment of a call."""
        if self.fault.when != when:
            return
        self.reached.set()
        if self.fault.hold and not self._released.wait(HOLD_LIMIT_S):
            raise AssertionError(f"{verb} {path} was held and never released")
        if self.fault.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault.error is not None:
            raise self.fault.error(verb, path)


class FaultyBackend(WrappedBackend):
    """Passes every call on to `inner`, except for the faults in force. Safe from any thread.

    Attributes:
        log: every call that arrived, in order.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.log: list[Call] = []
        self._faults: list[ActiveStoreFault] = []
        self._lock = threading.Lock()

    def add(self, fault: StoreFault) -> ActiveStoreFault:
        """Put a fault in force. Rules are asked in the order they were added; the first that wants a call has it alone."""
        active = ActiveStoreFault(fault)
        with self._lock:
            self._faults.append(active)
        return active

    def clear(self) -> None:
        """Lift all faults and release what they hold; the log stays."""
        with self._lock:
            faults, self._faults = self._faults, []
        for active in faults:
            active.release()

    def calls(self, verb: str | None = None, path: str = "*") -> list[Call]:
        """The logged calls of `verb` (None for all) on paths that match."""
        with self._lock:
            return [call for call in self.log if verb in (None, call.verb) and fnmatch.fnmatchcase(call.path, path)]

    def _around(self, verb: str, path: str, call: Callable[[], T]) -> T:
        return self._struck(verb, path, 0, lambda fault: call())

    def _struck(self, verb: str, path: str, size: int, call: Callable[[StoreFault], T]) -> T:
        with self._lock:
            active = next((one for one in self._faults if one.wants(verb, path)), None)
            index = len(self.log)
            self.log.append(Call(verb=verb, path=path, size=size))
        if active is None:
            result = call(_NO_FAULT)
        else:
            active.strike("before", verb, path)
            result = call(active.fault)
            active.reached.set()
            active.strike("after", verb, path)
        if isinstance(result, bytes):
            with self._lock:
                self.log[index] = Call(verb=verb, path=path, size=len(result))
        return result

    def pipe_file(self, path: str, value: bytes, mode: WriteMode = "overwrite", **kwargs: Any) -> None:
        def call(fault: StoreFault) -> None:
            self.inner.pipe_file(path, fault.damage(value), _mode(fault, mode), **kwargs)

        self._struck("pipe_file", path, len(value), call)

    def put_file(
        self,
        lpath: str,
        rpath: str,
        callback: Any = None,
        mode: WriteMode = "overwrite",
        *,
        expected: Digests | None = None,
        **kwargs: Any,
    ) -> None:
        def call(fault: StoreFault) -> None:
            if fault.truncate is None and not fault.corrupt:
                self.inner.put_file(lpath, rpath, callback, _mode(fault, mode), expected=expected, **kwargs)
                return
            # Stored damaged without a complaint, as by a store that does not verify: so without `expected`.
            with tempfile.NamedTemporaryFile() as damaged, open(lpath, "rb") as source:
                damaged.write(fault.damage(source.read()))
                damaged.flush()
                self.inner.put_file(damaged.name, rpath, callback, _mode(fault, mode), **kwargs)

        self._struck("put_file", rpath, os.path.getsize(lpath) if os.path.exists(lpath) else 0, call)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        return self._struck(
            "cat_file", path, 0, lambda fault: fault.damage(self.inner.cat_file(path, start, end, **kwargs))
        )

    def get_file(
        self, rpath: str, lpath: str, callback: Any = None, *, expected: Digests | None = None, **kwargs: Any
    ) -> bool:
        def call(fault: StoreFault) -> bool:
            if fault.truncate is None and not fault.corrupt:
                return self.inner.get_file(rpath, lpath, callback, expected=expected, **kwargs)
            self.inner.get_file(rpath, lpath, callback, **kwargs)
            with open(lpath, "r+b") as target:
                data = fault.damage(target.read())
                target.seek(0)
                target.write(data)
                target.truncate()
            if expected is not None and len(data) != expected.size:
                os.unlink(lpath)
                raise SizeMismatchError(f"injected: {rpath} arrived short", expected=expected.size, actual=len(data))
            if expected is not None and (actual := digest_bytes(data).blake3) != expected.blake3:
                os.unlink(lpath)
                raise ChecksumMismatchError(
                    f"injected: {rpath} arrived damaged", key=rpath, expected=expected.blake3, actual=actual
                )
            return False

        return self._struck("get_file", rpath, 0, call)

    def rm_files(self, paths: Sequence[str]) -> None:
        """One call per path, so that a fault can be aimed at, and the log shows, each of them."""
        for path in paths:
            self.rm_file(path)


_NO_FAULT = StoreFault()


def _mode(fault: StoreFault, mode: WriteMode) -> WriteMode:
    return "overwrite" if fault.ignore_create else mode
