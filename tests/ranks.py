"""Programs of several ranks, each a process that is forked here, where torch and what a training imports is imported once.

Reads one job per line of standard input, as JSON, and forks once per rank. Answers `{"pids": […]}` at once, and `{"codes": […]}` when all have ended;
a negative code is a signal.

    {"program": "…", "cwd": …, "env": {…}, "ranks": [{"arguments": […], "out": …, "err": …}, …]}
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

import torch
import torch.distributed

import ckptmgr.callbacks
import ckptmgr.trainer
import ckptmgr.training.manager  # noqa: F401 - imported for the ranks


def fork(job: dict[str, Any], rank: dict[str, Any]) -> int:
    """Its process id; does not return in the child."""
    pid = os.fork()
    if pid:
        return pid
    for number, path in enumerate((os.devnull, rank["out"], rank["err"])):
        fd = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    sys.path[0] = job["cwd"]
    sys.argv = ["-c", *rank["arguments"]]
    # What it defines can be pickled.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(job["program"], "<rank>", "exec"), main.__dict__)  # noqa: S102 - a program of ours
    sys.exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # The first optimizer imports 800 modules more.
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    for line in sys.stdin:
        job = json.loads(line)
        pids = [fork(job, rank) for rank in job["ranks"]]
        print(json.dumps({"pids": pids}), flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps({"codes": codes}), flush=True)
