"""What is drawn or read from the machine: names, nonces, the time. The one place where the run layer meets a clock or chance."""

from __future__ import annotations

import os
import secrets
import socket
import time
import uuid
from datetime import datetime, timezone
from pathlib import Path


def new_nonce() -> str:
    """8 random hexadecimal digits, for a stem."""
    return secrets.token_hex(4)


def new_uuid() -> str:
    return str(uuid.uuid4())


def utc_now() -> datetime:
    return datetime.now(timezone.utc)


def utc_stamp() -> str:
    """Now, ISO 8601 in UTC with `Z` and milliseconds; information only, nothing is ordered by it."""
    return utc_now().isoformat(timespec="milliseconds").replace("+00:00", "Z")


def wall_s() -> float:
    """Seconds since 1970, for ages that outlive a process."""
    return time.time()


def state_dir() -> Path:
    """Where this user's machine keeps what must outlive a process and belongs to no run directory."""
    return Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "ckptmgr")


def cache_dir() -> Path:
    """Where this user's machine keeps what only saves time, and may vanish at any moment."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ckptmgr")


def host_name() -> str:
    return socket.gethostname()
