"""What S3 answers, as boto3 would give it: the few headers and elements that are used here; and the one document that it is sent."""

from __future__ import annotations

import datetime
import email.utils
import html
import io
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote_plus

from ckptmgr.backends.answers import REDIRECTS, NoStoreError
from ckptmgr.backends.http import Answer, BadAnswerError

_NAMES = {
    "etag": "ETag",
    "x-amz-checksum-crc64nvme": "ChecksumCRC64NVME",
    "x-amz-checksum-type": "ChecksumType",
}


NO_ERROR = "an S3 error"
# How the outermost element begins; moto ends its names in another way than S3.
_ROOTS = {
    "DeleteObjects": "Delete",
    "ListMultipartUploads": "ListMultipartUploads",
    "ListObjectsV2": "ListBucketResult",
    "ListParts": "ListParts",
}
# Where an answer of botocore's holds what every store says.
_REQUIRED = {
    "CompleteMultipartUpload": ("ETag",),
    "CopyObject": ("CopyObjectResult", "ETag"),
    "CreateMultipartUpload": ("UploadId",),
    "GetObject": ("ETag",),
    "HeadObject": ("ETag",),
    "PutObject": ("ETag",),
    "UploadPart": ("ETag",),
    "UploadPartCopy": ("CopyPartResult", "ETag"),
}


def distrust(client: Any) -> None:
    """Have `client`, of boto3, raise `NoStoreError` where it would take a stranger's page for an empty answer, or follow it for ever."""
    events = client.meta.events
    # Before botocore, which asks with a HEAD where the bucket is, and again when that is redirected too.
    events.register_first("needs-retry.s3", _check_redirect)
    events.register("after-call.s3", _check_success)


def _check_redirect(response: Any, operation: Any, **kwargs: Any) -> None:
    if response is None or response[0].status_code not in REDIRECTS or operation.name == "HeadObject":
        return
    headers = {name.lower(): value for name, value in response[0].headers.items()}
    code = str(response[1].get("Error", {}).get("Code", ""))
    if "x-amz-bucket-region" not in headers and (not code or code.isdigit() or operation.name == "HeadBucket"):
        raise NoStoreError(response[0].status_code, NO_ERROR, headers.get("location", ""))


def _check_success(http_response: Any, parsed: dict[str, Any], model: Any, **kwargs: Any) -> None:
    status = http_response.status_code
    if status >= 300:
        return
    if model.name in _ROOTS and not _root(http_response.content).startswith(_ROOTS[model.name]):
        raise NoStoreError(status, f"what {model.name} is answered with")
    found: Any = parsed
    for name in _REQUIRED.get(model.name, ()):
        found = found.get(name) if isinstance(found, dict) else None
        if not found:
            if hasattr(parsed.get("Body"), "close"):
                parsed["Body"].close()
            raise NoStoreError(status, f"an {name}")


def _root(document: bytes) -> str:
    """The name of the outermost element; "" if there is none."""
    try:
        for _, element in ET.iterparse(io.BytesIO(document.strip()), events=("start",)):
            return str(element.tag).rpartition("}")[2]
    except ET.ParseError:
        pass
    return ""


def parse_headers(headers: dict[str, str], *, is_of_object: bool) -> dict[str, Any]:
    parsed: dict[str, Any] = {_NAMES[name]: value for name, value in headers.items() if name in _NAMES}
    if not is_of_object:
        return parsed
    try:
        if "content-length" in headers:
            parsed["ContentLength"] = int(headers["content-length"])
        if "last-modified" in headers:
            parsed["LastModified"] = email.utils.parsedate_to_datetime(headers["last-modified"])
    except ValueError as error:
        raise BadAnswerError(f"answered with a size or a date that is none: {error}") from error
    return parsed


def check_range(answer: Answer, asked: str | None) -> None:
    """A proxy that knows no ranges answers with the whole object, or with another part of it."""
    if asked is None:
        if answer.status != 200:
            raise BadAnswerError(f"answered {answer.status} to a request for a whole object")
        return
    given = answer.headers.get("content-range", "")
    first, _, last = asked.removeprefix("bytes=").partition("-")
    if answer.status == 206:
        unit, _, rest = given.partition(" ")
        # The end may be nearer than was asked for: the caller counts.
        is_right = unit.lower() == "bytes" and rest.startswith(f"{first}-")
    else:
        is_right = first == "0" and last != "" and answer.headers.get("content-length", "") == str(int(last) + 1)
    if not is_right:
        raise BadAnswerError(f"answered {answer.status} {given!r} to a request for {asked}")


