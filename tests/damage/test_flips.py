"""Single flipped bits, anywhere: in the files of all trees, in every byte of a manifest, in the claims of attempts, in tags, in run.json."""

from __future__ import annotations

import logging
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptmgr.core.errors import IntegrityError, ManifestError, ManifestVersionError
from ckptmgr.core.layout import attempt_key, manifest_key, tag_key
from ckptmgr.core.manifest import decode_manifest
from ckptmgr.core.retention import KeepLast
from ckptmgr.core.selectors import parse_selector
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.prune import prune
from ckptmgr.run.resume import resume
from ckptmgr.run.start import claim_attempt
from ckptmgr.run.tier import LocalTier
from ckptmgr.run.verify import Depth, verify_run
from ckptmgr.testing.damages import Change, PushedTree, flipped
from ckptmgr.testing.outcomes import files_in

PushTree = Callable[..., PushedTree]
LATEST = parse_selector("latest")
# Thirteen trees: 1,001 in all.
FLIPS_PER_TREE = 77


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"T{number}" for number in range(1, 14)])
def test_flips_in_files(name: str, push_tree: PushTree, chance: random.Random, tmp_path: Path) -> None:
    """A goal of the design: 1,000 of 1,000 are found, by `verify` and by `resume`, which takes the older one, or nothing if the newer one was named."""
    pushed = push_tree(name)
    older, newer = pushed.stems
    meant, target, history = parse_selector(f"id:{newer}"), tmp_path / "target", pushed.run.history()
    for number in range(FLIPS_PER_TREE):
        path = chance.choice([path for path, data in pushed.files[1].items() if data])
        spoiled = Change(stored={path: flipped(pushed.files[1][path], chance)}, wrong=frozenset({path}))
        with pushed.damaged(spoiled):
            assert [found.file for found in verify_run(pushed.run, history, [newer], Depth())] == [path]
            if number % 2:
                with pytest.raises(IntegrityError, match=re.escape(path)):
                    resume(pushed.run, meant, to=target)
                assert not target.exists()
            else:
                found = resume(pushed.run, LATEST, to=target)
                assert (found.manifest.stem, [skipped.stem for skipped in found.skipped]) == (older, [newer])
                assert path in found.skipped[0].why
                assert files_in(target) == pushed.files[0]
                shutil.rmtree(target)
    assert verify_run(pushed.run, history, [newer], Depth()) == []


def each_flip(path: Path, *, every: int = 1) -> Iterator[bytes]:
    """The file at `path` with one bit after the other flipped; put right again in the end."""
    right = path.read_bytes()
    for at in range(0, len(right) * 8, every):
        path.write_bytes(right[: at // 8] + bytes([right[at // 8] ^ 1 << at % 8]) + right[at // 8 + 1 :])
        yield right
    path.write_bytes(right)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 13])
def test_flips_in_a_manifest(push_tree: PushTree, every: int) -> None:
    """Every bit, or every thirteenth, one after the other: none makes a manifest that says anything else."""
    pushed = push_tree("T13")
    key = manifest_key(pushed.stems[1])
    path = Path(pushed.run.root, key)
    refused = 0
    for right in each_flip(path, every=every):
        try:
            read = decode_manifest(path.read_bytes(), where=key)
        except ManifestError:
            refused += 1
        else:
            assert read == decode_manifest(right, where=key)
    assert refused > 8 * len(path.read_bytes()) / every * 0.99


def test_a_damaged_manifest_is_passed_over(push_tree: PushTree, tmp_path: Path) -> None:
    """`verify` and `resume` name it, the older one is taken; who names the checkpoint gets an error and no directory."""
    pushed = push_tree("T13")
    older, newer = pushed.stems
    key, target = manifest_key(newer), tmp_path / "target"
    path = Path(pushed.run.root, key)
    for _ in each_flip(path, every=997):
        history = pushed.run.history()
        assert [found.file for found in verify_run(pushed.run, history, history.chain(), Depth())] == [key]
        found = resume(pushed.run, LATEST, to=target)
        assert (found.manifest.stem, [skipped.stem for skipped in found.skipped]) == (older, [newer])
        assert key in found.skipped[0].why
        assert files_in(target) == pushed.files[0]
        shutil.rmtree(target)
        with pytest.raises(ManifestError, match=re.escape(key)):
            resume(pushed.run, parse_selector(f"id:{newer}"), to=target)
        assert not target.exists()


