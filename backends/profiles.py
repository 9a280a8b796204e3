"""What is known in advance of each kind of store: how buckets are named, what it makes of checksums, of parts, and of create-only writes.

A profile is chosen by the host of the endpoint; `CKPTMGR_STORE_PROFILE` names another, and single options go over both. It holds only what a client
cannot find out by itself at no cost, and each fact has its source beside it. A profile is *tested* if this project's own tests run against that
software; all others rest on their sources. What a bucket makes of create-only writes is probed when a run is created, whatever is expected here,
except where the profile says that they are ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from ckptmgr.backends.options import Addressing, Checksum, StoreOptions
from ckptmgr.core.errors import ConfigError

Expected = Literal["yes", "no", "unknown"]

_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One kind of store.

    Attributes:
        name: what `CKPTMGR_STORE_PROFILE` takes.
        title: for readers.
        kind: the scheme that it is reached by.
        hosts: ends of host names; one that begins with a dot stands for what is below it.
        servers: beginnings of the `Server` header that this software answers with.
        addressing: where the bucket's name goes; `auto` leaves it to botocore and the user's own configuration.
        checksum: `none`: checksum headers are never sent, for this store answers them with an error, or takes them into a signature of its own that
            then differs. `auto`: sent until the store is seen to refuse them. `crc64nvme`: sent; a refusal is an error.
        create_only: whether a second create-only write is refused; with "no" it is not even probed, with "unknown" only the probe says.
        min_part_bytes: of every part but the last.
        max_part_bytes: of every part.
        equal_parts: all parts but the last must have the same size; ours always have.
        region: for a signature where the user gives none; "" where there must be one.
        tested_with: the software that this project's tests run against; "" for an untested profile.
        notes: what it lacks or does otherwise, a sentence each.
        sources: where all this is from.
    """

    name: str
    title: str
    kind: Literal["s3", "oss"] = "s3"
    hosts: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    addressing: Addressing = "auto"
    checksum: Checksum = "auto"
    create_only: Expected = "unknown"
    min_part_bytes: int = 5 * _MIB
    max_part_bytes: int = 5 * _GIB
    equal_parts: bool = False
    region: str = ""
    tested_with: str = ""
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def tested(self) -> bool:
        return bool(self.tested_with)

    def matches(self, host: str) -> bool:
        """Whether `host` is one of this store's."""
        return any(host.endswith(end) if end.startswith(".") else host == end for end in self.hosts)


_AWS = Profile(
    name="aws",
    title="Amazon S3",
    hosts=(".amazonaws.com", ".amazonaws.com.cn"),
    servers=("AmazonS3",),
    checksum="crc64nvme",
    create_only="yes",
    notes=("A bucket policy that enforces conditional writes refuses server-side copies.",),
    sources=(
        "https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html",
        "https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html",
        "https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html",
    ),
)

_R2 = Profile(
    name="r2",
    title="Cloudflare R2",
    hosts=(".r2.cloudflarestorage.com",),
    checksum="crc64nvme",
    create_only="yes",
    equal_parts=True,
    region="auto",
    notes=(
        "All parts of an upload but the last have the same size.",
        "Of the checksums of whole objects it keeps CRC-64/NVME only.",
    ),
    sources=(
        "https://developers.cloudflare.com/r2/api/s3/api/",
        "https://developers.cloudflare.com/r2/api/s3/conditional-operations/",
        "https://github.com/cloudflare/cloudflare-docs/pull/23443",
    ),
)

_GCS = Profile(
    name="gcs-s3",
    title="Google Cloud Storage, S3 interoperability",
    hosts=("storage.googleapis.com", ".storage.googleapis.com"),
    checksum="none",
    create_only="no",
    region="auto",
    notes=(
        "Conditions are generation numbers, not ETags: create-only writes over the S3 interface are not relied on.",
        "It has no S3 checksums: what is stored is proven by reading it back, `verify --quick` compares sizes only.",
        "gs:// through gcsfs is the native way.",
    ),
    sources=(
        "https://cloud.google.com/storage/docs/request-preconditions",
        "https://github.com/apache/opendal/issues/7889",
        "https://github.com/canonical/postgresql-k8s-operator/pull/901",
    ),
)

