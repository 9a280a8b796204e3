"""The SeaweedFS process behind `WeedServer`: find the program, start it on free ports, wait until it works, end it.

Source: https://github.com/seaweedfs/seaweedfs/wiki/Amazon-S3-API
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptmgr.core.errors import MissingExtraError
from ckptmgr.testing.certificates import Certificates, make_certificates
from ckptmgr.testing.identities import Identity

_START_LIMIT_S = 60.0
_TRIES = 4
_PROBE_BUCKET = "ckptmgr-probe"
_SERVICES = ("s3", "master", "volume", "filer")

# Runs weed until our end of standard input closes, in whatever way this process dies, and removes what it left then.
_SUPERVISOR = """
directory=$1; sockets=$2; shift 2
exec 3<&0
"$@" 3<&- </dev/null &
weed=$!
echo $weed >pid
{ cat <&3 >/dev/null; kill -9 $weed 2>/dev/null; rm -rf "$directory" $sockets; } &
exec 3<&-
wait $weed
"""


class WeedProcess:
    """One `weed server`: master, volume, filer and S3 gateway, with data in a temporary directory.

    Args:
        identities: who may use it.
        tls: listen for https too, with a certificate of its own.
        under: the directory for the temporary one; None for the system's.
    """

    def __init__(self, *, identities: Sequence[Identity], tls: bool = False, under: Path | None = None) -> None:
        # Nobody else's: on a port that another weed was faster to take, that one must not answer for ours.
        probe = uuid.uuid4().hex
        self._probe = Identity(name="probe", access_key=f"probe-{probe[:12]}", secret_key=probe)
        self._identities = (*identities, self._probe)
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self._ports: list[int] = []
        self._tls, self._under = tls, under
        self.certificates: Certificates | None = None

    @property
    def tls_url(self) -> str:
        """The endpoint over TLS, for clients that trust `certificates.authority`; "" without it, or before `start`."""
        return f"https://127.0.0.1:{self._ports[-1]}" if self._tls and self._ports else ""

    def start(self, port: int = 0) -> str:
        """Start, with the data and ports of before after `stop`, and wait until an object could be stored.

        Args:
            port: the S3 port; 0 takes a free one. Other ports are tried when somebody else was faster.

        Returns:
            The endpoint, http.

        Raises:
            MissingExtraError: there is no `weed` program.
            RuntimeError: it did not come up; the end of its log is in the message.
        """
        program = find_weed()
        log = ""
        for _ in range(_TRIES):
            if self._directory is None:
                self._ports = self._choose_ports(port)
                self._directory = self._prepare()
            self._spawn(program, self._directory)
            url = f"http://127.0.0.1:{self._ports[0]}"
            try:
                if self._wait_until_ready(url):
                    return url
            except BaseException:
                self.close()
                raise
            log = (self._directory / "log").read_text(errors="replace")[-1500:]
            self.close()
        raise RuntimeError(f"weed did not come up on 127.0.0.1; the end of its log: {log}")

    def make_room(self, bucket: str) -> None:
        """Have a volume for the bucket's first object. Best effort: without it weed makes one then, and lets that wait 0.2 s."""
        master = self._ports[_SERVICES.index("master")]
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{master}/vol/grow?collection={bucket}&count=1"
            urllib.request.urlopen(url, timeout=30).close()

    def stop(self) -> None:
        """Kill weed and its supervisor; the data stays for the next `start`. May be called twice."""
        process, self._process = self._process, None
        if process is None or self._directory is None:
            return
        # First weed alone: its parent, the supervisor, ends once it is reaped, and then its ports and files are free.
        pid_file = self._directory / "pid"
        if process.poll() is None and pid_file.exists():
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(pid_file.read_text()), signal.SIGKILL)
                process.wait(30)
        # The number may be somebody else's when this is called again.
        pid_file.unlink(missing_ok=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        if process.stdin is not None:
            process.stdin.close()
        for path in _sockets(self._ports):
            Path(path).unlink(missing_ok=True)

    def close(self) -> None:
        """Kill weed and its supervisor and remove the data. May be called twice."""
        self.stop()
        directory, self._directory = self._directory, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    @staticmethod
    def client(url: str, identity: Identity) -> Any:
        """A boto3 client with short time limits that sends no checksums of its own."""
        import boto3
        from botocore.config import Config

        config = Config(
            connect_timeout=5,
            read_timeout=60,
            retries={"total_max_attempts": 3},
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        return boto3.session.Session().client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id=identity.access_key,
            aws_secret_access_key=identity.secret_key,
            config=config,
        )

    @staticmethod
    def _choose_ports(port: int) -> list[int]:
        # One more than the services need, for TLS.
        ports = free_ports(len(_SERVICES) * 2 + 1)
        return [port, *ports[1:]] if port else ports

    def _prepare(self) -> Path:
        directory = Path(tempfile.mkdtemp(prefix="ckptmgr-weed-", dir=self._under))
        (directory / "data").mkdir()
        (directory / "s3.json").write_text(json.dumps({"identities": [_weed_identity(i) for i in self._identities]}))
        # weed grows seven volumes per bucket by default; one starts faster and is enough for tests.
        (directory / "master.toml").write_text("[master.volume_growth]\ncopy_1 = 1\n")
        if self._tls:
            self.certificates = make_certificates(directory)
        return directory

    def _tls_arguments(self) -> list[str]:
        if self.certificates is None:
            return []
        return [
            f"-s3.port.https={self._ports[-1]}",
            f"-s3.cert.file={self.certificates.certificate}",
            f"-s3.key.file={self.certificates.key}",
        ]

    def _spawn(self, program: str, directory: Path) -> None:
        names = [f"{service}.port{kind}" for kind in ("", ".grpc") for service in _SERVICES]
        arguments = [
            "server",
            "-dir=data",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-filer",
            "-s3",
            "-s3.config=s3.json",
            "-s3.allowDeleteBucketNotEmpty=true",
            # Otherwise an administrator's PUT never meets NoSuchBucket.
            "-s3.autoCreateBucket=false",
            # These two listeners would take the next ports and end the process when those are taken.
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",
            # One master and no election: saves the seconds in which the volume server would be turned away.
            "-master.peers=none",
            "-master.volumeSizeLimitMB=1024",
            "-volume.max=1000",
            *(f"-{name}={port}" for name, port in zip(names, self._ports, strict=False)),
            *self._tls_arguments(),
        ]
        with (directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "/bin/sh",
                    "-c",
                    _SUPERVISOR,
                    "sh",
                    str(directory),
                    " ".join(_sockets(self._ports)),
                    program,
                    *arguments,
                ],
                cwd=directory,
                # For its own log files.
                env={**os.environ, "TMPDIR": str(directory)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_until_ready(self, url: str) -> bool:
        """True once a PUT worked; False when the process ended before."""
        assert self._process is not None
        host, port = url.removeprefix("http://").split(":")
        deadline_s = time.monotonic() + _START_LIMIT_S
        pause = threading.Event()
        while self._process.poll() is None and time.monotonic() < deadline_s:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                break
            pause.wait(0.05)
        from botocore.exceptions import BotoCoreError, ClientError

        client = self.client(url, self._probe)
        try:
            while self._process.poll() is None and time.monotonic() < deadline_s:
                # The gateway listens before filer and volume server have found each other; only a PUT proves it.
                with contextlib.suppress(BotoCoreError, ClientError):
                    client.create_bucket(Bucket=_PROBE_BUCKET)
                with contextlib.suppress(BotoCoreError, ClientError):
                    client.put_object(Bucket=_PROBE_BUCKET, Key="probe", Body=b"x" * 4096)
                    client.delete_object(Bucket=_PROBE_BUCKET, Key="probe")
                    client.delete_bucket(Bucket=_PROBE_BUCKET)
                    return self._process.poll() is None
                pause.wait(0.1)
        finally:
            client.close()
        return False


def find_weed() -> str:
    """The path of the `weed` program: beside this Python, else on PATH.

    Raises:
        MissingExtraError: there is none.
    """
    scripts = sysconfig.get_path("scripts")
    found = shutil.which("weed", path=scripts) or shutil.which("weed")
    if found is None:
        raise MissingExtraError(
            f"the SeaweedFS test server needs the program weed, which is neither in {scripts} nor on PATH",
            hint="run: pip install 'ckptmgr[testing]'",
        )
    return found


def _weed_identity(identity: Identity) -> dict[str, Any]:
    actions = ["Read", "Tagging"]
    actions += ["List"] if identity.may_list else []
    actions += ["Write"] if identity.may_write else []
    actions += ["Admin"] if identity.may_list and identity.may_write else []
    return {
        "name": identity.name,
        "credentials": [{"accessKey": identity.access_key, "secretKey": identity.secret_key}],
        "actions": actions,
    }


def _sockets(ports: Sequence[int]) -> list[str]:
    """The Unix sockets that weed makes beside its ports, in a fixed place, and leaves behind when it is killed."""
    names = ("s3", "filer", *(f"{service}-grpc" for service in _SERVICES))
    return [f"/tmp/seaweedfs-{name}-{port}.sock" for name in names for port in ports]


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now, all different; held open together while they are chosen."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
