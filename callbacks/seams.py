"""What callbacks need of a manager and of a preemption: interfaces, so that neither is imported, and a test may give its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ckptmgr.core.conditions import Conditions
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.policies import SavePolicy


class Notice(Protocol):
    """The machine will be gone: `source` says who said so, `deadline` when, in `time.monotonic()`."""

    @property
    def source(self) -> str: ...

    @property
    def deadline(self) -> float: ...


class StopSource(Protocol):
    """What is needed of `ckptmgr.training.preemption.Preemption`; see there."""

    @property
    def exit_code(self) -> int: ...

    @property
    def notice(self) -> Notice | None: ...

    @property
    def save_wanted(self) -> bool: ...

    def install(self) -> None: ...

    def uninstall(self) -> None: ...

    def agreed(self) -> Notice | None: ...

    def remaining_s(self) -> float: ...


class CloseReport(Protocol):
    """What is left when a manager is closed."""

    @property
    def pending(self) -> Sequence[str]:
        """Ids of checkpoints that are in the local tier but not in the store."""

    @property
    def errors(self) -> Sequence[Exception]:
        """What went wrong and was not reported by `poll_errors` yet; logged already."""

    @property
    def exit_code(self) -> int:
        """0 if everything that was saved is in the store, else 6."""


class SavingManager(Protocol):
    """What is needed of `ckptmgr.training.manager.CheckpointManager` in every host; see there."""

    @property
    def save_policy(self) -> SavePolicy | None: ...

    @property
    def preemption(self) -> StopSource | None: ...

    @property
    def strict(self) -> bool: ...

    @property
    def should_stop(self) -> str | None: ...

    def begin(self, *, resume_from: Path | None = None, expected_bytes: int | None = None) -> None: ...

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        epoch: float | None = None,
        metrics: Mapping[str, float] | None = None,
        reasons: Sequence[str] = (),
        metric_modes: Mapping[str, str] | None = None,
    ) -> str | None: ...

    def reserve(self, state: Mapping[str, Any]) -> None: ...

    def hurry(self, deadline_s: float) -> None: ...

    def poll_errors(self) -> Sequence[Exception]: ...

    def close(self, timeout_s: float | None = None, *, left_s: Callable[[], float] = ...) -> CloseReport: ...


class TakingManager(SavingManager, Protocol):
    """What is needed besides in a host that writes its files itself."""

    @property
    def url(self) -> str: ...

    @property
    def local_dir(self) -> Path: ...

    @property
    def is_restored(self) -> bool: ...

    @property
    def restored_manifest(self) -> Manifest | None: ...

    @property
    def refused_drift(self) -> frozenset[str]: ...

    @property
    def conditions(self) -> Conditions: ...

    def describe(self, conditions: Conditions) -> None: ...

    def take(
        self,
        step: int,
        directory: Path,
        *,
        epoch: float | None = None,
        metrics: Mapping[str, float] | None = None,
        reasons: Sequence[str] = (),
        metric_modes: Mapping[str, str] | None = None,
        framework: Mapping[str, str] | None = None,
        final: bool = True,
    ) -> str | None: ...
