"""Which keys OSS requests are signed with: found by Aliyun's own chain, kept while they are valid, renewed before they expire and when the store
refuses them.

The chain, as in Alibaba Cloud's own SDKs: the environment, an OIDC role (RRSA), the CLI's profile, the credentials file, the RAM role of this ECS
instance, a credentials URI. The first that has keys is asked for all later ones too. Nothing secret is in a `repr`, a message or the log.

Source: https://www.alibabacloud.com/help/en/sdk/developer-reference/v2-manage-python-access-credentials
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ckptmgr.core.errors import AccessDeniedError, BackendError

log = logging.getLogger("ckptmgr.backends")

#: Keys are renewed so many seconds before they expire, or when a fifth of their life is left, if that is less.
RENEW_S = 900.0
# How long a renewal that failed, or keys that had expired before they came, are left alone.
_AGAIN_S = 60.0
# A store that refuses keys which are younger than this refuses us, not their age.
_YOUNG_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What a request is signed with.

    Attributes:
        token: that of an STS session; "" for the keys of an account or a user.
        expires_s: seconds since 1970; None if they do not, or nobody says so.
    """

    access_key_id: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)
    expires_s: float | None = None


class KeySource(Protocol):
    """One link of the chain. Used by one thread at a time.

    Attributes:
        name: for people: "the environment".
        is_cheap: it is asked at every request, so that keys which somebody renews in place are seen at once.
    """

    name: str
    is_cheap: bool

    def fetch(self) -> Keys | None:
        """The keys of now; None: it has none, ask the next.

        Raises:
            AccessDeniedError, ConfigError: it should have some, and cannot give them.
            TransientBackendError: it does not answer, which may pass.
        """


class OssCredentials:
    """Keeps the keys of a chain. All methods may be called from any thread; one thread renews, others go on with valid keys, or wait for it.

    Args:
        sources: the chain, in order.
        now: seconds since 1970 (tests).
        clock: seconds, monotonic (tests).
    """

    def __init__(
        self,
        sources: Sequence[KeySource],
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = tuple(sources)
        self._source: KeySource | None = None
        self._now = now
        self._clock = clock
        self._renewing = threading.Lock()
        self._kept: _Kept | None = None
        self._failure: tuple[float, BackendError] | None = None

    def current(self) -> Keys:
        """Keys for the next request.

        Raises:
            AccessDeniedError: there are none, or their source refuses to give further ones.
            TransientBackendError: their source does not answer, and those that are kept have expired.
        """
        source = self._source
        if source is not None and source.is_cheap and (keys := source.fetch()) is not None:
            return keys
        asked = self._clock()
        kept = self._kept
        if kept is not None and asked < kept.renew_at:
            return kept.keys
        is_valid = kept is not None and asked < kept.ends_at
        if not self._renewing.acquire(blocking=not is_valid):
            assert kept is not None
            return kept.keys
        try:
            return self._renewed(asked, kept)
        finally:
            self._renewing.release()

    def renew(self, refused: Keys) -> Keys | None:
        """Other keys than those that the store has just refused; None if there are none. One thread asks for them, once.

        Raises:
            AccessDeniedError, TransientBackendError: as `current`.
        """
        asked = self._clock()
        with self._renewing:
            kept = self._kept
            if kept is not None and not self._is_cheap:
                if kept.keys != refused:
                    return kept.keys
                if kept.was_renewed and asked - kept.since < _YOUNG_S:
                    return None
            self._raise_failure_since(asked)
            keys = self._fetch()
            if keys == refused:
                return None
            self._keep(keys, renewed=True)
            log.info("the store refused the keys of %s; it has others now", self.found_in)
            return keys

    @property
    def found_in(self) -> str:
        """Where the keys in use were found, for people; "" before they are."""
        return self._source.name if self._source is not None else ""

    @property
    def _is_cheap(self) -> bool:
        return self._source is not None and self._source.is_cheap

    def _renewed(self, asked: float, kept: _Kept | None) -> Keys:
        if self._kept is not kept and self._kept is not None:
            # Another thread was first.
            return self._kept.keys
        self._raise_failure_since(asked)
        try:
            keys = self._fetch()
        except BackendError as error:
            if kept is None or self._clock() >= kept.ends_at:
                raise
            log.warning(
                "the keys of %s could not be renewed, and are used as long as they are valid: %s", self.found_in, error
            )
            kept.renew_at = self._clock() + min(_AGAIN_S, (kept.ends_at - self._clock()) / 4)
            return kept.keys
        self._keep(keys)
        return keys

    def _raise_failure_since(self, asked: float) -> None:
        """Those who waited for the thread that failed do not fail one after the other, each after the same time."""
        if self._failure is not None and self._failure[0] > asked:
            raise copy.copy(self._failure[1])

    def _fetch(self) -> Keys:
        try:
            found = self._source.fetch() if self._source is not None else None
            return found if found is not None else self._search()
        except BackendError as error:
            self._failure = self._clock(), error
            raise

    def _search(self) -> Keys:
        for source in self._sources:
            keys = source.fetch()
            if keys is not None:
                log.debug("keys for OSS are those of %s", source.name)
                self._source = source
                return keys
        raise AccessDeniedError(
            f"no OSS credentials were found: not in {', not in '.join(source.name for source in self._sources)}",
            hint="set OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET, or run 'aliyun configure'",
            backend="oss",
            operation="sign",
        )

    def _keep(self, keys: Keys, *, renewed: bool = False) -> None:
        since = self._clock()
        if keys.expires_s is None:
            self._kept = _Kept(keys, since, float("inf"), float("inf"), renewed)
            return
        # From here on by the monotonic clock. Keys that have expired already are those of a wrong clock, ours or theirs: the store decides.
        left_s = max(keys.expires_s - self._now(), _AGAIN_S)
        self._kept = _Kept(keys, since, since + left_s - min(RENEW_S, left_s / 5), since + left_s, renewed)


@dataclass(slots=True)
class _Kept:
    """Keys, and by the monotonic clock: when they came, when others are to be asked for, and when they end."""

    keys: Keys
    since: float
    renew_at: float
    ends_at: float
    was_renewed: bool
