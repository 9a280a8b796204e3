"""How a manager saves and uploads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptmgr.backends.base import Backend
from ckptmgr.backends.retry import RetryPolicy
from ckptmgr.core.errors import ConfigError
from ckptmgr.core.retention import RetentionRule
from ckptmgr.training.checking import require_arguments, require_one_of, require_seconds
from ckptmgr.transfer.alarm import FailureBudget
from ckptmgr.transfer.queue import QueueRules
from ckptmgr.transfer.tidying import Retention


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Arguments of `CheckpointManager`, under their names there, with defaults filled in.

    Raises:
        ConfigError: one of them makes no sense.
    """

    keep: RetentionRule | None
    keep_local: RetentionRule
    on_existing: str
    on_save_error: str
    queue: QueueRules
    failures: FailureBudget
    strict: bool
    transfer: str
    linger_s: float
    close_timeout_s: float
    retry: RetryPolicy
    retry_after_s: float
    wrap_backend: Callable[[Backend], Backend] | None
    prometheus: Path | None

    def __post_init__(self) -> None:
        require_one_of("on_existing", self.on_existing, "refuse", "new-lineage")
        require_one_of("on_save_error", self.on_save_error, "log", "raise")
        require_one_of("transfer", self.transfer, "process", "thread")
        checked = ("keep", "keep_local", "queue", "failures", "strict", "retry")
        require_arguments(**{name: getattr(self, name) for name in checked})
        for name in ("linger_s", "close_timeout_s", "retry_after_s"):
            require_seconds(name, getattr(self, name))
        if self.wrap_backend is not None and not callable(self.wrap_backend):
            raise ConfigError(
                f"wrap_backend is {self.wrap_backend!r}", hint="give a function from a backend to a backend"
            )

    @property
    def retention(self) -> Retention:
        """What is kept, in the store and in the local tier."""
        return Retention(store=self.keep, local=self.keep_local)

    @property
    def in_process(self) -> bool:
        """Whether uploads run in a thread of this process."""
        return self.transfer == "thread"

    @property
    def new_lineage(self) -> bool:
        """Whether a start without restore may begin a lineage of its own over existing commits (I12)."""
        return self.on_existing == "new-lineage"