def parse_error(document: bytes) -> tuple[str, str]:
    """Code and message; "" where there is none, as in the answer to a HEAD or the page of a proxy."""
    try:
        root = ET.fromstring(document)
    except ET.ParseError:
        return "", ""
    found = {child.tag.rpartition("}")[2]: child.text or "" for child in root}
    if "Code" not in found and root.find("Error") is not None:
        found = {child.tag: child.text or "" for child in root.find("Error") or ()}
    return found.get("Code", "").strip(), found.get("Message", "")


def format_parts(parts: Iterable[Mapping[str, Any]]) -> bytes:
    """The body that ends an upload in parts, each as boto3 takes it."""
    elements = [
        f"<Part>{''.join([f'<{name}>{html.escape(str(value), quote=False)}</{name}>' for name, value in part.items()])}</Part>"
        for part in parts
    ]
    space = "http://s3.amazonaws.com/doc/2006-03-01/"
    return f'<CompleteMultipartUpload xmlns="{space}">{"".join(elements)}</CompleteMultipartUpload>'.encode()


def parse_begun(document: bytes) -> dict[str, Any]:
    """The answer to the beginning of an upload in parts.

    Raises:
        NoStoreError: it is none.
    """
    found = _fields(document, "InitiateMultipartUploadResult")
    if not found.get("UploadId"):
        raise NoStoreError(200, "an UploadId")
    return {"UploadId": found["UploadId"]}


def parse_completed(document: bytes) -> dict[str, Any] | None:
    """The answer to the end of an upload in parts; None if it is an error, which S3 may notice only after it has answered 200.

    Raises:
        NoStoreError: it is neither.
    """
    if any(parse_error(document.strip())):
        return None
    found = _fields(document, "CompleteMultipartUploadResult")
    if not found.get("ETag"):
        raise NoStoreError(200, "an ETag")
    return {name: found[name] for name in ("ETag", "ChecksumCRC64NVME", "ChecksumType") if found.get(name)}


def _fields(document: bytes, name: str) -> dict[str, str]:
    """What stands in the outermost element, which must be called so."""
    try:
        # While S3 is at work it sends blanks.
        root = ET.fromstring(document.strip())
    except ET.ParseError as error:
        raise NoStoreError(200, f"a <{name}>") from error
    if root.tag.rpartition("}")[2] != name:
        raise NoStoreError(200, f"a <{name}>")
    return {child.tag.rpartition("}")[2]: (child.text or "").strip() for child in root}


def parse_page(document: bytes) -> dict[str, Any]:
    try:
        root = ET.fromstring(document)
    except ET.ParseError as error:
        raise NoStoreError(200, "a <ListBucketResult>") from error
    space, _, name = root.tag.rpartition("}")
    space = f"{space}}}" if space else ""
    if name != "ListBucketResult":
        raise NoStoreError(200, "a <ListBucketResult>")
    decode: Callable[[str], str] = unquote_plus if root.findtext(f"{space}EncodingType") == "url" else str
    page: dict[str, Any] = {"IsTruncated": root.findtext(f"{space}IsTruncated") == "true"}
    token = root.findtext(f"{space}NextContinuationToken")
    if page["IsTruncated"]:
        if not token:
            raise BadAnswerError("answered with a listing that goes on, and does not say where")
        page["NextContinuationToken"] = token
    contents, names = f"{space}Contents", (f"{space}Key", f"{space}ETag", f"{space}Size", f"{space}LastModified")
    try:
        page["Contents"] = [_parse_entry(entry, names, decode) for entry in root.iter(contents)]
        page["CommonPrefixes"] = [
            {"Prefix": decode(_required(entry.findtext(f"{space}Prefix")))}
            for entry in root.iter(f"{space}CommonPrefixes")
        ]
    except ValueError as error:
        raise BadAnswerError(f"answered with a listing that cannot be read: {error}") from error
    return page


def _parse_entry(entry: ET.Element, names: tuple[str, ...], decode: Callable[[str], str]) -> dict[str, Any]:
    found = {child.tag: child.text for child in entry}
    key, etag, size, modified = [found.get(name) for name in names]
    return {
        "Key": decode(_required(key)),
        "ETag": etag or "",
        "Size": int(_required(size)),
        "LastModified": _parse_time(_required(modified)),
    }


def _required(text: str | None) -> str:
    if text is None:
        raise ValueError("an entry is not whole")
    return text


def _parse_time(text: str) -> datetime.datetime:
    # Python 3.10 knows neither the Z nor any number of digits but 3 and 6.
    seconds, _, fraction = text.rstrip("Z").partition(".")
    return datetime.datetime.fromisoformat(f"{seconds}.{fraction[:6]:0<6}+00:00")
