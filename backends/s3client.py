"""The client behind `s3.py`: one per process, single tries, renewed when its credentials have expired.

boto3's session resolves and configures all. The requests that move data are `s3data`'s where nothing stands against it; those that manage are boto3's client's,
which is made when the first of them comes, or at once where the settings are not ordinary: see `s3place`.
"""

from __future__ import annotations

import contextlib
import email.utils
import gc
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import boto3
import botocore.auth
import botocore.exceptions
from botocore.config import Config

from ckptmgr.backends.answers import encryption_named
from ckptmgr.backends.body import FileBody
from ckptmgr.backends.objectrequests import CONNECT_S, STALL_S
from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.profiles import Profile, profile_of
from ckptmgr.backends.s3answers import distrust
from ckptmgr.backends.s3data import DataCalls, ElsewhereError
from ckptmgr.backends.s3errors import EXPIRED, code_of, s3_errors
from ckptmgr.backends.s3place import Place, endpoint_of
from ckptmgr.core.errors import BackendError, CkptmgrError, ConfigError

# What stores say to checksum headers that they do not know. Google's interop signs them and then finds its own signature wrong.
_NO_CHECKSUMS = {
    "InvalidArgument",
    "InvalidRequest",
    "NotImplemented",
    "SignatureDoesNotMatch",
    "XAmzContentSHA256Mismatch",
}


# A store refuses what is signed more than 15 minutes off. A smaller difference is not why it did.
_SKEW_S = 60.0
_SIGNER = "ckptmgr-s3v4"
_CLOCK = "ckptmgr-clock"

log = logging.getLogger("ckptmgr.backends")


class _Clock:
    """How far the store's clock is ahead of this machine's, as far as that has mattered."""

    def __init__(self) -> None:
        self.offset_s = 0.0
        self._is_corrected = False

    def is_corrected_by(self, error: botocore.exceptions.ClientError) -> bool:
        """Whether `error` is about the time of the request, and a further try will be signed with the store's: our clock was wrong, or the request held up."""
        if code_of(error) != "RequestTimeTooSkewed":
            return False
        headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        try:
            offset_s = email.utils.parsedate_to_datetime(headers["date"]).timestamp() - time.time()
        except (KeyError, TypeError, ValueError):
            return False
        if abs(offset_s - self.offset_s) < _SKEW_S:
            return True  # ours is right: it was on its way for too long
        self.offset_s = offset_s
        if not self._is_corrected:
            self._is_corrected = True
            side = "behind" if offset_s > 0 else "ahead of"
            text = "this machine's clock is %.0f s %s the store's; requests are signed with the store's time"
            log.warning(text, abs(offset_s), side)
        return True


class _Signer(botocore.auth.S3SigV4Auth):  # type: ignore[misc,unused-ignore]
    """Signs with the store's clock."""

    def _modify_request_before_signing(self, request: Any) -> None:
        clock = request.context.get(_CLOCK)
        if clock is not None and clock.offset_s:
            moment = time.gmtime(time.time() + clock.offset_s)
            request.context["timestamp"] = time.strftime("%Y%m%dT%H%M%SZ", moment)
        super()._modify_request_before_signing(request)


botocore.auth.AUTH_TYPE_MAPS[_SIGNER] = _Signer


