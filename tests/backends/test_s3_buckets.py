"""What is asked of an S3 bucket beside its objects: unfinished uploads, and what it does by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from ckptmgr.backends.base import BucketFacts
from ckptmgr.backends.registry import open_store
from ckptmgr.core.errors import AccessDeniedError, BucketNotFoundError
from ckptmgr.testing.faults import Fault

if TYPE_CHECKING:
    from ckptmgr.testing.servers import MotoServer
    from ckptmgr.testing.stores import BucketStore, Store


def _client(url: str) -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=url)


def _begin(store: BucketStore, *keys: str) -> dict[str, str]:
    client = _client(store.server.url)
    return {key: client.create_multipart_upload(Bucket=store.bucket, Key=key)["UploadId"] for key in keys}


@pytest.mark.parametrize("kind", ["s3", "moto"])
def test_unfinished_uploads(make_store: Callable[[str], Store], kind: str) -> None:
    """Those below the path are told, with their ids and when they were begun; whole components only."""
    store: Any = make_store(kind)
    ids = _begin(store, "run/a", "run/b/c", "runs/x", "z")
    fs, root = open_store(f"s3://{store.bucket}/run")
    found = fs.list_uploads(root)
    assert {upload.path: upload.upload_id for upload in found} == {
        f"{store.bucket}/run/a": ids["run/a"],
        f"{store.bucket}/run/b/c": ids["run/b/c"],
    }
    if kind == "s3":
        assert all(abs(time.time() - (upload.started_s or 0)) < 120 for upload in found)
    assert len(fs.list_uploads(store.bucket)) == 4
    for upload in found:
        fs.abort_upload(upload.path, upload.upload_id)
    assert fs.list_uploads(root) == []


def test_more_unfinished_uploads_than_one_page(
    make_store: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every page is asked for; a store that says "more" without saying from where ends it."""
    from ckptmgr.backends.s3client import S3Client

    store: Any = make_store("moto")
    asked: list[dict[str, Any]] = []
    pages = {
        "": {"IsTruncated": True, "NextKeyMarker": "k1", "NextUploadIdMarker": "u1", "Uploads": [_entry("k1", "u1")]},
        "k1": {"IsTruncated": True, "NextKeyMarker": "k2", "NextUploadIdMarker": "u2", "Uploads": [_entry("k2", "u2")]},
        "k2": {"IsTruncated": True, "Uploads": [_entry("k3", "u3")]},
    }

    def request(self: S3Client, operation: str, path: str, /, **arguments: Any) -> dict[str, Any]:
        asked.append(arguments)
        return pages[arguments.get("KeyMarker", "")]

    monkeypatch.setattr(S3Client, "request", request)
    fs, root = open_store(f"s3://{store.bucket}")
    assert [upload.upload_id for upload in fs.list_uploads(root)] == ["u1", "u2", "u3"]
    assert [arguments.get("UploadIdMarker") for arguments in asked] == [None, "u1", "u2"]


