"""A large object copied within its store, in parts: side by side, each tried again by itself, and dropped as a whole when it is given up.

Stores copy at a rate of their own and say nothing meanwhile: one request for a large object would look like a connection that stands still.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from ckptmgr.backends.objectrequests import Stored
from ckptmgr.backends.objectupload import _DAMAGED, ObjectUploads
from ckptmgr.backends.parts import Part, PartPlan, Receipt
from ckptmgr.backends.retry import Retrier
from ckptmgr.core.errors import (
    BackendError,
    CkptmgrError,
    ObjectNotFoundError,
    SizeMismatchError,
    TransientBackendError,
)

log = logging.getLogger("ckptmgr.backends")


def copy_parts(
    requests: ObjectUploads,
    source: str,
    target: str,
    found: Stored,
    plan: PartPlan,
    *,
    retrier: Retrier,
    workers: int,
) -> None:
    """Copy the object `source`, which `found` describes, to `target`; it becomes visible at the end, or not at all.

    Raises:
        ChecksumMismatchError: the store has made something else of it (a TransientBackendError too); nothing stays at `target`.
        TransientBackendError: `source` was replaced meanwhile, and nothing stays at `target`; or the outcome is unknown.
    """
    _Copy(requests, source, target, found, retrier).run(plan, workers)


class _Copy:
    def __init__(self, requests: ObjectUploads, source: str, target: str, found: Stored, retrier: Retrier) -> None:
        self._requests = requests
        self._source = source
        self._target = target
        self._found = found
        self._retry = retrier
        self._what = f"the copy {requests._url(target)}"
        self._before = self._look()
        self._ended = threading.Event()
        self._failures: list[BaseException] = []

    def run(self, plan: PartPlan, workers: int) -> None:
        upload_id = self._retry(f"begin {self._what}", lambda: self._requests._begin(self._target, "overwrite"))
        try:
            receipts = self._copy_all(upload_id, plan, workers)
            self._complete(upload_id, receipts)
        except BaseException:
            self._abandon(upload_id)
            raise
        self._check()

    def _copy_all(self, upload_id: str, plan: PartPlan, workers: int) -> list[Receipt]:
        with ThreadPoolExecutor(min(workers, plan.count), thread_name_prefix="ckptmgr-copy") as pool:
            futures = [pool.submit(self._copy, upload_id, part) for part in plan]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                # Those under way would land after an abort: the pool's end waits for them.
                self._ended.set()
                for future in futures:
                    future.cancel()
        if self._failures:
            raise self._failures[0]
        return [future.result() for future in futures]

    def _copy(self, upload_id: str, part: Part) -> Receipt:
        def copy() -> Receipt:
            return self._requests._copy_part(self._target, upload_id, part, self._source)

        try:
            if self._ended.is_set():
                raise TransientBackendError(f"{self._what} was given up")
            return self._retry(f"part {part.number} of {self._what}", copy, ended=self._ended, slot=True)
        except BaseException as error:
            # The first is the cause; what follows fails for having been ended.
            self._failures.append(error)
            self._ended.set()
            raise

    def _complete(self, upload_id: str, receipts: list[Receipt]) -> None:
        tries = 0

        def complete() -> bool:
            nonlocal tries
            tries += 1
            try:
                self._requests._complete(self._target, upload_id, receipts, self._found.crc, "overwrite")
            except BackendError as error:
                # These parts will never amount to anything else.
                if getattr(error, "code", "") in _DAMAGED:
                    return False
                # An earlier try may have been made, and its answer lost.
                if tries == 1 or not self._is_made():
                    raise
            return True

        if not self._retry(f"complete {self._what}", complete):
            raise self._requests._damaged(self._target, self._found.crc, "another")

    def _is_made(self) -> bool:
        now, before = self._look(), self._before
        if now is None or now.size != self._found.size:
            return False
        if self._found.crc is not None and now.crc is not None:
            return now.crc == self._found.crc
        return before is None or now.etag != before.etag

    def _check(self) -> None:
        """Compare what the store has made with what it was made from."""
        made = self._requests._head(self._target)
        if made.size is not None and made.size != self._found.size:
            self._requests.rm_file(self._target)
            text = f"{self._what} of {self._found.size} bytes has {made.size}"
            raise SizeMismatchError(text, expected=self._found.size, actual=made.size, key=self._target)
        if self._found.crc is not None and made.crc is not None:
            if made.crc != self._found.crc:
                self._requests.rm_file(self._target)
                raise self._requests._damaged(self._target, self._found.crc, made.crc)
        elif self._requests._head(self._source).etag != self._found.etag:
            # Parts of two versions of an object are neither of them.
            self._requests.rm_file(self._target)
            facts = {"backend": self._requests.kind, "operation": "copy", "key": self._target}
            raise TransientBackendError(
                f"{self._requests._url(self._source)} was replaced while it was copied", **facts
            )

    def _look(self) -> Stored | None:
        try:
            return self._requests._head(self._target)
        except ObjectNotFoundError:
            return None

    def _abandon(self, upload_id: str) -> None:
        try:
            self._requests._abort(self._target, upload_id)
        except CkptmgrError as error:
            log.warning("the parts of %s (upload %s) stay in the store: %s", self._what, upload_id, error)