_OSS = Profile(
    name="oss",
    title="Aliyun OSS",
    kind="oss",
    hosts=(".aliyuncs.com",),
    servers=("AliyunOSS",),
    addressing="virtual",
    checksum="none",
    create_only="yes",
    min_part_bytes=100 << 10,
    notes=(
        "In a bucket whose versioning is or was enabled, create-only writes are ignored.",
        "It keeps a CRC-64/XZ of each object, which is compared after each write.",
        "Tested against a dialect of it that this project has built, and not against the service.",
    ),
    sources=(
        "https://www.alibabacloud.com/help/en/oss/developer-reference/putobject",
        "https://www.alibabacloud.com/help/en/oss/user-guide/multipart-upload",
        "https://www.alibabacloud.com/help/en/oss/developer-reference/check-data-transmission-integrity-by-using-crc-64",
    ),
)

_OSS_S3 = Profile(
    name="oss-s3",
    title="Aliyun OSS, S3-compatible endpoint",
    hosts=(".aliyuncs.com",),
    servers=("AliyunOSS",),
    addressing="virtual",
    checksum="none",
    create_only="no",
    notes=(
        "Buckets are host names only.",
        "Trailing checksums (aws-chunked) are refused, EC 0017-00000804; no checksum headers are sent.",
        "No condition on writes is documented for it: oss:// has one, and checksums, and is the better way.",
    ),
    sources=(
        "https://www.alibabacloud.com/help/en/oss/developer-reference/use-amazon-s3-sdks-to-access-oss",
        "https://www.alibabacloud.com/help/en/oss/user-guide/0017-00000804",
        "https://github.com/apache/iceberg-python/issues/2877",
    ),
)

_B2 = Profile(
    name="b2",
    title="Backblaze B2",
    hosts=(".backblazeb2.com",),
    checksum="none",
    notes=("Checksum headers are refused with 400, on reads too: what is stored is proven by reading it back.",),
    sources=(
        "https://www.backblaze.com/docs/cloud-storage-s3-compatible-api",
        "https://github.com/jschneier/django-storages/issues/1498",
        "https://github.com/diced/zipline/issues/746",
    ),
)

_WASABI = Profile(
    name="wasabi",
    title="Wasabi",
    hosts=(".wasabisys.com",),
    notes=("A checksum of a part is taken only where the upload was begun with one, as ours are.",),
    sources=("https://docs.wasabi.com/apidocs/wasabi-api", "https://github.com/EnterpriseDB/barman/issues/1064"),
)

_TIGRIS = Profile(
    name="tigris",
    title="Tigris",
    hosts=("fly.storage.tigris.dev", ".fly.storage.tigris.dev", "t3.storage.dev", ".t3.storage.dev"),
    create_only="yes",
    region="auto",
    notes=(
        "In buckets with several regions, conditions are certain only for requests that go to the leader; use one region.",
    ),
    sources=(
        "https://www.tigrisdata.com/docs/objects/conditionals",
        "https://www.tigrisdata.com/docs/api/s3",
    ),
)

_SPACES = Profile(
    name="spaces",
    title="DigitalOcean Spaces",
    hosts=(".digitaloceanspaces.com",),
    sources=("https://docs.digitalocean.com/products/spaces/reference/s3-compatibility/",),
)

_MINIO = Profile(
    name="minio",
    title="MinIO",
    servers=("MinIO",),
    create_only="yes",
    notes=("Releases before May 2024 ignore conditions on multipart uploads; before 2025, they know no CRC-64/NVME.",),
    sources=(
        "https://github.com/minio/minio/pull/19713",
        "https://github.com/minio/minio/pull/20855",
        "https://github.com/minio/minio/issues/20989",
    ),
)

