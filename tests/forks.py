"""Programs, each a process that is forked here, where what they import was imported once: `forks.py MODULE …`.

Reads one job per line of standard input, and forks for each of its processes. Answers `{"pids": […]}` at once, and `{"codes": […]}` when all have
ended; a negative code is a signal. What is still running after `deadline_s` prints its stacks and ends with 1.

An import that starts a thread makes forks unsafe (beside TRL, transformers imports pyarrow, which has some): the processes are started anew then.

    {"program": "…", "cwd": …, "env": {…}, "deadline_s": 60, "processes": [{"arguments": […], "out": …, "err": …}, …]}

Instead of the text of a program, a job may name a `script`, which is run as `python SCRIPT` would.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import runpy
import sys
import types
from typing import Any, NoReturn

import numpy as np
import torch


def start(job: dict[str, Any], process: dict[str, Any], *, is_alone: bool) -> int:
    """The id of a process that does what `run` does; a forked one does not return."""
    if not is_alone:
        this = [sys.executable, __file__, "--one", json.dumps([job, process])]
        return os.posix_spawn(sys.executable, this, os.environ)
    pid = os.fork()
    if not pid:
        run(job, process)
    return pid


def run(job: dict[str, Any], process: dict[str, Any]) -> NoReturn:
    """Be that process from now on."""
    for number, path in enumerate((os.devnull, process["out"], process["err"])):
        fd = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    faulthandler.dump_traceback_later(job["deadline_s"], exit=True)
    # Otherwise all of them would begin with the same numbers.
    np.random.seed()
    # As with PYTHONUNBUFFERED: what was said before a SIGKILL is not lost.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    script = job.get("script")
    sys.path[0] = job["cwd"] if script is None else os.path.dirname(script)
    sys.argv = ["-c" if script is None else script, *process["arguments"]]
    if script is None:
        # What it defines can be pickled.
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(job["program"], "<program>", "exec"), main.__dict__)  # noqa: S102 - a program of ours
    else:
        runpy.run_path(script, run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        run(*json.loads(sys.argv[2]))
    for name in sys.argv[1:]:
        importlib.import_module(name)
    torch.set_num_threads(1)
    # The first optimizer imports 800 modules more.
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    # A lock that another thread holds in the moment of a fork stays locked for ever.
    is_alone = len(os.listdir("/proc/self/task")) == 1
    for line in sys.stdin:
        todo = json.loads(line)
        pids = [start(todo, process, is_alone=is_alone) for process in todo["processes"]]
        print(json.dumps({"pids": pids}), flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps({"codes": codes}), flush=True)
