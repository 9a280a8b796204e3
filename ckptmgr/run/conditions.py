"""What the surroundings of a training are, as far as that can be known without PyTorch: versions of libraries, and the commit of the code."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

from ckptmgr.core.conditions import Conditions, Drift, drift_names, refuse
from ckptmgr.core.errors import DriftError
from ckptmgr.run.launch import tell_refusal

# Module -> distribution of what decides about bits, or about which samples come next.
_DECIDING = {
    "torch": "torch",
    "numpy": "numpy",
    "accelerate": "accelerate",
    "bitsandbytes": "bitsandbytes",
    "datasets": "datasets",
    "deepspeed": "deepspeed",
    "flash_attn": "flash-attn",
    "liger_kernel": "liger-kernel",
    "lightning": "lightning",
    "megatron": "megatron-core",
    "peft": "peft",
    "pytorch_lightning": "pytorch-lightning",
    "swift": "ms-swift",
    "tokenizers": "tokenizers",
    "torchaudio": "torchaudio",
    "torchdata": "torchdata",
    "torchvision": "torchvision",
    "transformer_engine": "transformer-engine",
    "transformers": "transformers",
    "triton": "triton",
    "trl": "trl",
    "vllm": "vllm",
    "xformers": "xformers",
}
# Names of drifts, with commas or blanks between them, that a resume is to refuse.
REFUSE_ENV = "CKPTMGR_REFUSE_DRIFT"
_GIT_TIMEOUT_S = 5.0


def refuse_drift(found: Iterable[Drift], names: frozenset[str], *, where: str) -> None:
    """As `ckptmgr.core.conditions.refuse`, in a training; a `ckptmgr resume` that has started it is told, and ends with 7."""
    try:
        refuse(found, names, where=where)
    except DriftError as error:
        tell_refusal(str(error))
        raise


def versions_in_use() -> dict[str, str]:
    """Versions of Python and of the deciding libraries that this process has imported; nothing is imported for it."""
    return {"python": platform.python_version()} | versions_of(
        name for module, name in _DECIDING.items() if module in sys.modules
    )


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Versions of Python and of distributions as they are installed here, of those of `names` that are; nothing is imported for it."""
    found = {name: platform.python_version() if name == "python" else _version(name) for name in names}
    return {name: version for name, version in found.items() if version is not None}


def installed_like(saved: Conditions, directory: Path) -> Conditions:
    """What is here of `saved`, as far as that can be known without starting a training: the versions installed, the commit at `directory`.

    Versions only where a training could be started: without PyTorch, this environment is not the training's.
    """
    versions = versions_of(saved.versions)
    return Conditions(
        versions=versions if "torch" in versions or "torch" not in saved.versions else {},
        git_commit=None if saved.git_commit is None else git_commit(directory),
    )


@cache
def _version(name: str) -> str | None:
    # A broken installation (no METADATA, an unreadable one) is no reason to fail a save.
    with contextlib.suppress(Exception):
        return str(metadata.version(name))
    return None


def refused_by_environment() -> frozenset[str]:
    """The drifts that `ckptmgr resume --refuse-drift`, or the user, has named in CKPTMGR_REFUSE_DRIFT.

    Raises:
        ConfigError: one of them does not exist.
    """
    return drift_names([os.environ.get(REFUSE_ENV, "")])


def git_commit(directory: Path) -> str | None:
    """The commit of the working tree that `directory` lies in, `+changes` behind it if tracked files differ from it; None outside of one.

    Runs git, for 5 s at most; where that cannot say (not installed, another user's tree), the commit is read from `.git`, and
    changes stay unknown.
    """
    folder = next((each for each in (directory, *directory.parents) if (each / ".git").exists()), None)
    if folder is None:
        return None
    return _asked(folder) or _read(folder / ".git")


def _asked(folder: Path) -> str | None:
    # No locks: a training must not get in the way of somebody's commit. No fsmonitor: that would be a program of the tree's choice.
    command = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**environment, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    commit = next((line.rpartition(" ")[2] for line in lines if line.startswith("# branch.oid ")), "")
    if not _is_commit(commit):  # "(initial)": there is no commit yet
        return None
    return commit + ("+changes" if any(not line.startswith("#") for line in lines) else "")


def _read(git: Path) -> str | None:
    """What HEAD stands for, by the files of `git`: a directory, or the file that stands in its place in linked trees and submodules."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if git.is_file():
            git = git.parent / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        name = head.removeprefix("ref:").strip()
        if name == head:
            return head if _is_commit(head) else None
        common = git / (git / "commondir").read_text().strip() if (git / "commondir").is_file() else git
        for place in (git, common):
            if (place / name).is_file():
                commit = (place / name).read_text().strip()
                return commit if _is_commit(commit) else None
        for line in (common / "packed-refs").read_text().splitlines():
            commit, _, packed = line.partition(" ")
            if packed == name and _is_commit(commit):
                return commit
    return None


def _is_commit(text: str) -> bool:
    return len(text) in (40, 64) and all(char in "0123456789abcdef" for char in text)
