"""Claiming an attempt number of a run, as operations yielded to a driver; see `ckptmgr.core.protocol`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from ckptmgr.core.errors import ConflictError, ManifestError
from ckptmgr.core.layout import ATTEMPTS, MANIFESTS, attempt_bid_key, attempt_key, attempt_number, parse_stem
from ckptmgr.core.operations import Delete, ListKeys, Operation, Replace
from ckptmgr.core.protocol import SETTLE_TRIES, create_settled
from ckptmgr.core.records import AttemptRecord, decode_attempt, encode_attempt

CLAIM_TRIES = 1000


def claim(
    make: Callable[[int, int | None], AttemptRecord],
    *,
    create_only: bool,
    new_nonce: Callable[[], str],
    tries: int = CLAIM_TRIES,
) -> Generator[Operation, Any, AttemptRecord]:
    """Claim the next attempt number of a run, against any number of others doing the same.

    The number is above every claimed one and every one that a commit names: a run may have been copied without its claims, and commits of
    a new attempt that shares a number with old ones would not be told apart from them (I4).

    Args:
        make: the record for (number, the highest number taken before it); its `claim_id` is unique to this claim.
        create_only: whether the store decides create-only writes. If not, a bid is written under a name of its own; whoever is alone with it
            has won. Of several, all withdraw and take the next number, but for the first in LIST order, which looks again a few times.
        tries: how many numbers to try.

    Raises:
        ConflictError: others took every number that was tried.
        TransientBackendError: the store did not answer. A claim may have been left behind; it costs a number, nothing else.
    """
    numbers = [number for key in (yield ListKeys(ATTEMPTS)) if (number := attempt_number(key)) is not None]
    names = [key.rsplit("/", 1)[-1].removesuffix(".json") for key in (yield ListKeys(MANIFESTS))]
    numbers.extend(stem.attempt for name in names if (stem := parse_stem(name)) is not None)
    highest = max(numbers, default=None)
    for number in range((highest or 0) + 1, (highest or 0) + 1 + tries):
        record = make(number, highest)
        if (yield from claim_number(record, create_only=create_only, new_nonce=new_nonce)):
            return record
        highest = number
    raise ConflictError(
        "no attempt number could be claimed", hint="too many processes start this run at once; stop the others"
    )


def claim_number(
    record: AttemptRecord, *, create_only: bool, new_nonce: Callable[[], str]
) -> Generator[Operation, Any, bool]:
    """Claim the number of `record` and no other; False if somebody has it. The caller has looked that no commit names it.

    Raises:
        TransientBackendError: the store did not answer; the number may be used up.
    """
    return (yield from (_claim_created(record) if create_only else _claim_bid(record, new_nonce())))


def _claim_created(record: AttemptRecord) -> Generator[Operation, Any, bool]:
    key = attempt_key(record.number)

    def judge(found: bytes | None) -> str:
        if found is None:
            return "absent"
        try:
            return "own" if decode_attempt(found, where=key).claim_id == record.claim_id else "taken"
        except ManifestError:
            return "taken"

    return bool((yield from create_settled(key, encode_attempt(record), judge, won="own")) == "own")


def _claim_bid(record: AttemptRecord, nonce: str) -> Generator[Operation, Any, bool]:
    """Bid for the number; True if it is ours.

    Of two bidders, the one whose bid came later sees the other's, unless that was withdrawn; so at most one is ever alone. The first in
    LIST order may not take the others' word for it that they will go, but may wait until they have, or nobody would get anywhere
    who starts at the same time as somebody else.
    """
    bid = attempt_bid_key(record.number, nonce)
    yield Replace(bid, encode_attempt(record))
    for _ in range(SETTLE_TRIES):
        claims = [key for key in (yield ListKeys(ATTEMPTS)) if attempt_number(key) == record.number]
        if claims == [bid]:
            return True
        if bid != min(claims, default=""):
            break
    yield Delete(bid)
    return False
