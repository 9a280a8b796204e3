"""The story of the demo: each act is a command that a user could type, run as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptmgr.backends.registry import join, normalize_url
from ckptmgr.core.errors import CkptmgrError, MissingExtraError
from ckptmgr.core.layout import Stem, data_prefix
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import new_nonce
from ckptmgr.transfer.status import TransferFile

_STEPS, _SAVE_EVERY, _KILL_AT_SAVE, _SLOW_S = 120, 20, 3, 0.4
_DEADLINE_S = 120.0


class DemoError(CkptmgrError):
    """The demo did not show what it promises."""


@dataclass(frozen=True, slots=True)
class _Report:
    """What a training process wrote: losses by step as exact hexadecimal floats, the digest of the weights, the steps it ran."""

    losses: dict[str, str]
    weights: str
    steps_run: int

    @classmethod
    def read(cls, path: Path) -> _Report:
        document = json.loads(path.read_text())
        return cls(document["losses"], document["weights"], document["steps_run"])


def play(store: str | None, *, say: Callable[[str], None] = print) -> None:
    """Run the whole story; prints it as it goes.

    Args:
        store: where the checkpoints go; a directory of the demo's own if None.

    Raises:
        DemoError: the resumed run does not equal the uninterrupted one, or an act failed.
        CkptmgrError: the store cannot be used.
    """
    _need_torch()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ckptmgr-demo-") as folder:
        work = Path(folder)
        run_url = join(normalize_url(store if store is not None else str(work / "store")), f"demo-{new_nonce()}")
        _Story(work, run_url, say).play()
    say(
        f"\nDone in {time.monotonic() - started:.0f} s."
        + (f" The run stays at {run_url}." if store is not None else "")
    )


def _need_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingExtraError(
            "the demo trains a model and needs PyTorch", hint="pip install 'ckptmgr[torch]'", extra="torch"
        )


class _Story:
    def __init__(self, work: Path, run_url: str, say: Callable[[str], None]) -> None:
        self._work = work
        self._run = run_url
        self._say = say

    def play(self) -> None:
        self._title("1. An uninterrupted run, to compare with")
        self._command(self._train("whole.json"))
        whole = _Report.read(self._work / "whole.json")
        self._say(f"  {whole.steps_run} steps, last loss {self._last_loss(whole)}, weights {whole.weights[:16]}…")

        self._title(
            f"2. The same run, saving every {_SAVE_EVERY} steps; SIGKILL in the middle of an upload, as when a machine is lost"
        )
        self._train_and_kill()
        self._ckptmgr("ls", self._run)

        self._title("3. Another machine: nothing is left but the store")
        shutil.rmtree(self._work / "machine-1")
        script = self._train(
            "resumed.json", "--run", self._run, "--local-dir", str(self._work / "machine-2"), "--resume", "{}"
        )
        self._ckptmgr("resume", self._run, "--to", str(self._work / "checkpoint"), "--", *script)

        self._title("4. Are they equal?")
        self._compare(whole, _Report.read(self._work / "resumed.json"))

        self._title("5. What the store holds, and what pruning would do")
        self._ckptmgr("ls", self._run)
        self._ckptmgr("prune", self._run, "--keep-last", "2", "--keep-best", "eval_loss")

    # --- acts -------------------------------------------------------------------------------------------------------------

    def _train_and_kill(self) -> None:
        """Train in a session of its own, and kill all of it once the third save is partly in the store."""
        command = self._train(
            "killed.json", "--run", self._run, "--local-dir", str(self._work / "machine-1"), "--slow", str(_SLOW_S)
        )
        self._show(command)
        process = subprocess.Popen(command, start_new_session=True, env=self._environment())
        try:
            stem, arrived = self._wait_for_half_an_upload(process)
        finally:
            self._lose_machine(process)
        run = RunDirectory.open(self._run)
        if stem in run.stems():
            raise DemoError(f"the upload of step {stem.step} ended before the kill", hint="run the demo again")
        self._say(
            f"  killed while step {stem.step} was being uploaded: {arrived} of its files had arrived, its manifest had not"
        )

    def _lose_machine(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the training and its transfer process, which would otherwise finish the upload: that is what it is for."""
        machine = TransferFile(self._work / "machine-1")
        transfer = machine.read()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if transfer is None or transfer.pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(transfer.pid, signal.SIGKILL)
        pause = threading.Event()
        deadline = time.monotonic() + _DEADLINE_S
        while (transfer := machine.read()) is not None and transfer.alive and time.monotonic() < deadline:
            pause.wait(0.05)

    def _wait_for_half_an_upload(self, process: subprocess.Popen[bytes]) -> tuple[Stem, int]:
        """Watch the store until the save to be hit has some of its files there and no manifest."""
        pause = threading.Event()
        deadline = time.monotonic() + _DEADLINE_S
        run: RunDirectory | None = None
        while process.poll() is None and time.monotonic() < deadline:
            run = run or self._run_if_there()
            if run is not None:
                committed = run.stems()
                half = [data.stem for data in run.loose_data(committed) if data.stem is not None]
                arrived = len(run.keys(data_prefix(half[0]))) if half else 0
                if len(committed) >= _KILL_AT_SAVE - 1 and arrived:
                    return half[0], arrived
            pause.wait(0.05)
        raise DemoError("the training process did not get as far as its third upload", hint="see its output above")

    def _run_if_there(self) -> RunDirectory | None:
        from ckptmgr.core.errors import CheckpointNotFoundError

        try:
            return RunDirectory.open(self._run)
        except CheckpointNotFoundError:
            return None

    def _compare(self, whole: _Report, resumed: _Report) -> None:
        different = [key for key in whole.losses if whole.losses[key] != resumed.losses.get(key)]
        self._say(f"  the resumed process ran {resumed.steps_run} of {whole.steps_run} steps")
        self._say(f"  losses:  {len(whole.losses) - len(different)} of {len(whole.losses)} equal to the last bit")
        self._say(
            f"  weights: {whole.weights[:32]}… uninterrupted\n           {resumed.weights[:32]}… killed and resumed"
        )
        if different or whole.losses.keys() != resumed.losses.keys() or whole.weights != resumed.weights:
            raise DemoError("the resumed run differs from the uninterrupted one", hint="please report this")
        if not 0 < resumed.steps_run < whole.steps_run:
            raise DemoError(
                f"the resumed process ran {resumed.steps_run} steps, so nothing was resumed", hint="please report this"
            )
        self._say("  equal, to the last bit")

    # --- pieces -----------------------------------------------------------------------------------------------------------

    def _train(self, report: str, *options: str) -> list[str]:
        fixed = ["--steps", str(_STEPS), "--save-every", str(_SAVE_EVERY), "--report", str(self._work / report)]
        return [sys.executable, "-m", "ckptmgr.demo.train", *fixed, *options]

    def _ckptmgr(self, *arguments: str) -> None:
        self._show(["ckptmgr", *arguments])
        self._call([sys.executable, "-m", "ckptmgr.cli.main", *arguments])

    def _command(self, command: Sequence[str]) -> None:
        self._show(command)
        self._call(command)

    def _show(self, command: Sequence[str]) -> None:
        words = ["python" if word == sys.executable else word.replace(str(self._work), "$WORK") for word in command]
        self._say(f"$ {shlex.join(words)}")
        sys.stdout.flush()

    def _call(self, command: Sequence[str]) -> None:
        code = subprocess.run(list(command), check=False, env=self._environment()).returncode
        if code != 0:
            raise DemoError(f"{' '.join(command[1:4])} ended with exit code {code}", hint="see its output above")

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONUNBUFFERED": "1"}

    def _title(self, text: str) -> None:
        self._say(f"\n{text}")

    @staticmethod
    def _last_loss(report: _Report) -> str:
        steps = {int(key.split(":")[0]): value for key, value in report.losses.items() if key.endswith(":loss")}
        return f"{float.fromhex(steps[max(steps)]):.4f}"
