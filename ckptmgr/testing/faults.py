"""Faults that a test store injects on demand: the rules, and the gate that holds a request in the middle.

    active = server.faults.add(Fault(method="PUT", key="*/manifests/*", drop="after"))
    ...                                   # the next such PUT is applied, its answer is lost
    assert active.hits == 1

A `Fault` is a value: which requests it is for and what happens to them. Adding one gives an `ActiveFault`, which counts, tells
when it was reached, and releases what it holds. Rules are asked in the order they were added and the first that wants a
request has it alone; a request that is skipped by one rule (`skip`) is offered to the next.
"""

from __future__ import annotations

import contextlib
import fnmatch
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

When = Literal["before", "after"]
HoldAt = Literal["before", "after", "body"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a rule may look at: one request, before anything was done with it.

    Attributes:
        method: GET, PUT, …
        bucket: "" for a request to the service itself.
        key: the object key, decoded; "" for a request to a bucket.
        query: the query parameters, signatures included.
        headers: the request headers, names in lower case.
    """

    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Which requests fail, and how. Without a selector it is for every request.

    Several effects combine, in this order: `latency_s`, `hold="before"`, `drop="before"`, `ignore_headers`, `corrupt_request`, `status` (the
    operation is *not* applied) or the operation itself, `hold="after"`, `drop="after"`, `corrupt`, `hold="body"`, `cut_body`; or `trickle_bytes_s`.

    Attributes:
        method: only this method; None for all.
        key: only keys that match this shell pattern (`*` also matches `/`); None for all.
        query: only requests with this query parameter (`"uploadId"`, `"partNumber"`, `"list-type"`); None for all.
        match: only requests for which this returns True; asked last.
        times: how many requests are hit; None for no end.
        skip: how many matching requests pass first.
        status: answer with this HTTP status and an error body, without applying the operation. 200 is allowed: S3 reports
            some failures of CompleteMultipartUpload and CopyObject in the body of a 200.
        code: the error code in that body ("SlowDown", "InternalError", "ExpiredToken", "RequestTimeTooSkewed", …).
        message: the message in that body.
        document: this body instead, as it is (a DeleteResult that names keys which could not be deleted).
        retry_after_s: adds a Retry-After header, whole seconds.
        latency_s: wait this long first; when the server stops meanwhile, the connection is reset.
        hold: stop the request until `ActiveFault.release()`: "before" it is applied, "after" it was applied but nothing is
            answered, or in the middle of the answer's "body", as a stalled connection would.
        drop: reset the connection without an answer: "before" the operation is applied, or "after" (a lost acknowledgement).
        ignore_headers: do as if these request headers (in lower case) had not been sent: a store, or a cache before it, that does not know "range".
        corrupt_request: flip one bit in the middle of the body that arrived, as a bad network card would.
        corrupt: flip one bit in the middle of the body that is sent, headers unchanged.
        cut_body: send only that many bytes of the answer's body, then reset the connection; the client may find even fewer.
        cut_by: how `cut_body` ends the connection: by a "reset", or by its "end", after which all that was sent still arrives.
        trickle_bytes_s: send the second half of the answer's body at that rate, without ever standing still, until `ActiveFault.release()`.
    """

    method: str | None = None
    key: str | None = None
    query: str | None = None
    match: Callable[[Seen], bool] | None = None
    times: int | None = 1
    skip: int = 0
    status: int | None = None
    code: str = "InternalError"
    message: str = "injected by the test"
    document: bytes | None = None
    retry_after_s: int | None = None
    latency_s: float = 0.0
    hold: HoldAt | None = None
    drop: When | None = None
    ignore_headers: tuple[str, ...] = ()
    corrupt_request: bool = False
    corrupt: bool = False
    cut_body: int | None = None
    cut_by: Literal["reset", "end"] = "reset"
    trickle_bytes_s: float | None = None

    def wants(self, seen: Seen) -> bool:
        """Whether this fault is for the request, its counters aside."""
        return (
            (self.method is None or self.method == seen.method)
            and (self.key is None or fnmatch.fnmatchcase(seen.key, self.key))
            and (self.query is None or self.query in seen.query)
            and (self.match is None or self.match(seen))
        )


class ActiveFault:
    """A fault in force. Its attributes may be read from any thread.

    Attributes:
        fault: the rule.
        hits: how many requests it has been applied to.
        reached: set once the first request is at the point where the fault acts (for `hold`: while it is held there).
    """

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.hits = 0
        self.reached = threading.Event()
        self._released = threading.Event()
        self._passed = 0

    def release(self) -> None:
        """Let every request that is held here go on, now and later."""
        self._released.set()

    @property
    def is_spent(self) -> bool:
        """No further request will be hit."""
        return self.fault.times is not None and self.hits >= self.fault.times

    def take(self, seen: Seen) -> bool:
        """Count the request and say whether it is hit. The caller holds the lock of `Faults`."""
        if self.is_spent or not self.fault.wants(seen):
            return False
        if self._passed < self.fault.skip:
            self._passed += 1
            return False
        self.hits += 1
        return True

    def wait(self, timeout_s: float) -> bool:
        """Stand at the gate until it is released; False when that took longer than `timeout_s`."""
        self.reached.set()
        return self._released.wait(timeout_s)


class Faults:
    """The rules in force on one server. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: list[ActiveFault] = []

    def add(self, fault: Fault) -> ActiveFault:
        """Put a rule in force, behind those already there."""
        active = ActiveFault(fault)
        with self._lock:
            self._active.append(active)
        return active

    @contextlib.contextmanager
    def injected(self, fault: Fault) -> Iterator[ActiveFault]:
        """A rule in force for the length of a `with` block; what it still holds at the end is released."""
        active = self.add(fault)
        try:
            yield active
        finally:
            self.remove(active)

    def remove(self, active: ActiveFault) -> None:
        """Take one rule out of force and release what it holds; nothing happens when it is already out."""
        with self._lock:
            self._active = [other for other in self._active if other is not active]
        active.release()

    def clear(self) -> None:
        """Take all rules out of force and release everything that they hold."""
        with self._lock:
            active, self._active = self._active, []
        for each in active:
            each.release()

    def pick(self, seen: Seen) -> ActiveFault | None:
        """The rule that this request falls under, counted; None when it is served normally."""
        with self._lock:
            return next((active for active in self._active if active.take(seen)), None)
