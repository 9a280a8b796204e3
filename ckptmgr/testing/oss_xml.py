"""The XML documents of OSS, made from those of S3 or written here."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from urllib.parse import quote
from xml.sax.saxutils import escape

STORAGE_CLASSES = {"STANDARD": "Standard", "STANDARD_IA": "IA", "GLACIER": "Archive", "DEEP_ARCHIVE": "ColdArchive"}
S3_STORAGE_CLASSES = {oss: s3 for s3, oss in STORAGE_CLASSES.items()}

# What moto calls what S3, and OSS, call otherwise.
_ROOTS = {
    "GetBucketVersioningOutput": "VersioningConfiguration",
    "GetBucketVersioningResponse": "VersioningConfiguration",
    "ListPartsResponse": "ListPartsResult",
}

_DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>\n'
_NAMESPACE = re.compile(rb'\s+xmlns="[^"]*"')

# What oss2 reads without looking whether it is there, by document, with the value it has when S3 leaves it out.
_REQUIRED = {
    "ListBucketResult": {"IsTruncated": "false"},
    "ListVersionsResult": {
        "IsTruncated": "false",
        "KeyMarker": "",
        "VersionIdMarker": "",
        "Delimiter": "",
        "Prefix": "",
    },
    "ListPartsResult": {"IsTruncated": "false", "NextPartNumberMarker": "0"},
}


def error_document(*, code: str, message: str, request_id: str, ec: str) -> bytes:
    """The body of an error answer."""
    return (
        f"{_DECLARATION}<Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message>"
        f"<RequestId>{request_id}</RequestId><HostId>127.0.0.1</HostId><EC>{ec}</EC></Error>"
    ).encode()


def read_error(document: bytes) -> tuple[str, str]:
    """Code and message of an S3 error document; "" for what it does not say."""
    found = [re.search(rb"<%s>([^<]*)" % tag, document) for tag in (b"Code", b"Message")]
    code, message = (match.group(1).decode() if match else "" for match in found)
    return code, message


def without_namespace(document: bytes) -> bytes:
    """The document as OSS clients write and read it."""
    return _NAMESPACE.sub(b"", document, count=1)


def from_s3(document: bytes, *, is_v1_list: bool = False) -> bytes:
    """An S3 answer as the OSS answer to the same call.

    Args:
        document: what S3 says.
        is_v1_list: the call was GetBucket (ListObjects): its marker is the last name, not a token.
    """
    root = ET.fromstring(without_namespace(document))
    root.tag = _ROOTS.get(root.tag, root.tag)
    for element in root.iter("StorageClass"):
        element.text = STORAGE_CLASSES.get(element.text or "", element.text)
    for element in root.iter("ETag"):
        element.text = (element.text or "").upper()
    if root.tag in ("ListBucketResult", "ListVersionsResult"):
        for element in [*root.iter("Contents"), *root.iter("Version")]:
            _default(element, "Type", "Normal")
    for tag, value in _REQUIRED.get(root.tag, {}).items():
        _default(root, tag, value)
    if is_v1_list and root.findtext("IsTruncated") == "true":
        names = [element.findtext("Key") or "" for element in root.findall("Contents")]
        names += [element.findtext("Prefix") or "" for element in root.findall("CommonPrefixes")]
        ET.SubElement(root, "NextMarker").text = max(names)
    return _DECLARATION.encode() + _bytes(root)


def lower_etags(document: bytes) -> bytes:
    """The document with ETags in lower case, as S3 made them; OSS hands them out in upper case."""
    return re.sub(rb"(<ETag>)([^<]*)(</ETag>)", lambda m: m.group(1) + m.group(2).lower() + m.group(3), document)


def list_buckets(names: Iterable[str]) -> bytes:
    """The answer of GetService."""
    buckets = "".join(f"<Bucket>{_bucket(name)}</Bucket>" for name in names)
    return (
        f"{_DECLARATION}<ListAllMyBucketsResult><Owner><ID>1</ID><DisplayName>1</DisplayName></Owner>"
        f"<Buckets>{buckets}</Buckets></ListAllMyBucketsResult>"
    ).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A multipart upload under way."""

    key: str
    upload_id: str
    begun_s: float


def list_uploads(uploads: Iterable[Upload], *, after: tuple[str, str], limit: int, is_encoded: bool) -> bytes:
    """The answer of ListMultipartUploads.

    Args:
        after: key and id of the last one on the page before; an empty id skips all uploads to that key.
    """
    encode = quote if is_encoded else escape
    later = [
        upload
        for upload in sorted(uploads, key=lambda upload: (upload.key, upload.upload_id))
        if ((upload.key, upload.upload_id) > after if after[1] else upload.key > after[0])
    ]
    page, last = later[:limit], later[limit - 1] if len(later) > limit else None
    entries = "".join(
        f"<Upload><Key>{encode(upload.key)}</Key><UploadId>{upload.upload_id}</UploadId>"
        f"<StorageClass>Standard</StorageClass><Initiated>{_stamp(upload.begun_s)}</Initiated></Upload>"
        for upload in page
    )
    return (
        f"{_DECLARATION}<ListMultipartUploadsResult>{'<EncodingType>url</EncodingType>' if is_encoded else ''}"
        f"<NextKeyMarker>{encode(last.key) if last else ''}</NextKeyMarker>"
        f"<NextUploadIdMarker>{last.upload_id if last else ''}</NextUploadIdMarker>"
        f"<IsTruncated>{'true' if last else 'false'}</IsTruncated>{entries}</ListMultipartUploadsResult>"
    ).encode()


def with_crcs(document: bytes, crcs: Mapping[int, str]) -> bytes:
    """A ListParts answer with the CRC of each part, by its number."""
    root = ET.fromstring(without_namespace(document))
    for part in root.iter("Part"):
        ET.SubElement(part, "HashCrc64ecma").text = crcs[int(part.findtext("PartNumber") or 0)]
    return _DECLARATION.encode() + _bytes(root)


def upload_id(document: bytes) -> str:
    """The id in an answer of InitiateMultipartUpload."""
    return ET.fromstring(without_namespace(document)).findtext("UploadId") or ""


def bucket_info(name: str, *, versioning: str = "") -> bytes:
    """The answer of GetBucketInfo; `versioning` is "", "Enabled" or "Suspended"."""
    state = f"<Versioning>{versioning}</Versioning>" if versioning else ""
    return (
        f"{_DECLARATION}<BucketInfo><Bucket>{_bucket(name)}<Owner><ID>1</ID><DisplayName>1</DisplayName></Owner>"
        f"<AccessControlList><Grant>private</Grant></AccessControlList>{state}</Bucket></BucketInfo>"
    ).encode()


def _bytes(root: ET.Element) -> bytes:
    return bytes(ET.tostring(root, encoding="utf-8"))


def _bucket(name: str) -> str:
    return (
        f"<Name>{name}</Name><Location>oss-cn-hangzhou</Location><CreationDate>2026-01-01T00:00:00.000Z</CreationDate>"
        "<ExtranetEndpoint>oss-cn-hangzhou.invalid</ExtranetEndpoint>"
        "<IntranetEndpoint>oss-cn-hangzhou-internal.invalid</IntranetEndpoint><StorageClass>Standard</StorageClass>"
    )


def _stamp(when_s: float) -> str:
    return datetime.fromtimestamp(when_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _default(parent: ET.Element, tag: str, value: str) -> None:
    if parent.find(tag) is None:
        ET.SubElement(parent, tag).text = value
