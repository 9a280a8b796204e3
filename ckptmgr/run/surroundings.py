"""What surrounds a store: libraries, credentials, the endpoint, clocks, this machine's disk, and what the bucket does by itself. Nothing is written."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Generator, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from ckptmgr.backends import probes
from ckptmgr.backends.base import Backend, BucketFacts, Connection
from ckptmgr.backends.profiles import recognised
from ckptmgr.core.errors import BackendError, TransientBackendError
from ckptmgr.core.units import duration_text, size_text
from ckptmgr.run.identity import wall_s
from ckptmgr.run.verdicts import Verdict, judged

_PACKAGES = {"": ("fsspec",), "s3": ("boto3", "botocore", "awscrt"), "oss": ("oss2", "fastcrc")}
# What a store allows between its clock and a signature's; and what is worth setting right before it comes to that.
_REFUSED_SKEW_S, _NOTED_SKEW_S = 15 * 60.0, 60.0
_LOOPBACK = ("http://127.", "http://localhost", "http://[::1]")


def versions(kind: str) -> Verdict:
    found = {"ckptmgr": _version("ckptmgr"), "python": platform.python_version()}
    found |= {name: _version(name) for name in (*_PACKAGES[""], *_PACKAGES.get(kind, ()))}
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    facts = {"versions": found}
    if kind == "s3" and found["awscrt"] is None:
        return Verdict(
            check="versions",
            level="warning",
            text=f"{text}: without awscrt the checksum that S3 keeps cannot be computed",
            advice="pip install 'ckptmgr[s3]'",
            facts=facts,
        )
    return Verdict(check="versions", level="ok", text=text, facts=facts)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def connected(fs: Backend) -> Generator[Verdict, None, Connection | None]:
    """Yields what is known without asking the store; returns how it is reached, None if there is no way."""
    try:
        connection = fs.connection()
    except BackendError as error:
        yield Verdict(check="credentials", level="problem", text=error.message, advice=error.hint)
        return None
    if connection.endpoint is None:
        return connection
    yield _credentials(fs.kind, connection)
    yield _endpoint(connection)
    return connection


def _credentials(kind: str, connection: Connection) -> Verdict:
    where = connection.credentials
    if where is None:
        advice = {
            "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or an instance role",
            "oss": "set OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET",
        }.get(kind, "")
        return Verdict(check="credentials", level="problem", text="none were found", advice=advice)
    facts = {"found_in": where, "temporary": connection.is_temporary, "expires_at_s": connection.expires_s}
    if connection.expires_s is not None:
        left_s = connection.expires_s - wall_s()
        text = f"found in {where}, for {duration_text(max(left_s, 0.0))} more; renewed when that is over"
        return Verdict(check="credentials", level="ok", text=text, facts=facts)
    if connection.is_temporary:
        return Verdict(
            check="credentials",
            level="warning",
            text=f"found in {where}, for a session whose end is not known",
            advice="uploads wait from then on until somebody renews them; a role or a profile is renewed by itself",
            facts=facts,
        )
    return Verdict(check="credentials", level="ok", text=f"found in {where}", facts=facts)


def _endpoint(connection: Connection) -> Verdict:
    profile, endpoint = connection.profile, str(connection.endpoint)
    pieces = [endpoint]
    pieces += [f"region {connection.region}"] if connection.region else []
    pieces += [f"{connection.addressing}-style"] if connection.addressing in ("path", "virtual") else []
    facts: dict[str, Any] = {"endpoint": endpoint, "region": connection.region, "addressing": connection.addressing}
    if profile is not None:
        tested = f"tested with {profile.tested_with}" if profile.tested else "not tested by ckptmgr's own tests"
        pieces.append(f"profile {profile.name}: {profile.title}, {tested}")
        facts |= {"profile": profile.name, "tested": profile.tested, "notes": list(profile.notes)}
    text = ", ".join(pieces)
    if endpoint.startswith("http://") and not endpoint.startswith(_LOOPBACK):
        advice = "use https: whoever is in between can read and change everything"
        return Verdict(check="endpoint", level="warning", text=text, advice=advice, facts=facts)
    advice = " ".join(profile.notes) if profile is not None and profile.name not in ("other", "oss-other") else ""
    return Verdict(check="endpoint", level="ok", text=text, advice=advice, facts=facts)


def greeted(kind: str, connection: Connection) -> Iterator[Verdict]:
    """Yields how far the clocks are apart."""
    if connection.endpoint is None:
        return
    endpoint = connection.endpoint

    def ask() -> Verdict:
        try:
            greeting = probes.greet(endpoint)
        except TransientBackendError as error:
            # Requests may go through a proxy that this one does not know; the next question tells.
            return Verdict(check="clock", level="unknown", text=error.message)
        known = recognised(kind, greeting.server)
        facts = {"ahead_s": greeting.ahead_s, "server": greeting.server}
        if greeting.ahead_s is None:
            return Verdict(check="clock", level="unknown", text="the store tells no time", facts=facts)
        verdict = _clock(greeting.ahead_s)
        profile = connection.profile
        if known is not None and profile is not None and known.name != profile.name and profile.name == "other":
            advice = (
                f"the store calls itself {known.title}: CKPTMGR_STORE_PROFILE={known.name} says what is known of it"
            )
            verdict = replace(verdict, advice=verdict.advice or advice)
        return replace(verdict, facts=facts)

    yield judged("clock", ask)


def _clock(ahead_s: float) -> Verdict:
    off_s = abs(ahead_s)
    if off_s < _NOTED_SKEW_S:
        return Verdict(check="clock", level="ok", text=f"within {max(off_s, 1.0):.0f} s of the store's")
    text = f"this machine's clock is {duration_text(off_s)} {'behind' if ahead_s > 0 else 'ahead of'} the store's"
    if off_s >= _REFUSED_SKEW_S:
        # Whether that works here is what the questions after this one find out.
        text += ", more than signatures may be; requests are signed with the store's time"
    return Verdict(
        check="clock",
        level="warning",
        text=text,
        advice="set it (NTP): signatures that are 15 minutes off are refused, which costs a second try, and sources of credentials may refuse as well",
    )


def lasting(fs: Backend) -> Iterator[Verdict]:
    """Yields a warning if nothing that is kept there outlives the process."""
    if not fs.capabilities.is_lasting:
        text = (
            f"{fs.kind}:// is the memory of one process: what it keeps there is gone when it ends, and no other sees it"
        )
        yield Verdict(check="lasting", level="warning", text=text, advice="use it for trials only")


def local_disk(directory: Path, size_bytes: int | None) -> Verdict:
    def look() -> Verdict:
        place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        free = shutil.disk_usage(place).free
        facts = {"local_dir": str(directory), "free_bytes": free}
        text = f"{size_text(free)} free for the local tier in {directory}"
        if not os.access(place, os.W_OK):
            text = f"the local tier in {directory} cannot be written"
            return Verdict(check="local_disk", level="problem", text=text, advice="set CKPTMGR_LOCAL_DIR", facts=facts)
        if size_bytes is None:
            return Verdict(check="local_disk", level="ok", text=text, facts=facts)
        room = f"room for {free // max(size_bytes, 1)} checkpoints of {size_text(size_bytes)}"
        if free < size_bytes:
            advice = "free some space, or set CKPTMGR_LOCAL_DIR: not one save fits"
            return Verdict(
                check="local_disk", level="problem", text=f"{text}, no {room[5:]}", advice=advice, facts=facts
            )
        if free < 2 * size_bytes:
            advice = "free some space: a save needs room beside the one that is being uploaded"
            return Verdict(check="local_disk", level="warning", text=f"{text}, {room}", advice=advice, facts=facts)
        return Verdict(check="local_disk", level="ok", text=f"{text}, {room}", facts=facts)

    return judged("local_disk", look)


def versioning(known: BucketFacts, kind: str) -> Verdict:
    facts = {"versioning": known.versioning, "noncurrent_days": known.noncurrent_days}
    if known.versioning is None:
        advice = "grant s3:GetBucketVersioning to see it here" if kind == "s3" else ""
        return Verdict(
            check="versioning", level="unknown", text="may not be asked, or the store does not know it", advice=advice
        )
    if known.versioning == "off":
        return Verdict(
            check="versioning", level="ok", text="off: what is deleted is gone, and not paid for", facts=facts
        )
    text = f"{known.versioning}: what `prune` deletes stays, unseen and paid for"
    if known.noncurrent_days:
        text += f", for {known.noncurrent_days} days"
    if kind == "oss":
        return Verdict(
            check="versioning",
            level="warning",
            text=f"{text}; create-only writes are ignored",
            advice="use a bucket without versioning for checkpoints",
            facts=facts,
        )
    if known.noncurrent_days or known.versioning == "suspended":
        return Verdict(check="versioning", level="ok", text=text, facts=facts)
    advice = "add a lifecycle rule that drops noncurrent versions (NoncurrentVersionExpiration)"
    return Verdict(check="versioning", level="warning", text=text, advice=advice, facts=facts)


def lifecycle(known: BucketFacts) -> Verdict:
    facts = {"abort_days": known.abort_days, "expires": known.expires, "archives": known.archives}
    if known.expires:
        return Verdict(
            check="lifecycle",
            level="warning",
            text="a rule of the bucket deletes objects by age, checkpoints among them",
            advice="exempt this prefix: `ckptmgr prune` removes whole checkpoints, a rule removes files of them",
            facts=facts,
        )
    if known.archives:
        return Verdict(
            check="lifecycle",
            level="warning",
            text="a rule of the bucket moves objects into an archive, from which nothing can be resumed at once",
            advice="exempt this prefix",
            facts=facts,
        )
    if known.abort_days is None:
        return Verdict(
            check="lifecycle", level="unknown", text="may not be asked, or the store does not know it", facts=facts
        )
    if known.abort_days == 0:
        return Verdict(
            check="lifecycle",
            level="warning",
            text="no rule drops unfinished uploads, whose parts are paid for",
            advice="add one (AbortIncompleteMultipartUpload, 7 days), or run `ckptmgr gc` now and then",
            facts=facts,
        )
    text = f"unfinished uploads are dropped after {known.abort_days} days, and nothing else is"
    return Verdict(check="lifecycle", level="ok", text=text, facts=facts)
