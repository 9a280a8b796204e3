"""What is taken out of a text, and what only looks like a secret."""

from __future__ import annotations

import pytest

from ckptmgr.core.redaction import without_secrets


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("x s3://KEY:pw@b/x is no", "x s3://…@b/x is no"),
        ("'s3://KEY@b'", "'s3://…@b'"),
        ("/home/me/s3:/KEY:a/b+c@bkt/x", "/home/me/s3:/…@bkt/x"),
        ("http://u:p@proxy:8080", "http://…@proxy:8080"),
        ("oss://b/k?OSSAccessKeyId=K&Signature=ab%2B&x=1", "oss://b/k?OSSAccessKeyId=…&Signature=…&x=1"),
    ],
)
def test_secrets_are_taken_out(text: str, printed: str) -> None:
    """Of URLs as given, and as a path that was made of one; a secret may hold slashes."""
    assert without_secrets(text) == printed


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/exp/model@v1",
        "file:///data/a:b/model@production",
        "s3://arn:aws:s3:eu:1:accesspoint/ap/model@v1",
        "http://127.0.0.1:9000/bucket/model@v1",
        "RUN@best:eval_loss",
        "a: b@c",
    ],
)
def test_others_stay(text: str) -> None:
    """References to artifacts, and whatever else has an '@'."""
    assert without_secrets(text) == text
