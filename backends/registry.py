"""From a URL to a backend. boto3 and oss2 are imported only when a URL of theirs is opened."""

from __future__ import annotations

import difflib
import os
import re
import threading
from collections.abc import Callable

import fsspec

from ckptmgr.backends.base import Backend
from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.pace import pace_for
from ckptmgr.backends.retry import INTERACTIVE, Retrier, RetryingBackend, RetryPolicy
from ckptmgr.core.errors import ConfigError, MissingExtraError

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_ONE_SLASH = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?P<rest>/?[^/].*)", re.DOTALL)
_ALIASES = {"local": "file", "s3a": "s3", "s3n": "s3"}
_OWN = ("file", "s3", "oss", "memory")
_COMMON = ("gcs", "abfs", "hf", "hdfs", "sftp")


def open_store(
    url: str | os.PathLike[str],
    *,
    retry: bool = True,
    policy: RetryPolicy = INTERACTIVE,
    stop: threading.Event | None = None,
    options: StoreOptions | None = None,
) -> tuple[Backend, str]:
    """The backend for `url`, and the path of `url` in it: no protocol, no trailing slash. Makes no request.

    Args:
        url: `s3://bucket/prefix`, `oss://bucket/prefix`, `file:///dir`, a path, or any URL that fsspec knows.
        retry: try transient failures again.
        policy: how often; also for the single parts of a large upload.
        stop: when set, retries end at once.
        options: how the store is to be used; what the `CKPTMGR_*` variables say if None.

    Raises:
        ConfigError: the URL is malformed, carries credentials or a query, or has a scheme nobody knows; or a variable is wrong.
        MissingExtraError: the scheme needs a package that is not installed.
    """
    scheme, path = _split(url)
    options = StoreOptions.from_env() if options is None else options
    retrier = Retrier(policy if retry else RetryPolicy(attempts=1), pace=pace_for(options), stop=stop)
    backend = _backend(scheme, retrier, options)
    # As the filesystem itself writes its paths, so that what it lists begins with this one (memory:// has a leading slash).
    path = backend._strip_protocol(path)
    return (RetryingBackend(backend, retrier) if retry else backend), path


def normalize_url(url: str | os.PathLike[str]) -> str:
    """`url` in the one form that names, records and comparisons use: `s3://bucket/prefix`, `file:///absolute/path`.

    Raises:
        ConfigError: as `open_store`, except that the scheme need not be known.
    """
    scheme, path = _split(url)
    return f"{scheme}://{path}"


def join(*parts: str) -> str:
    """`parts` with exactly one slash between them; empty ones are left out, a leading slash (or `scheme://`) is kept."""
    first, *rest = [part for part in parts if part]
    tail = [piece for piece in (part.strip("/") for part in rest) if piece]
    head = first if first.endswith("://") else first.rstrip("/")
    return "/".join([head, *tail]) if not head.endswith("://") else head + "/".join(tail)


def _split(url: str | os.PathLike[str]) -> tuple[str, str]:
    text = os.fspath(url)
    if not text or text != text.strip():
        raise ConfigError(
            f"a store URL must not be empty or begin or end with a space: {text!r}",
            hint="e.g. s3://bucket/prefix or ./runs",
        )
    match = _URL.fullmatch(text)
    if match is None:
        typo = _ONE_SLASH.fullmatch(text)
        if typo is not None and _ALIASES.get(typo["scheme"].lower(), typo["scheme"].lower()) in _schemes():
            raise ConfigError(
                f"'{typo['scheme']}:' needs two slashes to be a URL",
                hint=f"write {typo['scheme']}://… , or ./{typo['scheme']}:… for a directory of that name",
            )
        return "file", _local_path(os.path.expanduser(text))
    scheme = match["scheme"].lower()
    scheme = _ALIASES.get(scheme, scheme)
    rest = match["rest"]
    if scheme == "file":
        return scheme, _file_url_path(rest)
    return scheme, _bucket_path(scheme, rest)


def _local_path(path: str) -> str:
    if "\0" in path:
        raise ConfigError("a path must not contain a NUL character")
    return os.path.abspath(path)


def _file_url_path(rest: str) -> str:
    # Not percent-decoded: neither fsspec nor any tool that prints such URLs encodes them, and '%' is a fair character in a name.
    if not rest.startswith("/"):
        host, _, path = rest.partition("/")
        if host != "localhost":
            raise ConfigError(
                "a file URL has three slashes and an absolute path",
                hint=f"write file:///{path or 'dir'} or a plain path",
            )
        rest = "/" + path
    return _local_path("/" + rest.lstrip("/"))


def _bucket_path(scheme: str, rest: str) -> str:
    authority = rest.partition("/")[0]
    # Neither is echoed: what is before the '@', or in a signed query, may be a secret.
    # A secret may hold a slash, which hides the '@'; no bucket's name holds a colon.
    if "@" in authority or (scheme in ("s3", "oss") and ":" in authority and not authority.startswith("arn:")):
        raise ConfigError(
            f"a {scheme}:// URL must not carry credentials",
            hint="put them into the environment or the provider's own configuration files",
        )
    if "?" in rest:
        raise ConfigError(
            f"a {scheme}:// URL must not carry a query",
            hint="give the endpoint and the credentials by environment variables",
        )
    parts = [part for part in rest.split("/") if part]
    if any(part in (".", "..") for part in parts):
        raise ConfigError(f"a {scheme}:// URL must not contain '.' or '..' as a path component")
    if scheme in ("s3", "oss") and not authority:
        raise ConfigError(f"no bucket in the URL '{scheme}://{rest}'", hint=f"write {scheme}://bucket/prefix")
    absolute = "/" if scheme not in ("s3", "oss") and rest.startswith("/") else ""
    return absolute + "/".join(parts)


def _backend(scheme: str, retrier: Retrier, options: StoreOptions) -> Backend:
    if scheme == "file":
        from ckptmgr.backends.local import LocalBackend

        return LocalBackend()
    if scheme == "s3":
        return _with_extra("s3", lambda: _s3(retrier, options))
    if scheme == "oss":
        return _with_extra("oss", lambda: _oss(retrier, options))
    if scheme not in _schemes():
        close = difflib.get_close_matches(scheme, _schemes(), n=1)
        raise ConfigError(
            f"unknown scheme {scheme!r}; known are {', '.join(_OWN)} and fsspec's, such as {', '.join(_COMMON)}",
            hint=f"did you mean {close[0]}://?" if close else "a path needs no scheme",
            scheme=scheme,
        )
    from ckptmgr.backends.generic import open_generic

    return open_generic(scheme)


def _s3(retrier: Retrier, options: StoreOptions) -> Backend:
    from ckptmgr.backends.s3 import S3Backend

    return S3Backend(retrier=retrier, store_options=options)


def _oss(retrier: Retrier, options: StoreOptions) -> Backend:
    from ckptmgr.backends.oss import OSSBackend

    return OSSBackend(retrier=retrier, store_options=options)


def _with_extra(extra: str, make: Callable[[], Backend]) -> Backend:
    try:
        return make()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ckptmgr"):
            raise
        raise MissingExtraError(
            f"{extra}:// needs the package {error.name!r}, which is not installed",
            hint=f"pip install 'ckptmgr[{extra}]'",
            extra=extra,
        ) from error


def _schemes() -> set[str]:
    return {*fsspec.available_protocols(), *_OWN}
