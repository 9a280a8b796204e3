"""What S3 answers, as boto3 would give it: the few headers and elements that are used here."""

from __future__ import annotations

import datetime
import email.utils
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote_plus

from ckptmgr.backends.http import Answer, BadAnswerError

_NAMES = {
    "etag": "ETag",
    "x-amz-checksum-crc64nvme": "ChecksumCRC64NVME",
    "x-amz-checksum-type": "ChecksumType",
}


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


def parse_page(document: bytes) -> dict[str, Any]:
    try:
        root = ET.fromstring(document)
    except ET.ParseError as error:
        raise BadAnswerError(f"answered with a listing that is no XML: {error}") from error
    space, _, name = root.tag.rpartition("}")
    space = f"{space}}}" if space else ""
    if name != "ListBucketResult":
        raise BadAnswerError(f"answered with <{name}> instead of a listing")
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
