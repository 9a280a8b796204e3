"""The loop that sends a large file in parts, and goes on with an upload that an earlier try, or an earlier process, has left behind.

It knows nothing of S3 or OSS: it calls a `PartSender`. With a `PartJournal`, parts outlive a failure that may pass, an interruption and a kill: the
next try asks the store what it holds, and sends what is missing, or cannot be proven to be these bytes. Without one, and after a failure that
is for good, the upload is aborted, so that no invisible parts stay behind and are paid for.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from ckptmgr.backends.base import CrcKind
from ckptmgr.backends.body import BodyCutError, BodyDigest, FileBody
from ckptmgr.backends.localfile import SourceFile, SourcePass
from ckptmgr.backends.parts import Part, PartJournal, PartPlan, Receipt
from ckptmgr.backends.retry import Retrier
from ckptmgr.core.checksums import CrcFunction
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendError,
    CkptmgrError,
    IntegrityError,
    PermanentBackendError,
    SourceChangedError,
    TransientBackendError,
)

#: How often progress is told while nothing ends, in seconds; whoever is told may interrupt the upload by raising.
TICK_S = 0.2

log = logging.getLogger("ckptmgr.backends")


class PartSender(Protocol):
    """The calls of a multipart upload to one key. `send` is called from several threads.

    Attributes:
        crc_kind: the CRC that parts are proven by: of the store's kind, if this machine can compute it.
        crc: goes on with it.
        is_stores_crc: whether it is of the store's kind.
    """

    crc_kind: CrcKind
    crc: CrcFunction
    is_stores_crc: bool

    def begin(self) -> str:
        """Start an upload; its id."""

    def stored(self, upload_id: str) -> list[Receipt] | None:
        """The parts that the store holds; None if it does not know the upload (any more)."""

    def is_complete(self, size: int, crc: str | None) -> bool:
        """Whether the object is there and the store vouches that it has this size and this CRC of its kind."""

    def send(self, upload_id: str, part: Part, body: FileBody, digest: BodyDigest) -> Receipt | None:
        """Store one part; sent again it replaces the earlier one. None if the store does not know the upload (any more)."""

    def finish(self, upload_id: str, receipts: list[Receipt], size: int, crc: str | None) -> None:
        """Make the object visible, all parts at once, and check that the store holds so many bytes, with this CRC of its kind if one is known."""

    def abort(self, upload_id: str) -> None:
        """Throw the parts away."""


class UploadGoneError(TransientBackendError):
    """The store has forgotten the upload: a lifecycle rule or another tool aborted it. A further try begins a new one."""


def upload_parts(
    source: SourceFile,
    plan: PartPlan,
    sender: PartSender,
    *,
    what: str,
    retrier: Retrier,
    workers: int = 4,
    progress: Callable[[int], object] | None = None,
    journal: PartJournal | None = None,
) -> None:
    """Upload `source` in the parts of `plan`; the object becomes visible at the end or not at all.

    The file is read once, in order, by the calling thread, for its CRC; the parts are read again while they are sent, `workers` at a time, in blocks.

    Args:
        progress: called by the calling thread with the number of bytes sent since the last call, several times a second, also with 0. Bytes
            that are sent again count once; parts that the store held already do not count. What it raises ends the upload.
        journal: where the upload's id is kept; without it a failure of any kind aborts the upload.

    Raises:
        SourceChangedError: the file is not, or no longer, what was described; nothing became visible, the parts are dropped.
    """
    _PartUpload(source, plan, sender, what, retrier, workers, progress, journal).run()


class _PartUpload:
    def __init__(
        self,
        source: SourceFile,
        plan: PartPlan,
        sender: PartSender,
        what: str,
        retrier: Retrier,
        workers: int,
        progress: Callable[[int], object] | None,
        journal: PartJournal | None,
    ) -> None:
        self._source = source
        self._reading = SourcePass(source, sender.crc_kind, sender.crc)
        self._plan = plan
        self._sender = sender
        self._what = what
        self._retry = retrier
        self._workers = workers
        self._progress = progress
        self._journal = journal
        self._pending: dict[Future[Receipt], tuple[Part, FileBody]] = {}
        self._receipts: list[Receipt] = []
        # No further try of any part; and, harder: no further block.
        self._no_retries = threading.Event()
        self._cut = threading.Event()
        self._settled = self._told = 0
        self._told_at = 0.0
        # The store does not know the upload of the journal; and: all parts are sent.
        self._is_forgotten = self._finishing = False

    def run(self) -> None:
        upload_id, stored = self._take_up()
        expected = None if self._source.expected is None else getattr(self._source.expected, self._sender.crc_kind)
        if self._is_forgotten and expected is not None and self._is_complete(expected):
            # Completed by an earlier try whose answer was lost, or which was killed before it could say so.
            self._end()
            return
        if upload_id is None:
            upload_id = self._begin()
        try:
            self._send_all(upload_id, stored)
            crc = self._reading.finish()
            self._finishing = True
            receipts = sorted(self._receipts, key=lambda receipt: receipt.number)
            self._sender.finish(upload_id, receipts, self._source.size, crc if self._sender.is_stores_crc else None)
        except BaseException as error:
            if self._journal is None or self._is_lost(error):
                self._abandon(upload_id)
            else:
                log.info("the parts of %s that were sent are kept for the next try (upload %s)", self._what, upload_id)
            raise
        self._end()

    def _is_complete(self, crc: str) -> bool:
        return self._sender.is_stores_crc and self._sender.is_complete(self._source.size, crc)

    # --- beginning and ending ---------------------------------------------------------------------------------------------

    def _take_up(self) -> tuple[str | None, dict[int, Receipt]]:
        """The upload that an earlier try has left, with the parts that the store holds of it; None if there is none to go on with."""
        upload_id = self._journal.upload_id if self._journal is not None else None
        if upload_id is None:
            return None, {}
        try:
            stored = self._retry(f"look for parts of {self._what}", lambda: self._sender.stored(upload_id))
        except PermanentBackendError as error:
            # A right of its own, which many a policy does not grant.
            log.warning("the parts of %s that were sent cannot be listed, and are sent again: %s", self._what, error)
            self._abandon(upload_id)
            return None, {}
        if stored is None:
            self._is_forgotten = True
            return None, {}
        lengths = {part.number: part.length for part in self._plan}
        if any(receipt.size != lengths.get(receipt.number) for receipt in stored):
            log.info("%s is cut into other parts than before; its upload begins anew", self._what)
            self._abandon(upload_id)
            return None, {}
        return upload_id, {receipt.number: receipt for receipt in stored}

    def _begin(self) -> str:
        upload_id = self._retry(f"begin {self._what}", self._sender.begin)
        if self._journal is not None:
            try:
                self._journal.began(upload_id)
            except BaseException:
                self._abandon(upload_id)
                raise
        return upload_id

    def _is_lost(self, error: BaseException) -> bool:
        """Whether the parts are of no use to a later try."""
        if isinstance(error, SourceChangedError | UploadGoneError):
            return True
        if isinstance(error, IntegrityError):
            # One part that arrives damaged again and again says nothing against the others; a whole that is not what was sent does.
            return self._finishing or not isinstance(error, TransientBackendError)
        # Credentials are renewed, and then the upload goes on.
        return isinstance(error, PermanentBackendError) and not isinstance(error, AccessDeniedError)

    def _abandon(self, upload_id: str) -> None:
        try:
            self._sender.abort(upload_id)
        except CkptmgrError as error:
            log.warning("the abandoned parts of %s (upload %s) stay in the store: %s", self._what, upload_id, error)
            return
        self._end()

    def _end(self) -> None:
        if self._journal is not None and self._journal.upload_id is not None:
            self._journal.ended()

    # --- the parts --------------------------------------------------------------------------------------------------------

    def _send_all(self, upload_id: str, stored: dict[int, Receipt]) -> None:
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="ckptmgr-part")
        try:
            for part in self._plan:
                there = stored.get(part.number)
                by_md5 = there is not None and (there.crc is None or not self._sender.is_stores_crc)
                digest = self._digest(part, md5=by_md5)
                if there is not None and _proves(there, digest):
                    self._receipts.append(there)
                    continue
                while len(self._pending) >= self._workers:
                    self._settle()
                body = self._body(part)
                self._pending[pool.submit(self._send, upload_id, part, body, digest)] = part, body
            while self._pending:
                self._settle()
        except BaseException as error:
            self._no_retries.set()
            if self._journal is None or not isinstance(error, TransientBackendError):
                self._cut.set()
            # Parts under way would land after an abort and stay, and they read from a file that is about to be closed.
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        pool.shutdown()

    def _body(self, part: Part) -> FileBody:
        pace = self._retry.pace
        return FileBody(self._source, part.offset, part.length, crc=self._sender.crc, cut=self._cut, pace=pace)

    def _digest(self, part: Part, *, md5: bool) -> BodyDigest:
        sums = hashlib.md5(usedforsecurity=False) if md5 else None

        def see(block: memoryview) -> None:
            if sums is not None:
                sums.update(block)
            self._tell()

        seen = f"{self._reading.crc_of(part.length, see):016x}"
        crc = seen if self._sender.is_stores_crc else None
        return BodyDigest(crc=crc, seen=seen, md5=sums.hexdigest() if sums is not None else None)

    def _send(self, upload_id: str, part: Part, body: FileBody, digest: BodyDigest) -> Receipt:
        tries = 0

        def send() -> Receipt | None:
            nonlocal tries
            if tries and self._no_retries.is_set():
                raise BodyCutError(f"the upload of {self._what} has ended")
            body.restart(careful=tries > 0)
            tries += 1
            try:
                return self._sender.send(upload_id, part, body, digest)
            except BackendError as error:
                body.check(error)
                raise

        receipt = self._retry(f"part {part.number} of {self._what}", send, ended=self._no_retries, slot=True)
        if receipt is None:
            raise UploadGoneError(f"the store has forgotten the upload of {self._what}", hint="it begins anew")
        return receipt

    def _settle(self) -> None:
        """Wait for a part to end, or for some time."""
        done, _ = wait(self._pending, timeout=TICK_S, return_when=FIRST_COMPLETED)
        for future in done:
            part, _ = self._pending.pop(future)
            self._receipts.append(future.result())
            self._settled += part.length
        self._tell(now=bool(done))

    def _tell(self, *, now: bool = False) -> None:
        if self._progress is None or not (now or time.monotonic() - self._told_at >= TICK_S):
            return
        # A part that is sent again counts from its beginning; what was told of it already is not told twice.
        total = self._settled + sum(body.sent for _, body in self._pending.values())
        news, self._told, self._told_at = max(0, total - self._told), max(total, self._told), time.monotonic()
        self._progress(news)


def _proves(there: Receipt, digest: BodyDigest) -> bool:
    """Whether a stored part, of the right size, is certainly the one that was digested. An ETag is an MD5 in most stores, and never a proof by
    accident."""
    if there.crc is not None and digest.crc is not None:
        return there.crc == digest.crc
    return there.etag.strip('"').lower() == digest.md5