def test_manifests_that_were_swapped(push_tree: PushTree, tmp_path: Path) -> None:
    """Each is whole, and neither is that of the checkpoint whose name it lies under."""
    pushed = push_tree("T13")
    first, second = (Path(pushed.run.root, manifest_key(stem)) for stem in pushed.stems)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    with pytest.raises(IntegrityError, match="none of the 2 checkpoints"):
        resume(pushed.run, LATEST, to=tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.fixture
def rewound(push_tree: PushTree) -> PushedTree:
    """A run whose second attempt went back to step 100, of which nothing is committed yet, and a tag on step 200."""
    pushed = push_tree("T13")
    claim_attempt(pushed.run, how="explicit", parent=pushed.stems[0])
    pushed.run.tag("good", pushed.stems[1])
    return pushed


def test_flips_in_the_claim_of_an_attempt(rewound: PushedTree, caplog: pytest.LogCaptureFixture) -> None:
    """What is newest does not change in silence, and nothing is deleted by what is not certain."""
    newest, key = rewound.stems[0], attempt_key(2)
    assert rewound.run.history().chain() == [newest]
    named = 0
    for _ in each_flip(Path(rewound.run.root, key), every=23):
        caplog.clear()
        try:
            history = rewound.run.history()
        except ManifestVersionError:
            continue
        if history.unreadable:
            named += 1
            assert [key] == [*history.unreadable]
            assert any(key in record.message for record in caplog.records if record.levelno == logging.WARNING)
            with pytest.raises(ManifestError, match="nothing was deleted"):
                prune(rewound.run, KeepLast(1))
        else:
            assert history.chain() == [newest]
    assert named > 50


def test_flips_in_a_tag(rewound: PushedTree, tmp_path: Path) -> None:
    """It never means another checkpoint. What does not ask for the tag goes on without it; nothing is deleted."""
    key = tag_key("good")
    named = 0
    for _ in each_flip(Path(rewound.run.root, key), every=19):
        try:
            history = rewound.run.history()
        except ManifestVersionError:
            continue
        assert history.newest() == rewound.stems[0]
        if history.unreadable:
            named += 1
            assert ([*history.unreadable], history.tags) == ([key], {})
            with pytest.raises(ManifestError, match=re.escape(key)):
                history.choose(parse_selector("tag:good"))
            with pytest.raises(ManifestError, match="nothing was deleted"):
                prune(rewound.run, KeepLast(1))
        else:
            assert history.tags == {"good": rewound.stems[1]}
    assert named > 50
    assert resume(rewound.run, parse_selector("tag:good"), to=tmp_path / "target").manifest.stem == rewound.stems[1]


def test_flips_in_run_json(push_tree: PushTree) -> None:
    """The run is not taken for another one: it is opened as what it is, or refused."""
    pushed = push_tree("T13")
    path = Path(pushed.run.root, "run.json")
    refused = 0
    for _ in each_flip(path, every=11):
        try:
            assert RunDirectory.open(pushed.run.url).record == pushed.run.record
        except ManifestError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("key", [attempt_key(1), "tags/good.json"])
def test_a_record_under_another_name(rewound: PushedTree, key: str) -> None:
    """One that was copied by hand is not what its name says."""
    source = Path(rewound.run.root, attempt_key(2) if "attempts" in key else key)
    copy = source.with_name("000003.json" if "attempts" in key else "better.json")
    copy.write_bytes(source.read_bytes())
    assert [*rewound.run.history().unreadable] == [copy.relative_to(rewound.run.root).as_posix()]


def test_records_of_earlier_versions(rewound: PushedTree) -> None:
    """They carry no digest, and mean what they say."""
    before = rewound.run.history()
    for key in (attempt_key(2), tag_key("good"), "run.json"):
        path = Path(rewound.run.root, key)
        text, count = re.subn(rb'\n "digest": "blake3:[0-9a-f]{64}",', b"", path.read_bytes())
        assert count == 1
        path.write_bytes(text)
    run = RunDirectory.open(rewound.run.url)
    assert run.record == rewound.run.record
    history = run.history()
    assert (history.attempts, history.tags, history.unreadable) == (before.attempts, before.tags, {})


def test_a_damaged_tag_beside_a_local_tier(rewound: PushedTree, tmp_path: Path) -> None:
    """The tag is named as what cannot be read, not as one that nobody has set."""
    shutil.copytree(rewound.run.root, tmp_path / "tier")
    tier = LocalTier(RunDirectory.open(f"file://{tmp_path / 'tier'}"))
    (tmp_path / "tier" / tag_key("good")).unlink()
    Path(rewound.run.root, tag_key("good")).write_bytes(b"{}")
    with pytest.raises(ManifestError, match=re.escape(tag_key("good"))):
        resume(rewound.run, parse_selector("tag:good"), to=tmp_path / "target", tier=tier)
