"""Who the OSS stand-in lets in: signatures, clocks, tokens, permissions."""

from __future__ import annotations

import datetime
from dataclasses import replace
from typing import Any

import fastcrc
import pytest

from ckptmgr.testing import oss_signing
from ckptmgr.testing.identities import ADMIN
from ckptmgr.testing.oss_dialect import crc64
from ckptmgr.testing.servers import OssServer
from ckptmgr.testing.store_app import Request

oss2 = pytest.importorskip("oss2", exc_type=ImportError)
from oss2 import exceptions  # type: ignore[import-untyped, unused-ignore]

VERSIONS = pytest.mark.parametrize("version", ["v1", "v4"])


def connect(server: OssServer, bucket: str, version: str, access_key: str, secret_key: str) -> Any:
    auth = (oss2.Auth if version == "v1" else oss2.AuthV4)(access_key, secret_key)
    return oss2.Bucket(auth, server.url, bucket, connect_timeout=60, region="cn-hangzhou")


@VERSIONS
def test_a_wrong_secret_is_refused(oss_server: OssServer, bucket_name: str, version: str) -> None:
    oss_server.create_bucket(bucket_name)
    bucket = connect(oss_server, bucket_name, version, ADMIN.access_key, "wrong")
    with pytest.raises(exceptions.OssError) as caught:
        bucket.put_object("a", b"x")
    assert (caught.value.status, caught.value.code) == (403, "SignatureDoesNotMatch")
    assert oss_server.raw_keys(bucket_name) == []


@VERSIONS
def test_an_unknown_access_key_is_refused(oss_server: OssServer, bucket_name: str, version: str) -> None:
    oss_server.create_bucket(bucket_name)
    with pytest.raises(exceptions.OssError) as caught:
        connect(oss_server, bucket_name, version, "nobody", ADMIN.secret_key).put_object("a", b"x")
    assert (caught.value.status, caught.value.code) == (403, "InvalidAccessKeyId")


@VERSIONS
def test_a_wrong_secret_in_a_signed_url_is_refused(oss_server: OssServer, bucket_name: str, version: str) -> None:
    import requests

    oss_server.create_bucket(bucket_name)
    oss_server.raw_put(bucket_name, "a", b"x")
    good = connect(oss_server, bucket_name, version, ADMIN.access_key, ADMIN.secret_key).sign_url("GET", "a", 60)
    wrong = connect(oss_server, bucket_name, version, ADMIN.access_key, "wrong").sign_url("GET", "a", 60)
    assert requests.get(good, timeout=60).content == b"x"
    assert requests.get(wrong, timeout=60).status_code == 403


def test_anonymous_requests_are_refused(oss_server: OssServer, bucket_name: str) -> None:
    oss_server.create_bucket(bucket_name)
    with pytest.raises(exceptions.AccessDenied):
        oss2.Bucket(oss2.AnonymousAuth(), oss_server.url, bucket_name).list_objects_v2()


@VERSIONS
def test_a_wrong_clock_is_named(oss_server: OssServer, bucket_name: str, version: str) -> None:
    """The same signed request, judged sixteen minutes later, is too old; the signature itself is right."""
    oss_server.create_bucket(bucket_name)
    connect(oss_server, bucket_name, version, ADMIN.access_key, ADMIN.secret_key).put_object("a", b"x")
    sent = oss_server.log[-1]
    request = Request(
        method=sent.method, bucket=sent.bucket, key=sent.key, query=sent.query, headers=sent.headers, body=b"x"
    )
    secrets = {ADMIN.access_key: ADMIN.secret_key}
    assert oss_signing.check(request, secrets) == ADMIN.access_key
    later_s = datetime.datetime.now(datetime.timezone.utc).timestamp() + 16 * 60
    refusal = oss_signing.check(request, secrets, now_s=later_s)
    assert isinstance(refusal, oss_signing.Refusal)
    assert refusal.code == "RequestTimeTooSkewed"


