"""What a manager says of itself: while it runs, and when it is closed."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptmgr.core.errors import CkptmgrError, UploadError
from ckptmgr.transfer.status import UploadStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerStatus:
    """One look at a manager.

    Attributes:
        run: URL of the run.
        local_dir: the local tier.
        attempt: the one this process claimed; None before it saves.
        superseded: a newer attempt has been claimed meanwhile (I12).
        saved: saves committed to the local tier by this process.
        skipped: saves that the queue's rules did not let happen.
        save_failures: saves that failed; `last_save_error` says why the last one did.
        uploads: the queue, and what the uploads are doing.
    """

    run: str
    local_dir: str
    attempt: int | None = None
    superseded: bool = False
    saved: int = 0
    skipped: int = 0
    save_failures: int = 0
    last_save_error: str = ""
    uploads: UploadStatus = field(default_factory=UploadStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseReport:
    """What a manager did, and what it left behind.

    Attributes:
        pending: ids that stay in the local tier; the transfer process may still be at them, the next start uploads the rest.
        errors: what went wrong and was not polled before.
        saved, committed: saves of this process, and commits in the store (of earlier processes' saves, too).
        skipped, dropped: saves that were not made, and saves that gave way before they were in the store.
        save_failures, upload_failures: counted tries.
    """

    pending: tuple[str, ...] = ()
    errors: tuple[CkptmgrError, ...] = ()
    saved: int = 0
    committed: int = 0
    skipped: int = 0
    dropped: int = 0
    save_failures: int = 0
    upload_failures: int = 0

    @property
    def exit_code(self) -> int:
        """0 if everything that was saved is in the store, 6 if not."""
        return UploadError.exit_code if self.pending or self.dropped or self.save_failures else 0

    def __str__(self) -> str:
        troubles = {
            "not uploaded yet": len(self.pending),
            "skipped": self.skipped,
            "dropped": self.dropped,
            "failed to save": self.save_failures,
            f"failed upload{'' if self.upload_failures == 1 else 's'}": self.upload_failures,
        }
        told = [f"{number} {what}" for what, number in troubles.items() if number]
        return ", ".join([f"{self.saved} saved", f"{self.committed} committed in the store", *told])
