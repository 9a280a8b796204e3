"""Every kind of damage, to every file of every tree that trainers write: never handed to a trainer; it is named; the next older one is restored."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ckptmgr.core.errors import IntegrityError
from ckptmgr.core.layout import Stem
from ckptmgr.core.selectors import parse_selector
from ckptmgr.run.resume import Resumed, resume
from ckptmgr.run.sidecar import read_sidecar, sidecar_path
from ckptmgr.run.verify import Depth, verify_run
from ckptmgr.testing.damages import KINDS, Change, Kind, PushedTree, change
from ckptmgr.testing.outcomes import files_in

PushTree = Callable[..., PushedTree]
TREES = [f"T{number}" for number in range(1, 14)]
LATEST = parse_selector("latest")


def clear(target: Path) -> None:
    """Nothing is at `target`, nor beside it."""
    shutil.rmtree(target, ignore_errors=True)
    sidecar_path(target).unlink(missing_ok=True)
    assert not list(target.parent.glob(f"{target.name}*"))


def resumed(pushed: PushedTree, target: Path) -> Resumed:
    clear(target)
    return resume(pushed.run, LATEST, to=target)


def check_whole(pushed: PushedTree, target: Path) -> None:
    """With nothing wrong, `verify` finds nothing and the newest comes back as it was pushed."""
    assert verify_run(pushed.run, pushed.run.history(), pushed.stems, Depth()) == []
    found = resumed(pushed, target)
    assert (found.manifest.stem, found.skipped) == (pushed.stems[1], ())
    assert files_in(target) == pushed.files[1]


def check_damaged(pushed: PushedTree, spoiled: Change, target: Path) -> None:
    """With the newest damaged, `verify` names each of its wrong files, `resume` one of them and takes the older one; who names the newest gets nothing."""
    found = verify_run(pushed.run, pushed.run.history(), pushed.stems, Depth())
    assert {(damage.stem, damage.file) for damage in found} == {(pushed.stems[1], file) for file in spoiled.wrong}
    older = resumed(pushed, target)
    assert older.manifest.stem == pushed.stems[0]
    (skipped,) = older.skipped
    assert skipped.stem == pushed.stems[1]
    assert any(skipped.why.startswith(f"{file} ") for file in spoiled.wrong), skipped.why
    assert files_in(target) == pushed.files[0]
    assert read_sidecar(target).manifest.stem == pushed.stems[0]
    clear(target)
    with pytest.raises(IntegrityError, match="is damaged: "):
        resume(pushed.run, parse_selector(f"id:{pushed.stems[1]}"), to=target)
    assert not list(target.parent.glob(f"{target.name}*"))


def check_added(pushed: PushedTree, spoiled: Change, target: Path) -> None:
    """What lies beside a checkpoint's own files is no damage: `verify` names it, and it is not handed over."""
    beside: list[tuple[Stem, list[str]]] = []
    history = pushed.run.history()
    found = verify_run(
        pushed.run, history, pushed.stems, Depth(), beside=lambda stem, files: beside.append((stem, files))
    )
    assert found == []
    assert beside == [(pushed.stems[1], sorted(spoiled.stored))]
    newest = resumed(pushed, target)
    assert (newest.manifest.stem, newest.skipped) == (pushed.stems[1], ())
    assert files_in(target) == pushed.files[1]


def check(pushed: PushedTree, damages: Iterator[tuple[Kind, str]], chance: random.Random, target: Path) -> set[str]:
    """One damage after the other; returns the kinds that there were."""
    seen: set[str] = set()
    target.parent.mkdir()
    for kind, path in damages:
        spoiled = change(kind, path, pushed.files[1], pushed.files[0], chance)
        if spoiled is not None:
            seen.add(kind)
            with pushed.damaged(spoiled):
                (check_damaged if spoiled.wrong else check_added)(pushed, spoiled, target)
    check_whole(pushed, target)
    return seen


def some(files: Sequence[str], chance: random.Random) -> Iterator[tuple[Kind, str]]:
    return ((kind, chance.choice(files)) for kind in KINDS)


@pytest.mark.parametrize("name", TREES)
def test_each_damage_to_some_file(name: str, push_tree: PushTree, chance: random.Random, tmp_path: Path) -> None:
    """Of every tree, each kind of damage to a file of chance."""
    pushed = push_tree(name)
    seen = check(pushed, some([*pushed.files[1]], chance), chance, tmp_path / "out" / "target")
    assert {"truncate", "empty", "remove", "add"} <= seen


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
def test_each_damage_to_each_file(name: str, push_tree: PushTree, chance: random.Random, tmp_path: Path) -> None:
    """Of every tree, each kind of damage to every file."""
    pushed = push_tree(name)
    damages = itertools.product(KINDS, pushed.files[1])
    assert check(pushed, damages, chance, tmp_path / "out" / "target") >= {"flip", "truncate", "empty", "remove", "add"}


def in_bucket(name: str, kind: str, push_tree: PushTree, chance: random.Random, tmp_path: Path) -> None:
    pushed = push_tree(name, kind)
    seen = check(pushed, some([*pushed.files[1]], chance), chance, tmp_path / "out" / "target")
    assert {"remove", "add"} <= seen


def test_in_a_bucket(push_tree: PushTree, chance: random.Random, tmp_path: Path) -> None:
    """A store that can be reached over the network only."""
    in_bucket("T7", "oss", push_tree, chance, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["moto", "oss"])
@pytest.mark.parametrize("name", TREES)
def test_each_tree_in_a_bucket(
    name: str, kind: str, push_tree: PushTree, chance: random.Random, tmp_path: Path
) -> None:
    """Of every tree, each kind of damage to a file of chance, in both dialects."""
    in_bucket(name, kind, push_tree, chance, tmp_path)
