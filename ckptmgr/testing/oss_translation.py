"""OSS's requests as those of S3, and S3's answers as those of OSS: names of headers and parameters, and which call it is."""

from __future__ import annotations

from ckptmgr.testing import oss_xml
from ckptmgr.testing.store_app import Reply, Request

MAX_KEYS = 1000
#: Metadata of ours, of which S3's side knows nothing.
TYPE, TARGET = "x-amz-meta-ckptmgr-oss-type", "x-amz-meta-ckptmgr-oss-target"
CODES = {"BadDigest": "InvalidDigest"}
CODE_OF_STATUS = {304: "NotModified", 403: "AccessDenied", 404: "NoSuchKey", 412: "PreconditionFailed"}
_ENCRYPTIONS = {"KMS": "aws:kms"}
_S3_ENCRYPTIONS = {s3: oss for oss, s3 in _ENCRYPTIONS.items()}
_SSE = "server-side-encryption"
_PASSED_IN = (
    *("content-type", "range", "if-modified-since", "if-unmodified-since", "cache-control"),
    *("content-disposition", "content-encoding"),
)
_PASSED_OUT = (
    *("content-type", "etag", "last-modified", "content-range", "accept-ranges", "cache-control"),
    *("content-disposition", "content-encoding"),
)
_TRANSLATED_IN = ("x-oss-copy-source", "x-oss-copy-source-range", "x-oss-tagging", "x-oss-metadata-directive")
_AUTH_QUERY = ("OSSAccessKeyId", "Signature", "Expires", "security-token")
# oss2 sends these without a value; S3 takes an empty token for a broken one.
_OPTIONAL_QUERY = (
    *("continuation-token", "marker", "start-after", "delimiter", "prefix", "key-marker", "upload-id-marker"),
    *("fetch-owner", "objectMeta", "part-number-marker"),
)


def is_write(method: str, key: str, query: dict[str, str]) -> bool:
    """Whether the request changes what a key holds; parts of an upload do not."""
    if not key:
        return method == "POST" and "delete" in query
    if method == "POST":
        return "uploadId" in query
    return method == "DELETE" or (method == "PUT" and not query)


def headers_in(request: Request) -> dict[str, str]:
    """The headers for S3."""
    headers: dict[str, str] = {}
    for name, value in request.headers.items():
        if name.startswith("x-oss-meta-"):
            headers["x-amz-meta-" + name[11:]] = value
        elif name == "x-oss-storage-class":
            headers["x-amz-storage-class"] = oss_xml.S3_STORAGE_CLASSES.get(value, value)
        elif name == f"x-oss-{_SSE}":
            headers[f"x-amz-{_SSE}"] = _ENCRYPTIONS.get(value, value)
        elif name == f"x-oss-{_SSE}-key-id":
            headers[f"x-amz-{_SSE}-aws-kms-key-id"] = value
        elif name in _TRANSLATED_IN or name.startswith("x-oss-copy-source-if"):
            headers["x-amz-" + name[6:]] = value
        elif name in ("if-match", "if-none-match"):
            # OSS has no conditional writes by ETag; its own way is x-oss-forbid-overwrite.
            if request.method in ("GET", "HEAD"):
                headers[name] = value.lower()
        elif name in _PASSED_IN:
            headers[name] = value
    return headers


def query_in(query: dict[str, str]) -> dict[str, str]:
    """The parameters for S3."""
    return {
        name: value
        for name, value in query.items()
        if not name.lower().startswith("x-oss-") and name not in _AUTH_QUERY and (value or name not in _OPTIONAL_QUERY)
    } | {name: str(min(int(query[name]), MAX_KEYS)) for name in ("max-keys",) if query.get(name, "").isdecimal()}


def is_v1_list(query: dict[str, str]) -> bool:
    """Whether a GET of a bucket is a ListObjects of the first version."""
    names = set(query)
    if names & {"list-type", "uploads", "versions"}:
        return False
    return not names or bool(names & {"prefix", "delimiter", "marker", "max-keys"})


def v1_list_as_v2(query: dict[str, str]) -> dict[str, str]:
    """The same listing as one of the second version."""
    # moto's ListObjects (v1) does not count common prefixes and answers an opaque marker, so its v2 is used for both.
    query = {**query, "list-type": "2", "fetch-owner": "true"}
    marker = query.pop("marker", None)
    if marker:
        is_prefix = query.get("delimiter") and marker.endswith(query["delimiter"])
        query["start-after"] = marker + (chr(0x10FFFF) if is_prefix else "")
    return query


def body_in(request: Request, query: dict[str, str]) -> bytes:
    """The body for S3."""
    if not request.key and request.method == "PUT" and not query:
        # CreateBucketConfiguration of OSS names a storage class; S3 expects a region there.
        return b""
    if not query or not request.body[:200].lstrip().startswith(b"<"):
        return request.body
    body = oss_xml.without_namespace(request.body)
    return oss_xml.lower_etags(body) if request.method == "POST" and "uploadId" in query else body


def headers_out(method: str, reply: Reply) -> dict[str, str]:
    """The headers of an answer for OSS's clients."""
    headers: dict[str, str] = {}
    for name, value in reply.headers.items():
        if name.startswith("x-amz-meta-") and name not in (TYPE, TARGET):
            headers["x-oss-meta-" + name[11:]] = value
        elif name in ("x-amz-version-id", "x-amz-delete-marker") and value != "null":
            headers["x-oss-" + name[6:]] = value
        elif name == f"x-amz-{_SSE}":
            headers[f"x-oss-{_SSE}"] = _S3_ENCRYPTIONS.get(value, value)
        elif name == f"x-amz-{_SSE}-aws-kms-key-id" and value != "None":
            headers[f"x-oss-{_SSE}-key-id"] = value
        elif name in _PASSED_OUT or (name == "content-length" and method == "HEAD"):
            headers[name] = value
    if "etag" in headers:
        headers["etag"] = headers["etag"].upper()
    return headers