class _Opened:
    """What one process has open."""

    def __init__(self, made: _Made, data: DataCalls | None, clock: _Clock) -> None:
        self.made = made
        self._data = data
        self._clock = clock

    def __call__(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        target = self._data.target(operation, arguments["Bucket"]) if self._data is not None else None
        if self._data is None or target is None:
            return self._by_boto3(operation, arguments)
        try:
            return self._data.call(operation, target, arguments, offset_s=self._clock.offset_s)
        except ElsewhereError:
            try:
                return self._by_boto3(operation, arguments)
            finally:
                self._data.settled(arguments["Bucket"])

    def _by_boto3(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        body = arguments.get("Body")
        if isinstance(body, FileBody):
            body.rewind()
        return dict(getattr(self.made.client(), operation)(**arguments))


class S3Client:
    """Single requests, with botocore's errors translated. Safe from any thread.

    botocore's own retries are off. A retry inside botocore would turn a conditional write that was made, but whose answer was lost, into
    a refusal without anybody knowing that there had been a second try.

    Args:
        overrides: botocore `Config` options that go over ours.
        stall_s: seconds without a byte after which a request is cut.
        options: addressing, checksums, signing of bodies, and who makes the data calls. The user's own `payload_signing_enabled` goes over the third.
    """

    def __init__(
        self,
        overrides: dict[str, Any] | None = None,
        *,
        stall_s: float = STALL_S,
        options: StoreOptions | None = None,
    ) -> None:
        # The time to connect is also that to get the first block of a request out on a new connection; botocore knows no other.
        self._config = {"connect_timeout": min(CONNECT_S, stall_s), "read_timeout": stall_s, **(overrides or {})}
        self._options = options or StoreOptions()
        self._clock = _Clock()
        self._by_pid: dict[int, _Opened] = {}
        self._lock = threading.Lock()
        self._takes_crc: bool | None = None

    @property
    def takes_crc(self) -> bool | None:
        """Whether the store takes checksum headers; None until it was seen to do or to refuse it, where its profile does not say."""
        self._open()
        return self._takes_crc

    @property
    def profile(self) -> Profile:
        """What is known in advance of the store, and what the user says of it."""
        return self._open().made.profile

    @property
    def endpoint(self) -> str:
        """Where requests go."""
        return self._open().made.endpoint

    def request(self, operation: str, path: str, /, **arguments: Any) -> dict[str, Any]:
        """One request; `operation` is a method of boto3's client, `path` is for messages.

        The `Body` of `get_object` is an `http.Answer`, or botocore's stream: see `receive`.
        """
        opened = self._open()
        asked_for = self._options.sse if "ServerSideEncryption" in arguments else None
        with encryption_named(asked_for), s3_errors(operation, path, opened.made.endpoint):
            try:
                return opened(operation, arguments)
            except botocore.exceptions.ClientError as error:
                if code_of(error) in EXPIRED:
                    # Session credentials come from files and variables that somebody may have renewed by now.
                    self._forget(opened)
                elif not self._clock.is_corrected_by(error):
                    raise
            except botocore.exceptions.NoCredentialsError:
                # A metadata service that did not answer when this was opened looked like one that is not there.
                self._forget(opened)
            return self._open()(operation, arguments)

    def checked_request(
        self, operation: str, path: str, checksums: dict[str, Any], /, **arguments: Any
    ) -> dict[str, Any]:
        """As `request`, with checksum headers; they are left out from the moment the store is seen not to know them."""
        if self.takes_crc is False or not checksums:
            return self.request(operation, path, **arguments)
        try:
            answer = self.request(operation, path, **arguments, **checksums)
        except BackendError as error:
            if self.takes_crc or not _may_be_the_checksums(error):
                raise
            answer = self.request(operation, path, **arguments)
            self._takes_crc = False
            return answer
        if "ChecksumCRC64NVME" in checksums:
            # A value was accepted; a store may well ignore the other headers and still refuse that.
            self._takes_crc = True
        return answer

    def _client(self) -> Any:
        return self._open().made.client()

    def _open(self) -> _Opened:
        # By process: a forked child must not share its parent's sockets.
        pid = os.getpid()
        opened = self._by_pid.get(pid)
        if opened is None:
            with self._lock:
                opened = self._by_pid.get(pid)
                if opened is None:
                    opened = self._by_pid[pid] = self._make()
        return opened

    def _make(self) -> _Opened:
        made = _Made(self._config, self._options, self._clock)
        if self._takes_crc is None:
            self._takes_crc = {"none": False, "crc64nvme": True}.get(made.profile.checksum)
        data = None
        if self._options.engine == "auto":
            data = DataCalls(
                made.client,
                made.credentials,
                made.place,
                limits_s=(self._config["connect_timeout"], self._config["read_timeout"]),
                ca_bundle=made.ca_bundle,
                sign_payload=self._options.sign_payload,
            )
        return _Opened(made, data, self._clock)

    def _forget(self, opened: _Opened) -> None:
        with self._lock, contextlib.suppress(KeyError):
            if self._by_pid[os.getpid()] is opened:
                del self._by_pid[os.getpid()]


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection: botocore reads megabytes of JSON, all of which stays; going through it again and again took a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _may_be_the_checksums(error: BackendError) -> bool:
    """Whether a store that does not know checksum headers could have answered this."""
    code, status = getattr(error, "code", ""), getattr(error, "status", 0)
    # The answer to a HEAD has no body, and so no code.
    return code in _NO_CHECKSUMS or (not code and status in (400, 403, 501))


class _Made:
    """What boto3 makes of the user's settings.

    Attributes:
        endpoint: where requests go.
        profile: of the store there.
        place: where its buckets are; None if the client is to be asked.
        credentials: renew themselves, or are None.
        ca_bundle: a file of certificates that the user wants trusted.
    """

    def __init__(self, config: dict[str, Any], options: StoreOptions, clock: _Clock) -> None:
        self._overrides, self._options, self._clock = config, options, clock
        self._lock = threading.Lock()
        self._client: Any = None
        self.place: Place | None = None
        with _opening():
            self._session = boto3.session.Session()
            settings = self._session._session
            endpoint = endpoint_of(settings, config) if options.engine == "auto" else None
            if endpoint is None:
                client = self.client()
                self.endpoint = str(client.meta.endpoint_url)
                self.profile = profile_of("s3", self.endpoint, options)
            else:
                self.endpoint = endpoint.url
                self.profile = profile_of("s3", self.endpoint, options)
                self.place = Place.of(endpoint, self.profile, f"{settings.user_agent()} ckptmgr")
            self.credentials = self._session.get_credentials()
            bundle = settings.get_config_variable("ca_bundle")
        self.ca_bundle: str | None = bundle or os.environ.get("REQUESTS_CA_BUNDLE")

    def client(self) -> Any:
        """boto3's client, which the first call makes."""
        if self._client is None:
            with self._lock, _opening(), _uncollected():
                if self._client is None:
                    self._client = self._make()
        return self._client

    def _make(self) -> Any:
        config: dict[str, Any] = {
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "max_pool_connections": 32,
            "tcp_keepalive": True,
            # Our own checksums go along as headers; botocore's would be trailers, which several stores refuse.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "user_agent_extra": "ckptmgr",
            **self._overrides,
        }
        client = self._session.client("s3", config=Config(**config))
        endpoint = str(client.meta.endpoint_url)
        if "@" in endpoint.partition("://")[2].partition("/")[0]:
            # It would be in messages and logs. Not echoed here either.
            raise ConfigError(
                "the S3 endpoint must not carry credentials", hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        profile = profile_of("s3", endpoint, self._options)
        more: dict[str, Any] = {}
        if profile.addressing != "auto" and "s3" not in self._overrides:
            config["s3"] = {"addressing_style": profile.addressing}
        if profile.region and self._session.region_name is None and "region_name" not in self._overrides:
            more["region_name"] = profile.region
        if more or ("s3" in config and "s3" not in self._overrides):
            client = self._session.client("s3", config=Config(**config), **more)
        _sign_no_payload_over_tls(client, self._options)
        events = client.meta.events
        events.register_first("choose-signer.s3", _choose_signer)
        events.register("before-sign.s3", lambda request, **kwargs: request.context.update({_CLOCK: self._clock}))
        events.register("before-send.s3", _mark_as_sending)
        events.register_last("before-call.s3", _do_not_wait_for_leave)
        distrust(client)
        return client


@contextlib.contextmanager
def _opening() -> Iterator[None]:
    """Errors of reading the user's settings, translated."""
    try:
        with s3_errors("open", "", "the configured endpoint"):
            try:
                yield
            except OSError as error:
                if isinstance(error, CkptmgrError):
                    raise
                hint = "check ~/.aws, and the programs and files that it names"
                raise ConfigError(f"cannot open S3: {error}", hint=hint) from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot open S3: {error}", hint="check AWS_ENDPOINT_URL") from error


def _sign_no_payload_over_tls(client: Any, options: StoreOptions) -> None:
    """Over TLS, and with a CRC of their own, bodies need no SHA-256 in the signature, which costs more than all other digests together.

    botocore leaves it out by itself only for checksums that it computes. `payload_signing_enabled` in the user's configuration goes over this.
    """
    config = client.meta.config
    is_wanted = options.sign_payload == "always" or not client.meta.endpoint_url.startswith("https://")
    if not is_wanted and "payload_signing_enabled" not in (config.s3 or {}):
        config.s3 = {**(config.s3 or {}), "payload_signing_enabled": False}


def _choose_signer(signature_version: Any, context: dict[str, Any], **kwargs: Any) -> str | None:
    """awscrt's signer, which botocore takes where it is installed, reads a body in pieces of 4 KiB: 8,000 calls into Python per part."""
    is_plain = signature_version in ("v4", "s3v4") and context.get("auth_type") in (None, "v4")
    return _SIGNER if is_plain else None


def _mark_as_sending(request: Any, **kwargs: Any) -> None:
    """What was read of a body before was for the signature."""
    if isinstance(request.body, FileBody):
        request.body.start_sending()


def _do_not_wait_for_leave(params: dict[str, Any], **kwargs: Any) -> None:
    """botocore asks before it sends a file (Expect: 100-continue): a round trip per part, and a second where the answer is silence."""
    params.get("headers", {}).pop("Expect", None)
