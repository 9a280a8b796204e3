"""Fixtures of the whole suite: test stores, one of each per session, and an environment in which no real cloud can be reached."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckptmgr.backends import pace
from ckptmgr.testing.identities import ADMIN

if TYPE_CHECKING:
    # Importing moto takes longer than most tests; only those that want a server pay for it.
    from ckptmgr.testing.servers import MotoServer, OssServer, StoreServer, WeedServer
    from ckptmgr.testing.stores import Store

# Port 9 (discard) refuses: a client that was not pointed at a test store fails at once instead of finding a real one.
_NOWHERE = "http://127.0.0.1:9"
_REMOVED = (
    *("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ENDPOINT_URL_S3"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "OSS_SESSION_TOKEN"),
    *("OSS_CNAME", "OSS_INTERNAL", "OSS_SIGNATURE_VERSION"),
)
_REMOVED_PREFIXES = ("CKPTMGR_", "ALIBABA_CLOUD_")
_servers: list[StoreServer] = []
_with_faults: list[MotoServer | OssServer] = []


def pytest_configure() -> None:
    """That a machine is busy is no failure of a property."""
    with contextlib.suppress(ImportError):
        from hypothesis import settings

        settings.register_profile("ckptmgr", deadline=None)
        settings.load_profile("ckptmgr")


@pytest.fixture(scope="session", autouse=True)
def _no_real_cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Dummy credentials, endpoints that lead nowhere, and a home of its own, for this process and its children."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name in _REMOVED or name.startswith(_REMOVED_PREFIXES)]:
            patch.delenv(name)
        values = {
            "AWS_ACCESS_KEY_ID": ADMIN.access_key,
            "AWS_SECRET_ACCESS_KEY": ADMIN.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": _NOWHERE,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": str(home / "aws-config"),
            "AWS_SHARED_CREDENTIALS_FILE": str(home / "aws-credentials"),
            "OSS_ACCESS_KEY_ID": ADMIN.access_key,
            "OSS_ACCESS_KEY_SECRET": ADMIN.secret_key,
            "OSS_ENDPOINT": _NOWHERE,
            "OSS_REGION": "cn-hangzhou",
            "ALIBABA_CLOUD_ECS_METADATA_DISABLED": "true",
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "XDG_CONFIG_HOME": str(home / ".config"),
            "XDG_DATA_HOME": str(home / ".local" / "share"),
            "XDG_STATE_HOME": str(home / ".local" / "state"),
            # A proxy of the developer's must not come between the tests and 127.0.0.1.
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }
        for name, value in values.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def _s3_models_parsed_once() -> Iterator[None]:
    """Without this botocore reads its models anew for each client, which takes longer than all requests of most tests."""
    from botocore.loaders import JSONFileLoader

    read, known = JSONFileLoader.load_file, dict[str, object]()

    def load_file(loader: object, path: str) -> object:
        if path not in known:
            known[path] = read(loader, path)
        return known[path]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", load_file)
        yield


@contextlib.contextmanager
def _known(server: StoreServer) -> Iterator[None]:
    _servers.append(server)
    yield
    _servers.remove(server)


@pytest.fixture(scope="session")
def moto_server(_no_real_cloud: None, _s3_models_parsed_once: None) -> Iterator[MotoServer]:
    """S3 by moto, with faults and a log."""
    from ckptmgr.testing.servers import MotoServer

    with MotoServer() as server, _known(server):
        _with_faults.append(server)
        yield server
        _with_faults.remove(server)


@pytest.fixture(scope="session")
def oss_server(_no_real_cloud: None) -> Iterator[OssServer]:
    """The OSS dialect, with faults and a log."""
    from ckptmgr.testing.servers import OssServer

    with OssServer() as server, _known(server):
        _with_faults.append(server)
        yield server
        _with_faults.remove(server)


@pytest.fixture(scope="session")
def weed_server(_no_real_cloud: None, _s3_models_parsed_once: None) -> Iterator[WeedServer]:
    """SeaweedFS, a real S3 that checks signatures, checksums and conditional writes."""
    from ckptmgr.testing.servers import WeedServer

    with WeedServer() as server, _known(server):
        yield server


@pytest.fixture(autouse=True)
def _no_faults_left() -> Iterator[None]:
    """A test that fails under a fault leaves it to nobody; every test starts with an empty log."""
    for server in _with_faults:
        server.reset()
    yield
    for server in _with_faults:
        server.reset()


@pytest.fixture(autouse=True)
def _no_workers_left() -> Iterator[None]:
    """When a loader with persistent workers becomes garbage, in whichever test that is collected, torch would wait five seconds for each of them."""
    yield
    if workers := multiprocessing.active_children():
        # torch's handler would raise for one that dies of a signal before it has begun.
        before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in workers:
            worker.terminate()
            worker.join(60)
        signal.signal(signal.SIGCHLD, before)


@pytest.fixture(autouse=True)
def _full_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that asked for fewer requests in one test does not slow down the next."""
    monkeypatch.setattr(pace, "_paces", {})


