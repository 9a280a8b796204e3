"""Versions without imports, and the commit of a working tree with git and without."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from ckptmgr.core.conditions import Conditions
from ckptmgr.run import conditions
from ckptmgr.run.conditions import git_commit, installed_like, versions_of


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A working tree with one commit."""
    folder = tmp_path / "tree"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "train.py").write_text("pass\n")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "train.py")
    git(folder, "commit", "-q", "-m", "first")
    return folder


@pytest.fixture(params=["git", "files"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Git says it, or there is no git and the files do."""
    if request.param == "files":
        monkeypatch.setattr(conditions, "_asked", lambda folder: None)
    return str(request.param)


def test_the_commit_of_a_tree(tree: Path, reader: str) -> None:
    """From any folder of it; on a branch, packed or not, and without one."""
    commit = git(tree, "rev-parse", "HEAD")
    assert git_commit(tree / "deep" / "er") == commit
    git(tree, "pack-refs", "--all")
    assert git_commit(tree) == commit
    git(tree, "checkout", "-q", "--detach")
    assert git_commit(tree) == commit


def test_the_commit_of_a_linked_tree(tree: Path, tmp_path: Path, reader: str) -> None:
    git(tree, "worktree", "add", "-q", "-b", "other", str(tmp_path / "linked"))
    assert git_commit(tmp_path / "linked") == git(tree, "rev-parse", "HEAD")


def test_no_tree_and_no_commit_is_none(tmp_path: Path, reader: str) -> None:
    assert git_commit(tmp_path) is None
    git(tmp_path, "init", "-q", "-b", "main")
    assert git_commit(tmp_path) is None


def test_changes_are_told_and_looking_changes_nothing(tree: Path) -> None:
    """Tracked files count, new ones do not: outputs of a training lie about."""
    commit = git(tree, "rev-parse", "HEAD")
    (tree / "output.log").write_text("new")
    assert git_commit(tree) == commit
    (tree / "train.py").write_text("changed\n")
    index = (tree / ".git" / "index").read_bytes()
    assert git_commit(tree) == f"{commit}+changes"
    assert (tree / ".git" / "index").read_bytes() == index


def test_a_program_that_the_tree_names_is_not_run(tree: Path) -> None:
    """`core.fsmonitor` is a command that plain `git status` would execute."""
    git(tree, "config", "core.fsmonitor", f"touch {tree / 'RAN'}; false")
    assert git_commit(tree) is not None
    assert not (tree / "RAN").exists()


def test_an_environment_for_another_tree_is_not_followed(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = git(tree, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert git_commit(tree) == commit


def test_versions_are_those_installed_and_nothing_is_imported() -> None:
    code = (
        "import sys\nfrom ckptmgr.run.conditions import versions_of, versions_in_use\n"
        "found = versions_of(['torch', 'numpy', 'python', 'no-such-library'])\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert versions_in_use().keys() == {'python'}, versions_in_use()\n"
        "print(sorted(found.items()))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    expected = {name: metadata.version(name) for name in ("torch", "numpy")} | {"python": sys.version.split()[0]}
    assert done.stdout.strip() == str(sorted(expected.items()))


def test_an_environment_without_pytorch_is_not_the_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's tool lies in an environment of its own: its Python and NumPy say nothing about the training's."""
    saved = Conditions(versions={"torch": "9.9.9", "python": "2.7.18"})
    assert installed_like(saved, tmp_path).versions == versions_of(["torch", "python"])
    monkeypatch.setattr(conditions, "_version", lambda name: None)
    assert installed_like(saved, tmp_path).versions == {}
    assert installed_like(Conditions(versions={"python": "2.7.18"}), tmp_path).versions != {}
