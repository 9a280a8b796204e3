"""Run a command and write what it took: `python -I -S _launch.py RESULT COMMAND …`.

A process of its own because the peak memory that Linux tells of a process begins with that of whoever started it: this one is as small as Python gets.
"""

import os
import sys
import time


def main() -> int:
    """The exit code of the command; RESULT gets wall, user and system seconds and the peak of its memory in KiB, children included."""
    result, command = sys.argv[1], sys.argv[2:]
    start = time.perf_counter()
    pid = os.posix_spawnp(command[0], command, os.environ)
    _, status, used = os.wait4(pid, 0)
    wall_s = time.perf_counter() - start
    with open(result, "w") as file:
        file.write(f"{wall_s} {used.ru_utime} {used.ru_stime} {used.ru_maxrss}\n")
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