_CEPH = Profile(
    name="ceph",
    title="Ceph RGW",
    servers=("Ceph",),
    notes=("Conditions on multipart uploads are known to releases from late 2025 on only.",),
    sources=("https://github.com/ceph/s3-tests/issues/583", "https://github.com/ceph/s3-tests/pull/693"),
)

_SEAWEED = Profile(
    name="seaweedfs",
    title="SeaweedFS",
    servers=("SeaweedFS",),
    create_only="yes",
    tested_with="SeaweedFS 4.48",
    notes=("Releases before July 2026 keep no checksum of the whole of a multipart object.",),
    sources=(
        "the contract suite of this project",
        "https://github.com/seaweedfs/seaweedfs/pull/10236",
    ),
)

_STORAGEGRID = Profile(
    name="storagegrid",
    title="NetApp StorageGRID",
    notes=(
        "Depending on its configuration, the condition is refused with 501, or accepted without effect.",
        "CRC-64/NVME is known from 12.1 on.",
    ),
    sources=("https://docs.netapp.com/us-en/storagegrid/release-notes/changes-to-s3-rest-api.html",),
)

#: For every endpoint that no other profile claims.
OTHER = Profile(
    name="other", title="S3-compatible store", notes=("Nothing is known in advance; `ckptmgr doctor` finds out.",)
)
_OTHER_OSS = dataclasses.replace(
    _OSS, name="oss-other", title="OSS-compatible endpoint or custom domain", hosts=(), addressing="auto"
)

#: All of them; of one kind the first match counts.
PROFILES: tuple[Profile, ...] = (
    *(_AWS, _R2, _GCS, _OSS, _OSS_S3, _B2, _WASABI, _TIGRIS, _SPACES),
    *(_MINIO, _CEPH, _SEAWEED, _STORAGEGRID, OTHER, _OTHER_OSS),
)


def profile_of(kind: Literal["s3", "oss"], endpoint: str, options: StoreOptions | None = None) -> Profile:
    """The profile of the store at `endpoint`, with what `options` say in place of its own.

    Args:
        endpoint: a URL.

    Raises:
        ConfigError: `options` name a profile that does not exist, or is of the other kind.
    """
    options = options or StoreOptions()
    host = (urlsplit(endpoint).hostname or "").lower()
    found = _by_name(kind, options.profile) if options.profile is not None else _by_host(kind, host)
    changes: dict[str, object] = {}
    if options.addressing != "auto":
        changes["addressing"] = options.addressing
    elif _is_address(host):
        changes["addressing"] = "path"
    if options.checksum != "auto":
        changes["checksum"] = options.checksum
    if options.create_only == "no":
        changes["create_only"] = "no"
    if options.part_bytes is not None and options.part_bytes < found.min_part_bytes:
        raise ConfigError(
            f"parts of {options.part_bytes} bytes are too small for {found.title}",
            hint=f"set CKPTMGR_PART_SIZE to {found.min_part_bytes >> 10}KiB or more",
        )
    return dataclasses.replace(found, **changes) if changes else found  # type: ignore[arg-type]


def recognised(kind: str, server: str | None) -> Profile | None:
    """The profile whose software answers with this `Server` header; for advice only, since proxies change it."""
    return next((p for p in PROFILES if server and p.kind == kind and server.startswith(p.servers or ("\0",))), None)


def _by_name(kind: str, name: str) -> Profile:
    known = {profile.name: profile for profile in PROFILES if profile.kind == kind}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"there is no profile {name!r} for {kind}:// stores",
            hint=f"{meant}CKPTMGR_STORE_PROFILE takes one of {', '.join(known)}",
        )
    return known[name]


def _by_host(kind: str, host: str) -> Profile:
    other = OTHER if kind == "s3" else _OTHER_OSS
    return next((profile for profile in PROFILES if profile.kind == kind and profile.matches(host)), other)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
