"""oss2's bucket, and the answers of OSS that oss2 reads in part only, page after page: parts with their CRCs, unfinished uploads, lifecycle rules."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import unquote

import oss2  # type: ignore[import-untyped, unused-ignore]

from ckptmgr.backends.answers import NoStoreError
from ckptmgr.backends.base import PendingUpload
from ckptmgr.backends.parts import Receipt

#: Classes whose objects cannot be read before somebody has restored them.
ARCHIVES = ("Archive", "ColdArchive", "DeepColdArchive")


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleRule:
    """A rule of a bucket that is in force.

    Attributes:
        prefix: of the keys that it is for.
        is_narrowed: it is for some of them only, by tags, sizes or exceptions.
        abort_days: uploads that are older are dropped; None: it does not say.
        noncurrent_days: likewise for versions that have been replaced or deleted.
        expires: it removes objects by their age or by a date.
        archives: it moves them into a class in which they cannot be read.
    """

    prefix: str
    is_narrowed: bool
    abort_days: int | None
    noncurrent_days: int | None
    expires: bool
    archives: bool


class Bucket(oss2.Bucket):  # type: ignore[misc, unused-ignore]
    """`oss2.Bucket`, with these answers read in full, and no answer taken that is not from a store."""

    def _do(self, method: str, bucket_name: str, key: str, **options: Any) -> Any:
        response = super()._do(method, bucket_name, key, **options)
        # OSS sends the first with everything, and the second with every object; a proxy may cut the first off.
        if not response.headers.get("x-oss-request-id") and not response.headers.get("etag"):
            close = getattr(response, "close", None) or response.response.close
            close()
            raise NoStoreError(response.status, "an ETag")
        return response

    def parts_with_crc(self, key: str, upload_id: str) -> list[Receipt]:
        """All parts of an upload, with the CRC that OSS keeps of each.

        Source: https://www.alibabacloud.com/help/en/oss/developer-reference/listparts; the element `HashCrc64ecma` of a part is in its answers, e.g.
        https://hexdocs.pm/aliyun_oss/Aliyun.Oss.Object.MultipartUpload-function-list_parts.html
        """
        params = {"uploadId": upload_id, "max-parts": "1000"}
        receipts: list[Receipt] = []
        markers = {"part-number-marker": "NextPartNumberMarker"}
        for root in self._documents("ListPartsResult", key, params, markers):
            receipts += [_receipt(part) for part in root.findall("Part")]
        return receipts

    def pending_uploads(self, prefix: str) -> list[PendingUpload]:
        """All unfinished uploads to keys with this prefix."""
        params = {"uploads": "", "prefix": prefix, "max-uploads": "1000", "encoding-type": "url"}
        markers = {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}
        found: list[PendingUpload] = []
        for root in self._documents("ListMultipartUploadsResult", "", params, markers):
            found += [
                PendingUpload(
                    path=f"{self.bucket_name}/{unquote(_text(upload, 'Key'))}",
                    upload_id=_text(upload, "UploadId"),
                    started_s=_seconds(_text(upload, "Initiated")),
                )
                for upload in root.findall("Upload")
            ]
        return found

    def lifecycle_rules(self) -> list[LifecycleRule]:
        """The rules in force.

        Source: https://www.alibabacloud.com/help/en/oss/developer-reference/getbucketlifecycle
        """
        (root,) = self._documents("LifecycleConfiguration", "", {"lifecycle": ""}, {})
        return [_rule(rule) for rule in root.findall("Rule") if _text(rule, "Status") == "Enabled"]

    def versioning(self) -> str:
        """ "Enabled", "Suspended", or "" where there never was any."""
        (root,) = self._documents("VersioningConfiguration", "", {"versioning": ""}, {})
        return _text(root, "Status")

    def _documents(self, kind: str, key: str, params: dict[str, str], markers: dict[str, str]) -> Iterator[ET.Element]:
        """The answers to a GET, page after page.

        Args:
            kind: of the documents; another one is not OSS's, and must not be taken for an empty one.
            markers: parameters that say where a page begins, and the elements of the one before that hold them.
        """
        params = dict(params)
        while True:
            root = ET.fromstring(self._do("GET", self.bucket_name, key, params=params).read())
            if root.tag != kind:
                raise ET.ParseError(f"<{root.tag}> instead of <{kind}>")
            yield root
            begins = {name: unquote(_text(root, element)) for name, element in markers.items()}
            # A store that says "more" without saying from where would be asked for ever.
            if _text(root, "IsTruncated") != "true" or begins.items() <= params.items() or not any(begins.values()):
                return
            params.update(begins)


def _receipt(part: ET.Element) -> Receipt:
    crc = _text(part, "HashCrc64ecma")
    return Receipt(
        number=int(_text(part, "PartNumber")),
        etag=_text(part, "ETag").strip('"'),
        crc=f"{int(crc):016x}" if crc.isdecimal() else None,
        size=int(_text(part, "Size")),
    )


def _rule(rule: ET.Element) -> LifecycleRule:
    classes = [_text(step, "StorageClass") for step in rule.findall("Transition")]
    return LifecycleRule(
        prefix=_text(rule, "Prefix"),
        is_narrowed=rule.find("Tag") is not None or rule.find("Filter") is not None,
        abort_days=_days(rule, "AbortMultipartUpload/Days"),
        noncurrent_days=_days(rule, "NoncurrentVersionExpiration/NoncurrentDays"),
        expires=any(rule.find(f"Expiration/{name}") is not None for name in ("Days", "Date", "CreatedBeforeDate")),
        archives=any(name in ARCHIVES for name in classes),
    )


def _text(parent: Any, name: str) -> str:
    return (parent.findtext(name) or "").strip()


def _days(parent: ET.Element, name: str) -> int | None:
    days = _text(parent, name)
    return int(days) if days.isdecimal() else None


def _seconds(stamp: str) -> float | None:
    try:
        return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None
