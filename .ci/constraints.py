"""Prints constraints.txt: what the extra `dev` of ckptmgr brings into this interpreter's environment, each package with its release.

Run by `make constraints`, in an environment that was made without constraints. Packages that nothing of ours asks for are left out,
whatever else is installed, and so is the local part of a release (`torch 2.13.0+cpu` becomes `2.13.0`): which build of it is meant is
the user's choice.
"""

from __future__ import annotations

import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

HEADER = """\
# The tested set: every package that ckptmgr's extras bring in, each with the release that the tests ran with.
# Written by `make constraints`, not by hand. Markers name releases that need a newer Python than ckptmgr does; there pip chooses.
# torch alone is raised by hand, here: `make constraints` keeps the release that this file names.
"""
OLDEST_PYTHON = "3.10"
NEWER_PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def closure(root: str) -> dict[str, metadata.Distribution]:
    """Everything that `root` (a requirement, with extras) needs here, by canonical name; `root` itself is left out."""
    todo, seen, found = [Requirement(root)], set[tuple[str, frozenset[str]]](), dict[str, metadata.Distribution]()
    while todo:
        wanted = todo.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found[name] = metadata.distribution(wanted.name)
        for line in found[name].requires or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras or {""}):
                todo.append(needed)
    del found[canonicalize_name(Requirement(root).name)]
    return found


def pin(name: str, distribution: metadata.Distribution) -> str:
    """One line of the file."""
    line = f"{name}=={Version(distribution.version).public}"
    pythons = SpecifierSet(distribution.metadata.json.get("requires_python", ""))
    if pythons.contains(OLDEST_PYTHON + ".99"):
        return line
    first = next(python for python in NEWER_PYTHONS if pythons.contains(python + ".99"))
    return f'{line} ; python_version >= "{first}"'


def main() -> None:
    """Print the file."""
    found = closure("ckptmgr[dev]")
    sys.stdout.write(HEADER + "".join(f"{pin(name, found[name])}\n" for name in sorted(found)))


if __name__ == "__main__":
    main()
