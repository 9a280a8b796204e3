"""From a URL to a backend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckptmgr.backends.generic import GenericBackend
from ckptmgr.backends.local import LocalBackend
from ckptmgr.backends.oss import OSSBackend
from ckptmgr.backends.registry import join, normalize_url, open_store
from ckptmgr.backends.retry import RetryingBackend
from ckptmgr.backends.s3 import S3Backend
from ckptmgr.core.errors import ConfigError, MissingExtraError


@pytest.mark.parametrize(
    ("url", "kind", "path", "normal"),
    [
        ("s3://bucket/a/b", S3Backend, "bucket/a/b", "s3://bucket/a/b"),
        ("s3://bucket", S3Backend, "bucket", "s3://bucket"),
        ("s3://bucket//a///b//", S3Backend, "bucket/a/b", "s3://bucket/a/b"),
        ("S3://bucket/a/", S3Backend, "bucket/a", "s3://bucket/a"),
        ("s3a://bucket/a", S3Backend, "bucket/a", "s3://bucket/a"),
        ("s3://bucket/user@host/x", S3Backend, "bucket/user@host/x", "s3://bucket/user@host/x"),
        ("s3://bucket/50%25 off+#1", S3Backend, "bucket/50%25 off+#1", "s3://bucket/50%25 off+#1"),
        ("oss://bucket/a/", OSSBackend, "bucket/a", "oss://bucket/a"),
        ("file:///data/runs/", LocalBackend, "/data/runs", "file:///data/runs"),
        ("file:////data//runs", LocalBackend, "/data/runs", "file:///data/runs"),
        ("file://localhost/data", LocalBackend, "/data", "file:///data"),
        ("local:///data", LocalBackend, "/data", "file:///data"),
        ("/data//runs/", LocalBackend, "/data/runs", "file:///data/runs"),
        ("/data/with space?and#more%20", LocalBackend, "/data/with space?and#more%20", None),
        ("memory://a/b/", GenericBackend, "/a/b", "memory://a/b"),
    ],
)
def test_open_store(url: str, kind: type, path: str, normal: str | None) -> None:
    """Each form of URL opens the right backend at the right path, and has one normal form that means the same."""
    backend, root = open_store(url, retry=False)
    assert type(backend) is kind
    assert root == path
    if normal is not None:
        assert normalize_url(url) == normal
        assert normalize_url(normal) == normal
        assert open_store(normal, retry=False)[1] == path


def test_relative_paths_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths are taken from the working directory, `~` from the home directory; pathlib works."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert open_store("runs/x/")[1] == str(tmp_path / "runs" / "x")
    assert open_store("../up")[1] == str(tmp_path.parent / "up")
    assert open_store(tmp_path / "p")[1] == str(tmp_path / "p")
    assert normalize_url("~/runs") == "file:///home/me/runs"


def test_retries_are_on_by_default(tmp_path: Path) -> None:
    """A store is opened with retries unless they are declined."""
    backend, _ = open_store(str(tmp_path))
    assert isinstance(backend, RetryingBackend)
    assert isinstance(backend.inner, LocalBackend)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "empty"),
        (" s3://bucket/a", "space"),
        ("s3://", "no bucket"),
        ("s3:///key", "no bucket"),
        ("oss://", "no bucket"),
        ("s3:/bucket/key", "two slashes"),
        ("file:/data", "two slashes"),
        ("oss:bucket", "two slashes"),
        ("s3://bucket/a/../b", "'..'"),
        ("s3://bucket/./b", "'.'"),
        ("file://data/runs", "three slashes"),
        ("/data/\0", "NUL"),
    ],
)
def test_malformed_urls_are_refused(url: str, says: str) -> None:
    """A URL that cannot be meant is a usage error that says what is wrong, not a directory of a strange name."""
    with pytest.raises(ConfigError, match="(?s)" + says.replace(".", r"\.")) as caught:
        open_store(url)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAX:s3cr3t@bucket/a",
        "s3://s3cr3t@bucket/a",
        "s3://AKIAX:s3cr3t/more@bucket/a",
        "oss://id:s3cr3t@bucket",
        "s3://bucket/a?X-Amz-Signature=s3cr3t",
        "memory://user:s3cr3t@host/a",
    ],
)
def test_secrets_in_urls_are_refused_and_not_repeated(url: str) -> None:
    """Credentials do not belong in URLs, which end up in logs: neither does the error repeat them."""
    for call in (open_store, normalize_url):
        with pytest.raises(ConfigError) as caught:
            call(url)
        assert "s3cr3t" not in str(caught.value) + repr(caught.value)


def test_unknown_scheme() -> None:
    """An unknown scheme is a usage error that lists the known ones and guesses what was meant."""
    with pytest.raises(ConfigError, match="unknown scheme 'os3'") as caught:
        open_store("os3://bucket/x")
    message = str(caught.value)
    for known in ("s3", "oss", "file", "memory", "abfs", "gcs"):
        assert f"{known}" in message
    assert "did you mean" in message


def test_missing_package_of_another_filesystem() -> None:
    """A scheme that fsspec knows, but whose package is missing, says what to install."""
    with pytest.raises(MissingExtraError, match="gcsfs"):
        open_store("gs://bucket/x")


_WITHOUT = """
import sys
sys.modules["{module}"] = None
from ckptmgr.backends.registry import open_store
from ckptmgr.core.errors import MissingExtraError
try:
    open_store("{scheme}://bucket/x")
except MissingExtraError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(("scheme", "module"), [("s3", "boto3"), ("s3", "botocore"), ("oss", "oss2")])
def test_missing_extra(scheme: str, module: str) -> None:
    """Without the library, the error names the extra that brings it."""
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT.format(module=module, scheme=scheme)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert f"pip install 'ckptmgr[{scheme}]'" in done.stdout
    assert module in done.stdout


def test_a_local_store_opens_without_the_cloud_libraries(tmp_path: Path) -> None:
    """Start-up time counts: neither torch, boto3, oss2 nor tenacity is imported to list a directory."""
    code = (
        "import json, sys; from ckptmgr.backends.registry import open_store; s, r = open_store(sys.argv[1]); s.find(r);"
        "print(json.dumps([m for m in ('torch', 'boto3', 'botocore', 'oss2', 'requests', 'tenacity', 'moto') if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        (("/a/b", "c"), "/a/b/c"),
        (("/a/b/", "/c/", "d/"), "/a/b/c/d"),
        (("bucket", "", "k"), "bucket/k"),
        (("s3://bucket/", "k"), "s3://bucket/k"),
        (("s3://", "bucket", "k"), "s3://bucket/k"),
        (("a",), "a"),
        (("/", "a"), "/a"),
    ],
)
def test_join(parts: tuple[str, ...], joined: str) -> None:
    """One slash between the parts, none at the end."""
    assert join(*parts) == joined
