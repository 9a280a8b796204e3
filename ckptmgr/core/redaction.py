"""Secrets that people put into URLs, taken out of what is printed, logged and raised."""

from __future__ import annotations

import re

#: In place of a secret.
HIDDEN = "…"

# `scheme://user:secret@` and, as a path is printed, `scheme:/user:secret@`. A secret may hold a slash, but no user does; the '@' of
# `s3://bucket/artifact@v1`, of an ARN, behind `host:port/` and in an absolute path is none of a user's.
_USER = re.compile(
    r"(?<![\w+.-])(?!file:///)(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*:/+)(?!arn:)(?:[^\s/@:'\"]+@|(?![^\s/@:'\"]+:\d+/)[^\s/@:'\"]*:[^\s'\"]*@)"
)
_QUERY = re.compile(r"(?i)(?P<name>[?&][\w.-]*(?:signature|token|secret|password|credential|key)[\w.-]*=)[^\s&'\"]+")


def without_secrets(text: str) -> str:
    """`text` without the user-info of its URLs, nor the values of a signed query."""
    if "@" in text and ":/" in text:
        text = _USER.sub(rf"\g<scheme>{HIDDEN}@", text)
    if "=" in text and ("?" in text or "&" in text):
        text = _QUERY.sub(rf"\g<name>{HIDDEN}", text)
    return text
