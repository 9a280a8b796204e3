"""Trying out what a store does, request by request, for `ckptmgr doctor`: what the interface of a backend hides because it copes with it.

Everything is written to a path that the caller gives, and removes.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from itertools import islice
from pathlib import Path

from ckptmgr.backends.base import Backend
from ckptmgr.backends.body import BodyDigest, FileBody
from ckptmgr.backends.localfile import SourceFile, SourcePass
from ckptmgr.backends.objectstore import ObjectStoreBackend
from ckptmgr.backends.objectupload import ObjectUpload
from ckptmgr.backends.parts import Part, Receipt
from ckptmgr.backends.retry import Retrier, RetryPolicy
from ckptmgr.core.errors import BackendError, ObjectNotFoundError, TransientBackendError

_SOME = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What a server says of itself.

    Attributes:
        ahead_s: how far its clock is ahead of this machine's, to about a second; None if it told no time.
        server: its `Server` header.
    """

    ahead_s: float | None
    server: str | None


def greet(endpoint: str, *, timeout_s: float = 10.0) -> Greeting:
    """Ask a store's endpoint for anything, without credentials: a refusal has a date too.

    Raises:
        TransientBackendError: nobody answers there, or not in TLS that is trusted.
    """
    request = urllib.request.Request(endpoint, method="HEAD", headers={"User-Agent": "ckptmgr"})
    asked = time.time()
    try:
        with contextlib.closing(urllib.request.urlopen(request, timeout=timeout_s, context=_trusted())) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
        error.close()
    except (OSError, ValueError) as error:
        raise TransientBackendError(f"no answer from {endpoint}: {getattr(error, 'reason', error)}") from error
    ahead_s = None
    with contextlib.suppress(TypeError, ValueError):
        # The date is cut to whole seconds.
        ahead_s = parsedate_to_datetime(headers.get("Date", "")).timestamp() + 0.5 - (asked + time.time()) / 2
    return Greeting(ahead_s=ahead_s, server=headers.get("Server"))


def _trusted() -> ssl.SSLContext:
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        bundle = os.environ.get(name, "")
        if os.path.isfile(bundle):
            return ssl.create_default_context(cafile=bundle)
    return ssl.create_default_context()


def some_names(fs: Backend, path: str) -> list[str]:
    """A few of the names directly below `path`, files first, folders with a slash: one request where the store can list less than everything.

    Raises:
        ObjectNotFoundError: nothing is there.
    """
    objects = object_store(fs)
    if objects is None:
        records = list(islice(fs.ls(path, detail=True), _SOME))
        names = [f"{record['name']}{'' if record['type'] == 'file' else '/'}" for record in records]
        return sorted(names, key=lambda name: name.endswith("/"))
    bucket, _, prefix = path.partition("/")
    page = objects._page(bucket, f"{prefix}/" if prefix else "", "/", None, _SOME)
    if not page.objects and not page.prefixes:
        raise ObjectNotFoundError(
            f"nothing is stored at {fs.kind}://{path}", backend=fs.kind, operation="list", key=path
        )
    return [f"{bucket}/{name}" for name in (*(key for key, _ in page.objects), *page.prefixes)]


def object_store(fs: Backend) -> ObjectStoreBackend | None:
    """The object store behind `fs`, past what retries; None if it is none."""
    inner = fs.unretried
    return inner if isinstance(inner, ObjectStoreBackend) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsTried:
    """What a store did with an upload in two parts.

    Attributes:
        are_listed: it tells which parts it holds, with their sizes, so that an upload can be gone on with.
        crc: that it keeps of the whole; None if it keeps none.
        is_right: `crc` is that of what was sent.
    """

    are_listed: bool
    crc: str | None
    is_right: bool


def try_parts(store: ObjectStoreBackend, file: Path, path: str, *, part_bytes: int) -> PartsTried:
    """Send `file` to `path` in two parts, of which the first has `part_bytes`.

    Raises:
        BackendError: a step was refused; the upload is aborted.
    """
    sender = ObjectUpload(store, path, "overwrite", Retrier(RetryPolicy(attempts=1)))
    with SourceFile(file) as source:
        reading = SourcePass(source, sender.crc_kind, sender.crc)
        upload_id = sender.begin()
        try:
            parts = (
                Part(number=1, offset=0, length=part_bytes),
                Part(number=2, offset=part_bytes, length=source.size - part_bytes),
            )
            receipts = [_send(sender, upload_id, part, source, reading) for part in parts]
            listed = sender.stored(upload_id) or []
            crc = reading.finish() if sender.is_stores_crc else None
            sender.finish(upload_id, receipts, source.size, crc)
        except BaseException:
            with contextlib.suppress(BackendError):
                sender.abort(upload_id)
            raise
    stored = store._head(path)
    are_listed = [(receipt.number, receipt.size) for receipt in listed] == [
        (part.number, part.length) for part in parts
    ]
    return PartsTried(are_listed=are_listed, crc=stored.crc, is_right=stored.crc == crc)


def _send(sender: ObjectUpload, upload_id: str, part: Part, source: SourceFile, reading: SourcePass) -> Receipt:
    crc = f"{reading.crc_of(part.length):016x}"
    digest = BodyDigest(crc=crc if sender.is_stores_crc else None, seen=crc)
    receipt = sender.send(upload_id, part, FileBody(source, part.offset, part.length, crc=sender.crc), digest)
    if receipt is None:
        raise TransientBackendError(f"the upload {upload_id} is unknown a moment after it was begun")
    return receipt


def try_abort(store: ObjectStoreBackend, path: str) -> bool:
    """Begin an upload to `path` and abort it; whether it is gone then.

    Raises:
        BackendError: a step was refused.
    """
    sender = ObjectUpload(store, path, "overwrite", Retrier(RetryPolicy(attempts=1)))
    upload_id = sender.begin()
    sender.abort(upload_id)
    return not sender.stored(upload_id)


def try_wrong_crc(store: ObjectStoreBackend, path: str, data: bytes) -> bool | None:
    """Whether the store refuses `data` with a CRC that is not that of `data`; None if no CRC goes along with what is sent there.

    Raises:
        BackendError: it was refused for another reason.
    """
    crc = store._crc_of(data)
    # OSS is not told a CRC; it answers its own.
    if crc is None or store.kind != "s3" or not store._store_checks:
        return None
    wrong = f"{int(crc, 16) ^ 1:016x}"
    try:
        store._put(path, data, wrong, "overwrite")
    except BackendError as error:
        if getattr(error, "status", 0) == 400:
            return True
        raise
    return False