@pytest.fixture
def uploads_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what managers do whatever uploads: a process of its own for it takes longer to start than all else in them."""
    monkeypatch.setenv("CKPTMGR_TRANSFER", "thread")


@pytest.fixture
def bucket_name() -> Iterator[str]:
    """A bucket name that no other test uses; the bucket is not created. What is in it is forgotten after the test: all together fills memory and disk."""
    name = f"bkt-{uuid.uuid4().hex[:12]}"
    yield name
    for server in _servers:
        server.remove_bucket(name)


def _make_store(kind: str, request: pytest.FixtureRequest, tmp_path: Path, bucket: str) -> Store:
    from ckptmgr.testing.stores import BucketStore, DirectoryStore

    if kind == "local":
        return DirectoryStore(tmp_path / "store")
    server = request.getfixturevalue({"s3": "weed_server", "moto": "moto_server", "oss": "oss_server"}[kind])
    server.create_bucket(bucket)
    return BucketStore(name=kind, scheme="oss" if kind == "oss" else "s3", server=server, bucket=bucket)


@pytest.fixture
def make_store(
    request: pytest.FixtureRequest, tmp_path: Path, bucket_name: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Store]:
    """Makes an empty store of a kind (`local`, `s3` on SeaweedFS, `moto`, `oss`), and points this process and its children at it."""

    def make(kind: str) -> Store:
        store = _make_store(kind, request, tmp_path, bucket_name)
        for name, value in store.env.items():
            monkeypatch.setenv(name, value)
        return store

    return make


@pytest.fixture(params=["local", "s3", "oss"])
def store(request: pytest.FixtureRequest, make_store: Callable[[str], Store]) -> Store:
    """An empty store: each test that asks for it runs on local disk, on a real S3 engine, and on the OSS dialect."""
    return make_store(request.param)


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `ckptmgr` as a process of its own, in `tmp_path`, and returns its exit code and output."""

    def run(
        *arguments: object, env: Mapping[str, str] | None = None, timeout_s: float = 90
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ckptmgr.cli.main", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            timeout=timeout_s,
            check=False,
        )

    return run


@pytest.fixture
def cli_here(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """As `cli`, but in this process, without the time that an interpreter takes to start: for tests of many commands."""
    from ckptmgr.cli.main import run as execute

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        words = [*map(str, arguments)]
        out, err = io.StringIO(), io.StringIO()
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        # The command line installs a handler of its own and closes those it finds: pytest's.
        root.handlers = []
        try:
            with (
                pytest.MonkeyPatch.context() as patch,
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
            ):
                patch.chdir(tmp_path)
                code = execute(words)
        finally:
            root.handlers = handlers
            root.setLevel(level)
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes a trainer's directory below `tmp_path`: `make(step)`, or `make(step, {"name": b"bytes"}, under="folder")`."""

    def make(step: int, files: Mapping[str, bytes] | None = None, *, under: str = "trained") -> Path:
        directory = tmp_path / under / f"checkpoint-{step}"
        for name, data in (files or {"model.bin": b"w" * 999 + b"%d" % step, "sub/opt.bin": b"o" * step}).items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)
        return directory

    return make


@pytest.fixture
def push_steps(
    cli_here: Callable[..., subprocess.CompletedProcess[str]], make_checkpoint: Callable[..., Path]
) -> Callable[..., list[str]]:
    """Pushes small checkpoints through the command line: `push_steps(url, 100, 200)`; returns their ids, oldest first."""

    def push(url: str, *steps: int, options: Sequence[str] = ()) -> list[str]:
        ids = []
        for step in steps:
            pushed = cli_here("push", make_checkpoint(step), url, *options)
            assert pushed.returncode == 0, pushed.stderr
            ids.append(pushed.stdout.strip())
        return ids

    return push


