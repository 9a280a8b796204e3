"""The XML documents of OSS, made from those of S3 or written here."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from xml.sax.saxutils import escape

STORAGE_CLASSES = {"STANDARD": "Standard", "STANDARD_IA": "IA", "GLACIER": "Archive", "DEEP_ARCHIVE": "ColdArchive"}
S3_STORAGE_CLASSES = {oss: s3 for s3, oss in STORAGE_CLASSES.items()}

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
    "ListMultipartUploadsResult": {"IsTruncated": "false", "NextKeyMarker": "", "NextUploadIdMarker": ""},
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
    if root.tag == "LifecycleConfiguration":
        _lifecycle_from_s3(root)
    return _DECLARATION.encode() + _bytes(root)


def lifecycle_to_s3(document: bytes) -> bytes:
    """A LifecycleConfiguration of OSS as S3 takes it."""
    root = ET.fromstring(without_namespace(document))
    for element in root.iter("AbortMultipartUpload"):
        element.tag = "AbortIncompleteMultipartUpload"
        for days in element.iter("Days"):
            days.tag = "DaysAfterInitiation"
    return _bytes(root)


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


def _default(parent: ET.Element, tag: str, value: str) -> None:
    if parent.find(tag) is None:
        ET.SubElement(parent, tag).text = value


def _lifecycle_from_s3(root: ET.Element) -> None:
    for element in root.iter("AbortIncompleteMultipartUpload"):
        element.tag = "AbortMultipartUpload"
        for days in element.iter("DaysAfterInitiation"):
            days.tag = "Days"
    for rule in root.findall("Rule"):
        _default(rule, "Prefix", rule.findtext("Filter/Prefix") or "")
