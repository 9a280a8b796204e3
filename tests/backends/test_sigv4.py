"""Signatures, compared with botocore's."""

from __future__ import annotations

import datetime
import random
from typing import Any

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from ckptmgr.backends.sigv4 import EMPTY_SHA256, UNSIGNED, Keys, Signer, encode_path, encode_query

NOW = datetime.datetime(2026, 2, 28, 23, 59, 58, tzinfo=datetime.timezone.utc)
KEYS = Keys("AKIAEXAMPLE", "secret/with+odd=characters", None)
SESSION = Keys("ASIAEXAMPLE", "another", "token//with+odd==characters")
ALPHABET = " aZ9-._~/%+?#&=;:@!$'()*,[]{}|\\^`\"<>\t\x7fäß検🚀é"
ODD = [
    "plain/key.bin",
    "",
    "/leading",
    "a//b///c",
    "a/../b/./c",
    " space  two ",
    "percent%20%2F%",
    "plus+and+plus",
    "question?mark#hash&amp=;",
    "k" * 1000,
    "検" * 300,
    "tilde~star*quote'",
]


@pytest.fixture(autouse=True)
def _botocores_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda **kwargs: NOW.replace(tzinfo=None))


def botocores(
    method: str, path: str, query: list[tuple[str, str]], headers: dict[str, str], payload: str, keys: Keys
) -> dict[str, str]:
    """The headers that botocore adds to the same request."""
    text = encode_query(query)
    url = f"https://bkt.s3.eu-west-1.amazonaws.com{encode_path(path)}{'?' if text else ''}{text}"
    request = AWSRequest(method, url, headers=headers)
    credentials = Credentials(keys.access_key, keys.secret_key, keys.token)
    signer: Any = botocore.auth.S3SigV4Auth(credentials, "s3", "eu-west-1")
    signer.payload = lambda request: payload
    signer.add_auth(request)
    added = {name.lower(): value for name, value in request.headers.items()}
    return {name: value for name, value in added.items() if name not in headers}


def ours(
    method: str, path: str, query: list[tuple[str, str]], headers: dict[str, str], payload: str, keys: Keys
) -> dict[str, str]:
    return Signer("eu-west-1").sign(
        method, encode_path(path), encode_query(query), headers, payload, keys, NOW.timestamp()
    )


def random_text(source: random.Random, most: int) -> str:
    return "".join(source.choice(ALPHABET) for _ in range(source.randrange(most)))


@pytest.mark.parametrize("key", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("keys", [KEYS, SESSION], ids=["keys", "session"])
def test_odd_keys(key: str, keys: Keys) -> None:
    """Every key is encoded once, and not normalised; the token of a session is signed."""
    headers = {"host": "bkt.s3.eu-west-1.amazonaws.com", "x-amz-checksum-crc64nvme": "AAAAAAAAAAA="}
    for request in (
        ("PUT", f"/{key}", [], headers, UNSIGNED, keys),
        ("GET", f"/bkt/{key}", [], {**headers, "range": "bytes=0-9", "if-match": '"e-2"'}, EMPTY_SHA256, keys),
        ("GET", "/", [("prefix", key), ("list-type", "2"), ("delimiter", "/")], headers, EMPTY_SHA256, keys),
    ):
        assert ours(*request) == botocores(*request)


def test_random_requests() -> None:
    """500 requests of every shape."""
    source = random.Random(4)
    for _ in range(500):
        query = [(random_text(source, 8), random_text(source, 20)) for _ in range(source.randrange(4))]
        headers = {"host": "h", **{f"x-amz-{source.randrange(99)}": str(source.random()) for _ in range(3)}}
        request = (
            source.choice(["GET", "PUT", "HEAD", "DELETE"]),
            f"/{random_text(source, 40)}",
            # Of the same name, botocore sorts by value.
            query,
            headers,
            source.choice([EMPTY_SHA256, UNSIGNED]),
            source.choice([KEYS, SESSION]),
        )
        assert ours(*request) == botocores(*request)


def test_the_key_of_the_day_is_that_of_the_secret_and_the_day() -> None:
    """What is kept from the last request is used for no other secret, and no other day."""
    kept = Signer("eu-west-1")
    headers = {"host": "h"}
    for keys in (KEYS, SESSION, KEYS):
        for hours in (0, 1, 48, 0):
            now_s = NOW.timestamp() + 3600 * hours
            arguments = ("GET", "/k", "", headers, EMPTY_SHA256, keys, now_s)
            assert kept.sign(*arguments) == Signer("eu-west-1").sign(*arguments)


def test_secrets_are_not_shown() -> None:
    """Neither a secret nor a token is in what an error or a log would print."""
    assert SESSION.secret_key not in repr(SESSION)
    assert str(SESSION.token) not in repr(SESSION)
