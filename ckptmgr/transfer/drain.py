"""Drain: upload what is pending in a local tier, newest first, once; for the command line. Hosts the replication loop in the calling thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptmgr.core.errors import CkptmgrError, PermanentBackendError
from ckptmgr.core.layout import Stem
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.transfer.hosting import HostFile
from ckptmgr.transfer.loop import ReplicationLoop
from ckptmgr.transfer.messages import Busy, Committed, Event, Failed
from ckptmgr.transfer.tally import Tally
from ckptmgr.transfer.upload import REFUSALS


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """What one drain did; `pending` is what is still only on this disk, newest first, and `errors` why.

    What is pending without an error is in the hands of another process. A save that was pruned in the store meanwhile, or that another process
    committed, is in neither tuple.
    """

    committed: tuple[Stem, ...] = ()
    pending: tuple[Stem, ...] = ()
    errors: dict[Stem, CkptmgrError] = field(default_factory=dict)


def drain(
    tier: LocalTier,
    run: RunDirectory,
    *,
    wait_s: float = 0.0,
    stop: threading.Event | None = None,
    busy: Callable[[Stem], None] = lambda stem: None,
    clock: Callable[[], float] = time.monotonic,
) -> Drained:
    """Upload everything pending in `tier` for `run`. A failure of one does not stop the others, unless two are refused: then it is the store that
    refuses, for wrong credentials or a missing bucket.

    Args:
        wait_s: how long to wait, all in all, for saves that another process has in its hands; it may yet fail, and then they are uploaded here.
        stop: ends it at once when it is set; what is not in the store yet stays pending. `run`'s backend should watch it, too.
        busy: told of each of those, once.
    """
    tally, committed, errors = Tally(), list[Stem](), dict[Stem, CkptmgrError]()
    file = HostFile(tier, run.url, "drain", tally)

    def report(event: Event) -> None:
        tally.note(event)
        file.update(event)
        if isinstance(event, Committed):
            committed.append(event.stem)
        elif isinstance(event, Failed) and event.stem is not None:
            errors[event.stem] = event.error
        elif isinstance(event, Busy):
            busy(event.stem)

    until = clock() + wait_s
    loop = ReplicationLoop(
        tier,
        run,
        stop=stop or threading.Event(),
        report=report,
        retries=lambda: run.fs.retries,
        abandoned=lambda: clock() >= until,
        clock=clock,
    )
    loop.close()
    try:
        loop.run()
    finally:
        file.close()
    pending = tuple(manifest.stem for manifest, _ in tier.pending(run.url))
    refused = [error for error in errors.values() if isinstance(error, PermanentBackendError)]
    if len(refused) >= REFUSALS:  # then the others were not even tried
        errors = {stem: errors.get(stem, refused[-1]) for stem in pending}
    return Drained(
        committed=tuple(committed),
        pending=pending,
        errors={stem: error for stem, error in errors.items() if stem in pending},
    )
