"""What is drawn or read from the machine: names, nonces, the time. The one place where the run layer meets a clock or chance."""

from __future__ import annotations

import secrets
import socket
import time
import uuid
from datetime import datetime, timezone


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


def host_name() -> str:
    return socket.gethostname()