@VERSIONS
@pytest.mark.parametrize("part", ["method", "bucket", "key", "x-oss-meta-step", "content-type", "query"])
def test_a_changed_request_no_longer_fits_its_signature(
    oss_server: OssServer, bucket_name: str, version: str, part: str
) -> None:
    oss_server.create_bucket(bucket_name)
    bucket = connect(oss_server, bucket_name, version, ADMIN.access_key, ADMIN.secret_key)
    bucket.put_object("a", b"x", headers={"x-oss-meta-step": "7", "Content-Type": "text/plain"})
    sent = oss_server.log[-1]
    request = Request(method=sent.method, bucket=sent.bucket, key=sent.key, query=sent.query, headers=sent.headers)
    changed = {
        "method": replace(request, method="DELETE"),
        "bucket": replace(request, bucket="other"),
        "key": replace(request, key="b"),
        "query": replace(request, query={"uploads": ""}),
    }
    other = changed.get(part) or replace(request, headers={**request.headers, part: "8"})
    refusal = oss_signing.check(other, {ADMIN.access_key: ADMIN.secret_key})
    assert isinstance(refusal, oss_signing.Refusal)
    assert refusal.code == "SignatureDoesNotMatch"


@VERSIONS
def test_an_identity_without_list_may_read_and_write_only(
    oss_server: OssServer, bucket_name: str, version: str
) -> None:
    oss_server.create_bucket(bucket_name)
    who = oss_server.identity("no-list")
    bucket = connect(oss_server, bucket_name, version, who.access_key, who.secret_key)
    bucket.put_object("a", b"x")
    assert bucket.get_object("a").read() == b"x"
    for call in (bucket.list_objects, bucket.list_objects_v2, bucket.list_multipart_uploads):
        with pytest.raises(exceptions.AccessDenied):
            call()


def test_a_reader_cannot_write(oss_server: OssServer, bucket_name: str) -> None:
    oss_server.create_bucket(bucket_name)
    oss_server.raw_put(bucket_name, "a", b"x")
    who = oss_server.identity("read-only")
    bucket = connect(oss_server, bucket_name, "v4", who.access_key, who.secret_key)
    assert bucket.get_object("a").read() == b"x"
    with pytest.raises(exceptions.AccessDenied):
        bucket.put_object("a", b"y")
    with pytest.raises(exceptions.AccessDenied):
        bucket.delete_object("a")
    assert oss_server.raw_get(bucket_name, "a") == b"x"


@VERSIONS
def test_an_expired_token_is_refused(oss_server: OssServer, bucket_name: str, version: str) -> None:
    oss_server.create_bucket(bucket_name)
    oss_server.app.live_tokens = {"fresh"}

    def put(token: str) -> None:
        auth = oss2.StsAuth(ADMIN.access_key, ADMIN.secret_key, token, auth_version=version)
        oss2.Bucket(auth, oss_server.url, bucket_name, region="cn-hangzhou").put_object("a", token.encode())

    put("fresh")
    with pytest.raises(exceptions.OssError) as caught:
        put("stale")
    assert (caught.value.status, caught.value.code) == (403, "SecurityTokenExpired")
    assert oss_server.raw_get(bucket_name, "a") == b"fresh"


@pytest.mark.parametrize("data", [b"", b"123456789", bytes(range(256)) * 33])
def test_the_crc_is_the_one_that_oss2_computes(data: bytes) -> None:
    """fastcrc's CRC-64/XZ is crcmod's with OSS's ECMA-182 polynomial, only faster."""
    crcmod = pytest.importorskip("crcmod")
    reference = crcmod.mkCrcFun(0x142F0E1EBA9EA3693, initCrc=0, xorOut=0xFFFFFFFFFFFFFFFF, rev=True)
    assert crc64(data) == str(reference(data)) == str(fastcrc.crc64.xz(data))


def test_the_crc_of_a_known_text() -> None:
    assert fastcrc.crc64.xz(b"123456789") == 0x995DC9BBDF1939FA