@pytest.fixture
def disk_of(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a file system of so many KiB: `disk_of(1024)`, or `disk_of(1024, "name")` below `tmp_path`."""
    mounted: list[Path] = []

    def make(size_kib: int, name: str | None = None) -> Path:
        directory = tmp_path / (name or f"disk-{len(mounted)}")
        directory.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k,nr_inodes=2k", "tmpfs", str(directory)]
        made = subprocess.run(command, capture_output=True, text=True, check=False) if os.geteuid() == 0 else None
        if made is None or made.returncode != 0:
            pytest.skip(f"no file system can be mounted here: {'not root' if made is None else made.stderr.strip()}")
        mounted.append(directory)
        return directory

    yield make
    for directory in mounted:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.fixture
def small_s3_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The S3 dialect takes parts of 16 KiB or more, in place of 5 MiB, and its profile says so."""
    import moto.s3.models

    from ckptmgr.backends import profiles
    from ckptmgr.testing import s3_dialect

    least = 16 << 10
    monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", least)
    monkeypatch.setattr(s3_dialect, "MIN_PART_SIZE_BYTES", least)
    monkeypatch.setattr(profiles, "OTHER", replace(profiles.OTHER, min_part_bytes=least))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Sums depend on how many there are, and more than one only costs time in small models."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def exact_bits() -> Iterator[None]:
    """Bits must not depend on threads or on a kernel's choice."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


class Forks:
    """Processes that are forked where `modules` were imported, see `forks.py`: each starts at once, and not after seconds of imports."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        command = [sys.executable, str(Path(__file__).with_name("forks.py")), *modules]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(
        self, processes: Sequence[Sequence[object]], folder: Path, *, deadline_s: float, cwd: Path, **job: Any
    ) -> list[tuple[int, str, str]]:
        """The exit code and the two outputs, which are kept in `folder`, of a process for each list of arguments, all at the same time."""
        said = [(folder / f"out-{number}", folder / f"err-{number}") for number in range(len(processes))]
        job["processes"] = [
            {"arguments": [*map(str, arguments)], "out": str(out), "err": str(err)}
            for arguments, (out, err) in zip(processes, said, strict=True)
        ]
        job["env"] = {**os.environ, **job.get("env", {})}
        assert self._process.stdin is not None
        print(json.dumps({**job, "deadline_s": deadline_s, "cwd": str(cwd)}), file=self._process.stdin, flush=True)
        pids = self._answer()["pids"]
        try:
            codes = self._answer()["codes"]
        except BaseException:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            raise
        return [(code, out.read_text(), err.read_text()) for code, (out, err) in zip(codes, said, strict=True)]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def make_forks(_no_real_cloud: None) -> Iterator[Callable[..., Forks]]:
    """`make_forks("module", …, env={…})`: one process that imports them, for all that ask for the same."""
    made: dict[tuple[str, ...], Forks] = {}

    def make(*modules: str, env: Mapping[str, str] | None = None) -> Forks:
        if modules not in made:
            made[modules] = Forks(modules, env or {})
        return made[modules]

    yield make
    for forks in made.values():
        forks.close()


_RANK = """
import json, os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
rank, _file = int(sys.argv[1]), sys.argv[2]
del sys.argv[1:3]
torch.set_num_threads(1)
def join():
    dist.init_process_group("gloo", init_method=f"file://{_file}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
"""
_END_OF_RANK = """
print()
print(json.dumps(found), flush=True)
dist.destroy_process_group()
os._exit(0)  # gloo's threads may abort an interpreter that takes its time to end
"""


@pytest.fixture(scope="session")
def in_two_ranks(
    make_forks: Callable[..., Forks], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[Any]]:
    """Runs a program as two ranks, processes of their own, and returns what each has in `found` in the end, as JSON.

    The program has `rank`, calls `join()` to set torch.distributed up, and finds what it is given in `sys.argv[1:]`. `modules` are what it imports besides.
    """

    def run(program: str, *arguments: object, modules: Sequence[str] = (), deadline_s: float = 100.0) -> list[Any]:
        ours = ("torch.distributed", "ckptmgr.callbacks", "ckptmgr.trainer", "ckptmgr.training.manager")
        forks = make_forks(*ours, *modules)
        folder = tmp_path_factory.mktemp("ranks")
        ended = forks.run(
            [(rank, folder / "file", *arguments) for rank in range(2)],
            folder,
            deadline_s=deadline_s,
            cwd=Path(__file__).parent,
            program=_RANK + program + _END_OF_RANK,
            env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        assert [code for code, _, _ in ended] == [0, 0], ended
        return [json.loads(out.splitlines()[-1]) for _, out, _ in ended]

    return run
