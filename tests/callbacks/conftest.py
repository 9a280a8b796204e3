"""A manager and a preemption that keep what they are told, for callbacks that save."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.core.policies import SavePolicy


@dataclass
class Closed:
    """A close report."""

    pending: Sequence[str] = ()
    errors: Sequence[Exception] = ()


@dataclass
class Notice:
    source: str = "sigterm"
    deadline: float = 25.0


@dataclass
class FakePreemption:
    """A preemption on a clock of its own: set `notice` and `left_s`."""

    notice: Notice | None = None
    left_s: float = 20.0
    save_wanted: bool = True
    exit_code: int = 143
    calls: list[str] = field(default_factory=list)

    def install(self) -> None:
        self.calls.append("install")

    def uninstall(self) -> None:
        self.calls.append("uninstall")

    def agreed(self) -> Notice | None:
        return self.notice

    def remaining_s(self) -> float:
        return float("inf") if self.notice is None else self.left_s


@dataclass
class FakeManager:
    """A manager that keeps what it is given; a directory that it takes with the bytes that it has at that moment."""

    save_policy: SavePolicy | None = None
    preemption: FakePreemption | None = field(default_factory=FakePreemption)
    url: str = "s3://bucket/exp/run"
    local_dir: Path = Path("disk")
    is_restored: bool = False
    should_stop: str | None = None
    begin_error: Exception | None = None
    save_error: Exception | None = None
    closed: Closed = field(default_factory=Closed)
    background: list[Exception] = field(default_factory=list)
    began: list[Path | None] = field(default_factory=list)
    expected_bytes: int | None = None
    saves: list[dict[str, Any]] = field(default_factory=list)
    reserved: list[Mapping[str, Any]] = field(default_factory=list)
    hurried: list[float | None] = field(default_factory=list)
    close_calls: list[float | None] = field(default_factory=list)

    def begin(self, *, resume_from: Path | None = None, expected_bytes: int | None = None) -> None:
        self.began.append(resume_from)
        self.expected_bytes = expected_bytes
        if self.begin_error is not None:
            raise self.begin_error

    def save(self, step: int, state: Mapping[str, Any], **facts: Any) -> str | None:
        return self._keep({"step": step, "state": dict(state), **facts})

    def take(self, step: int, directory: Path, **facts: Any) -> str | None:
        files = {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
        return self._keep({"step": step, "files": files, **facts})

    def _keep(self, saved: dict[str, Any]) -> str:
        if self.save_error is not None:
            raise self.save_error
        self.saves.append(saved)
        return f"000001-{saved['step']:012}"

    def reserve(self, state: Mapping[str, Any]) -> None:
        self.reserved.append(state)

    def hurry(self, deadline_s: float | None = None) -> None:
        self.hurried.append(deadline_s)

    def poll_errors(self) -> Sequence[Exception]:
        errors, self.background = self.background, []
        return errors

    def close(self, timeout_s: float | None = None) -> Closed:
        self.close_calls.append(timeout_s)
        return self.closed


@pytest.fixture
def fake_manager() -> Callable[..., FakeManager]:
    """Makes managers; see `FakeManager` for what can be given."""
    return FakeManager


@pytest.fixture
def preemption() -> FakePreemption:
    return FakePreemption()


@pytest.fixture
def notice() -> Callable[..., Notice]:
    return Notice


@pytest.fixture
def closed() -> Callable[..., Closed]:
    return Closed


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
