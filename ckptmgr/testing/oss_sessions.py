"""Temporary keys for a test store, as STS gives them out: an access key, a secret and a token, for some time."""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass

from ckptmgr.testing.identities import Identity
from ckptmgr.testing.oss_signing import TOKEN_EXPIRED, TOKEN_INVALID, Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What STS gives out."""

    identity: Identity
    access_key: str
    secret_key: str
    token: str


class Sessions:
    """The sessions of one server. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._ended: set[str] = set()

    def begin(self, identity: Identity) -> Session:
        """New keys, with what `identity` may do."""
        name = uuid.uuid4().hex
        session = Session(
            identity=identity, access_key=f"STS.{name[:16]}", secret_key=f"secret-{name}", token=f"token-{name}"
        )
        with self._lock:
            self._sessions[session.access_key] = session
        return session

    def end(self, session: Session) -> None:
        """Its time is over: requests with its keys are refused from now on."""
        with self._lock:
            self._ended.add(session.access_key)

    def clear(self) -> None:
        """Forget all: their keys are unknown."""
        with self._lock:
            self._sessions.clear()
            self._ended.clear()

    @property
    def secrets(self) -> dict[str, str]:
        """Secret by access key."""
        with self._lock:
            return {key: session.secret_key for key, session in self._sessions.items()}

    def refusal(self, access_key: str, token: str) -> Refusal | None:
        """Why a request that is signed well is not let in; None if it is, or if these are no temporary keys."""
        with self._lock:
            session = self._sessions.get(access_key)
            if session is None:
                return None
            if token != session.token:
                return TOKEN_INVALID
            return TOKEN_EXPIRED if access_key in self._ended else None

    def identity(self, access_key: str) -> Identity | None:
        """Whose session it is; None if these are no temporary keys."""
        with self._lock:
            session = self._sessions.get(access_key)
            return None if session is None else session.identity