def test_a_store_that_takes_a_prefix_for_a_key(
    make_store: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MinIO tells nothing of a prefix and everything of a bucket: what lies below the path is found all the same."""
    from ckptmgr.backends.s3client import S3Client

    store: Any = make_store("moto")
    ask = S3Client.request

    def request(self: S3Client, operation: str, path: str, /, **arguments: Any) -> dict[str, Any]:
        return {} if arguments.get("Prefix") else ask(self, operation, path, **arguments)

    ids = _begin(store, "run/a", "run/b", "runs/x")
    monkeypatch.setattr(S3Client, "request", request)
    fs, root = open_store(f"s3://{store.bucket}/run")
    assert {upload.upload_id for upload in fs.list_uploads(root)} == {ids["run/a"], ids["run/b"]}
    assert fs.list_uploads(f"{store.bucket}/other") == []


def _entry(key: str, upload_id: str) -> dict[str, Any]:
    return {"Key": key, "UploadId": upload_id}


def test_a_bucket_without_rules(make_store: Callable[[str], Store]) -> None:
    """No versioning, no rule: both are known, which is not the same as unknown."""
    store: Any = make_store("moto")
    fs, root = open_store(f"s3://{store.bucket}/run")
    assert fs.bucket_facts(root) == BucketFacts(
        versioning="off", abort_days=0, expires=False, archives=False, noncurrent_days=0
    )


def test_rules_and_versioning(make_store: Callable[[str], Store]) -> None:
    """Rules count where they concern the path: those above it, and what takes away a part of what lies below it."""
    store: Any = make_store("moto")
    client = _client(store.server.url)
    client.put_bucket_versioning(Bucket=store.bucket, VersioningConfiguration={"Status": "Suspended"})
    rules: list[dict[str, Any]] = [
        {"ID": "1", "Filter": {"Prefix": "run"}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 9}},
        {"ID": "2", "Filter": {"Prefix": ""}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}},
        {"ID": "3", "Filter": {"Prefix": "other/"}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}},
        {"ID": "4", "Filter": {"Prefix": "run/checkpoints/"}, "Expiration": {"Days": 30}},
        {
            "ID": "5",
            "Filter": {"And": {"Prefix": "other/", "Tags": [{"Key": "a", "Value": "b"}]}},
            "Transitions": [{"Days": 30, "StorageClass": "GLACIER"}],
        },
        {"ID": "6", "Filter": {"Prefix": ""}, "NoncurrentVersionExpiration": {"NoncurrentDays": 3}},
    ]
    configuration: dict[str, Any] = {"Rules": [{"Status": "Enabled", **rule} for rule in rules]}
    configuration["Rules"].append(
        {"ID": "7", "Status": "Disabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 1}}
    )
    client.put_bucket_lifecycle_configuration(Bucket=store.bucket, LifecycleConfiguration=configuration)
    fs, _ = open_store(f"s3://{store.bucket}")
    assert fs.bucket_facts(f"{store.bucket}/run") == BucketFacts(
        versioning="suspended", abort_days=7, expires=True, archives=False, noncurrent_days=3
    )
    assert fs.bucket_facts(f"{store.bucket}/elsewhere") == BucketFacts(
        versioning="suspended", abort_days=7, expires=False, archives=False, noncurrent_days=3
    )
    assert fs.bucket_facts(f"{store.bucket}/other").archives


@pytest.mark.parametrize(
    ("status", "code"), [(403, "AccessDenied"), (501, "NotImplemented"), (405, "MethodNotAllowed")]
)
def test_what_may_not_be_asked_is_unknown(
    make_store: Callable[[str], Store], moto_server: MotoServer, status: int, code: str
) -> None:
    """A refusal, and a store that knows no such thing, is None and no error."""
    store: Any = make_store("moto")
    for query in ("versioning", "lifecycle"):
        moto_server.faults.add(Fault(query=query, status=status, code=code, times=None))
    fs, root = open_store(f"s3://{store.bucket}")
    assert fs.bucket_facts(root) == BucketFacts()


def test_no_bucket_and_no_permission_to_list(
    make_store: Callable[[str], Store], moto_server: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing bucket is an error, and so is a listing of uploads that is refused: not an empty one (I7)."""
    store: Any = make_store("moto")
    fs, root = open_store("s3://no-such-bucket/run", retry=False)
    with pytest.raises(BucketNotFoundError):
        fs.bucket_facts(root)
    with pytest.raises(BucketNotFoundError):
        fs.list_uploads(root)
    for name, value in moto_server.env_of("no-list").items():
        monkeypatch.setenv(name, value)
    fs, root = open_store(f"s3://{store.bucket}/run", retry=False)
    with pytest.raises(AccessDeniedError):
        fs.list_uploads(root)


def test_how_it_is_reached(make_store: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoint, region, addressing, profile, and where the credentials were found; never what they are."""
    store: Any = make_store("moto")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token-of-the-test")
    fs, _ = open_store(f"s3://{store.bucket}")
    connection = fs.connection()
    assert connection.endpoint == store.server.url
    assert (connection.region, connection.addressing) == ("us-east-1", "path")
    assert connection.profile is not None
    assert connection.profile.name == "other"
    assert "AWS_ACCESS_KEY_ID" in str(connection.credentials)
    assert (connection.is_temporary, connection.expires_s) == (True, None)
    for secret in ("a-token-of-the-test", *store.env.values()):
        if secret not in ("true", "us-east-1", store.server.url):
            assert secret not in repr(connection)
