"""Stores for the tests of what happens under faults."""

from __future__ import annotations

import pytest

from ckptmgr.testing.server_store import ServerStore, open_server_store


@pytest.fixture(params=["moto", "oss"])
def store(request: pytest.FixtureRequest, bucket_name: str, monkeypatch: pytest.MonkeyPatch) -> ServerStore:
    """Both dialects, with faults."""
    return open_server_store(request.getfixturevalue(f"{request.param}_server"), bucket_name, monkeypatch.setenv)


@pytest.fixture
def s3(request: pytest.FixtureRequest, bucket_name: str, monkeypatch: pytest.MonkeyPatch) -> ServerStore:
    """The S3 dialect, with faults."""
    return open_server_store(request.getfixturevalue("moto_server"), bucket_name, monkeypatch.setenv)


@pytest.fixture
def oss(request: pytest.FixtureRequest, bucket_name: str, monkeypatch: pytest.MonkeyPatch) -> ServerStore:
    """The OSS dialect, with faults."""
    return open_server_store(request.getfixturevalue("oss_server"), bucket_name, monkeypatch.setenv)
