"""The cache file by itself: what it gives back, how large it gets, and when it is written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import md5
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.layout import Stem, attempt_key, manifest_key, tag_key
from ckptmgr.core.manifest import ClosingRecord, FileEntry, Manifest, decode_manifest, encode_closing, encode_manifest
from ckptmgr.run import cache as cache_module
from ckptmgr.run.cache import RunCache, Seen
from ckptmgr.run.identity import wall_s

URL, UUID = "s3://bucket/exp/run", "5f0c"
FILES = (
    FileEntry.of("model.bin", digest_bytes(b"weights")),
    FileEntry.of("config.json", digest_bytes(b"{}"), role="config"),
)


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own; where the files of the runs are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ckptmgr" / "runs"


def checkpoint(step: int, **fields: Any) -> Manifest:
    stem = Stem(1, step, step, f"{step:08x}")
    return Manifest(**{"stem": stem, "run_uuid": UUID, "files": FILES, "metrics": {"loss": 1 / step}, **fields})


def seen(data: bytes) -> Seen:
    return Seen(md5(data, usedforsecurity=False).hexdigest(), len(data), 1_700_000_000_000)


def opened(listed: Mapping[str, Seen], *, url: str = URL, uuid: str = UUID) -> RunCache:
    """As a process that looks at the run now."""
    cache = RunCache(url, uuid)
    cache.compare(listed)
    return cache


class Records:
    """The records of a run as a store would list them."""

    def __init__(self, manifests: Iterable[Manifest] = ()) -> None:
        self.data = {manifest_key(manifest.stem): encode_manifest(manifest) for manifest in manifests}

    def opened(self) -> RunCache:
        return opened({key: seen(data) for key, data in self.data.items()})

    def keep_all(self, cache: RunCache) -> RunCache:
        for key, data in self.data.items():
            record = decode_manifest(data, where=key)
            if cache.record_of(record.stem, key) is None:
                cache.keep(key, data, record)
        return cache

    def known(self, cache: RunCache) -> list[int]:
        found = (cache.record_of(decode_manifest(data, where=key).stem, key) for key, data in self.data.items())
        return [record.stem.step for record in found if record is not None]


def the_file(caches: Path) -> Path:
    (path,) = caches.iterdir()
    return path


# --- what comes back --------------------------------------------------------------------------------------------------------

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
json_values = (
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False, allow_infinity=False) | words
)
extras = st.dictionaries(words.map("x_".__add__), json_values | st.lists(json_values, max_size=2), max_size=2)
checksums = (
    st.none() | st.text("0123456789abcdef", min_size=16, max_size=16) | st.sampled_from(["", "ABCD", "xyz", "0"])
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    names = draw(st.lists(st.text("abc/", min_size=1, max_size=3).map("f".__add__), max_size=3))
    files = tuple(
        FileEntry(
            path=name.replace("/", "-"),
            size=draw(st.integers(0, 2**70)),
            blake3=draw(st.text("0123456789abcdef", min_size=64, max_size=64)),
            role=draw(words),
            crc64xz=draw(checksums),
            crc64nvme=draw(checksums),
            rank=draw(st.none() | st.integers(0, 2**66)),
            extra=draw(extras),
        )
        for name in sorted(set(names))
    )
    files = tuple({entry.path: entry for entry in files}.values())
    return checkpoint(
        draw(st.integers(1, 9)),
        files=files,
        kind=draw(words),
        epoch=draw(st.none() | st.floats(0, 1e300)),
        parent=draw(st.none() | words),
        created_at=draw(st.none() | words),
        reasons=tuple(draw(st.lists(words, max_size=2))),
        metrics=draw(st.dictionaries(words, st.floats(allow_nan=False), max_size=3)),
        metric_modes=draw(st.dictionaries(words, st.sampled_from(["min", "max"]), max_size=2)),
        world_size=draw(st.integers(1, 2**66)),
        producer=draw(st.dictionaries(words, words, max_size=2)),
        extra=draw(extras),
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(originals=st.lists(manifests(), min_size=1, max_size=3, unique_by=lambda manifest: manifest.stem))
def test_whatever_is_kept_comes_back_as_it_was_read(originals: list[Manifest], caches: Path) -> None:
    """Every field of every manifest, or nothing, so that it is read: numbers beyond 64 bits, digests that are none."""
    records = Records(originals)
    records.keep_all(records.opened()).save()
    again = records.opened()
    for original in originals:
        found = again.record_of(original.stem, manifest_key(original.stem))
        assert found is None or found == original
    for path in caches.iterdir():
        path.unlink()


def test_one_that_cannot_be_kept_does_not_keep_out_the_others() -> None:
    """A number that msgpack cannot write, from a newer version."""
    records = Records(
        [checkpoint(1), checkpoint(2, extra={"x": 2**70}), checkpoint(3, world_size=2**70), checkpoint(4)]
    )
    records.keep_all(records.opened()).save()
    assert records.known(records.opened()) == [1, 4]


def test_metrics_that_are_no_finite_numbers_come_back() -> None:
    """NaN too, which equals nothing."""
    records = Records([checkpoint(1, metrics={"a": float("nan"), "b": float("-inf"), "c": -0.0})])
    records.keep_all(records.opened()).save()
    found = records.opened().record_of(Stem(1, 1, 1, "00000001"), next(iter(records.data)))
    assert isinstance(found, Manifest)
    assert repr(found.metrics) == "{'a': nan, 'b': -inf, 'c': -0.0}"


@pytest.mark.parametrize("closed", ["pruned", "aborted"])
@pytest.mark.parametrize("closed_at", [None, "2026-01-01T00:00:00Z"])
def test_closing_records_come_back(closed: Any, closed_at: str | None) -> None:
    """For thirty days each pruned checkpoint has one."""
    records, stem = Records(), Stem(1, 5, 1, "0badcafe")
    record = ClosingRecord(stem=stem, closed=closed, closed_at=closed_at)
    records.data = {manifest_key(stem): encode_closing(record)}
    records.keep_all(records.opened()).save()
    assert records.opened().record_of(stem, manifest_key(stem)) == record


def test_a_manifest_of_another_run_is_not_kept(caches: Path) -> None:
    """It would come back as one of this run."""
    records = Records([checkpoint(1, run_uuid="other")])
    records.keep_all(records.opened()).save()
    assert not caches.exists()


@pytest.mark.parametrize(
    ("etag", "size", "is_kept"),
    [("md5", 0, True), ("MD5", 0, True), ("md5-2", 0, False), ("0" * 32, 0, False), ("", 0, False), ("md5", 1, False)],
)
def test_a_tag_is_kept_only_if_the_etag_proves_its_bytes(etag: str, size: int, is_kept: bool) -> None:
    """In whatever case OSS writes it; encrypted by a key service, ETags prove nothing, and tags are read each time."""
    data, key = b"a tag", tag_key("best")
    digest = md5(data, usedforsecurity=False).hexdigest()
    etag = {"md5": digest, "MD5": digest.upper(), "md5-2": f"{digest}-2"}.get(etag, etag)
    listed = {key: Seen(etag, len(data) + size, 1)}
    cache = opened(listed)
    cache.keep_data(key, data)
    cache.save()
    assert opened(listed).data_of(key) == (data if is_kept else None)


def test_a_claim_is_kept_by_any_etag() -> None:
    """Nobody ever writes it again."""
    data, key = b"a claim", attempt_key(1)
    listed = {key: Seen("0" * 32, len(data), 1)}
    cache = opened(listed)
    cache.keep_data(key, data)
    cache.save()
    assert opened(listed).data_of(key) == data
    assert opened(listed, uuid="another uuid").data_of(key) is None
    assert opened(listed, url="s3://bucket/exp/run2").data_of(key) is None


def test_seen_by_a_record_of_a_listing() -> None:
    """Times by the millisecond, however an engine computes them; no time and no ETag as what equals nothing."""
    record = {"etag": "x", "size": 3, "mtime": 1_700_000_000.1230001}
    assert Seen.of(record) == Seen.of({**record, "mtime": 1_700_000_000.123}) == Seen("x", 3, 1_700_000_000_123)
    assert Seen.of({"etag": "x", "size": 3}) == Seen("x", 3, -1)
    assert Seen.of({"etag": 'W/"x"', "size": 3}).etag == Seen.of({"size": 3}).etag == ""


# --- how large, and when -----------------------------------------------------------------------------------------------------


def test_what_the_store_has_no_more_goes(caches: Path) -> None:
    """With the next writing: a run that is pruned for a year does not keep its past here."""
    records = Records(checkpoint(step, producer={"host": f"node-{step}"}) for step in range(1, 101))
    records.keep_all(records.opened()).save()
    full = the_file(caches).stat().st_size
    for key in list(records.data)[:95]:
        del records.data[key]
    records.keep_all(records.opened()).save()
    assert records.known(records.opened()) == [96, 97, 98, 99, 100]
    assert the_file(caches).stat().st_size < full / 10


def test_nothing_is_written_when_there_is_nothing_new(caches: Path) -> None:
    """Not even for a run without any record."""
    Records().opened().save()
    assert not caches.exists()
    records = Records([checkpoint(1)])
    records.keep_all(records.opened()).save()
    before = the_file(caches).stat()
    records.keep_all(records.opened()).save()
    assert (the_file(caches).stat().st_ino, the_file(caches).stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_few_new_ones_of_many_are_not_worth_writing_all(caches: Path) -> None:
    """Below one in a hundred they are read again instead."""
    records = Records(checkpoint(step) for step in range(1, 301))
    records.keep_all(records.opened()).save()
    before = the_file(caches).stat().st_ino
    records.data |= Records([checkpoint(301), checkpoint(302)]).data
    records.keep_all(records.opened()).save()
    assert the_file(caches).stat().st_ino == before
    records.data |= Records([checkpoint(303), checkpoint(304)]).data
    records.keep_all(records.opened()).save()
    assert the_file(caches).stat().st_ino != before
    assert len(records.known(records.opened())) == 304


def test_a_run_that_does_not_fit_keeps_its_newest(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is read each time, and the file stays within its bound."""
    monkeypatch.setattr(cache_module, "_MOST_BYTES", 20_000)
    records = Records(checkpoint(step) for step in range(1, 201))
    records.keep_all(records.opened()).save()
    known = records.known(records.opened())
    assert 20 < len(known) < 200
    assert known == list(range(201 - len(known), 201))
    assert the_file(caches).stat().st_size < 20_000
    records.keep_all(records.opened()).save()
    assert records.known(records.opened()) == known


def test_all_runs_together_have_a_bound(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not used for longest goes first, and what killed processes left, once it is old."""
    caches.mkdir(parents=True)
    for age, name in (
        (100, "oldest.cache"),
        (50, "older.cache"),
        (10, "young.cache"),
        (1, "young.tmp"),
        (90_000, "old.tmp"),
    ):
        (caches / name).write_bytes(bytes(1000))
        moment = wall_s() - age
        os.utime(caches / name, (moment, moment))
    monkeypatch.setattr(cache_module, "_MOST_BYTES_OF_ALL", 3_600)
    records = Records([checkpoint(1)])
    cache = records.keep_all(records.opened())
    cache.save()
    assert the_size(cache) < 600
    left = {path.name for path in caches.iterdir()} - {cache._path.name}
    assert left == {"older.cache", "young.cache", "young.tmp"}


def the_size(cache: RunCache) -> int:
    return cache._path.stat().st_size


def test_a_run_that_is_looked_at_counts_as_used(caches: Path) -> None:
    """Also when nothing in it is new."""
    records = Records([checkpoint(1)])
    records.keep_all(records.opened()).save()
    old = wall_s() - 3 * 24 * 3600
    os.utime(the_file(caches), (old, old))
    assert records.known(records.opened()) == [1]
    assert the_file(caches).stat().st_mtime > old + 24 * 3600


def test_without_a_home_directory_there_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no folder of that name wherever the process happens to be."""
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.chdir(tmp_path)
    records = Records([checkpoint(1)])
    records.keep_all(records.opened()).save()
    assert records.known(records.opened()) == []
    assert list(tmp_path.iterdir()) == []


def test_reads_that_come_in_during_the_writing_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a Ctrl-C nobody waits for them."""
    records = Records(checkpoint(step, producer={"host": f"node-{step}"}) for step in range(1, 101))
    cache = records.opened()
    late = iter(list(records.data.items())[50:])
    for key, data in list(records.data.items())[:50]:
        cache.keep(key, data, decode_manifest(data, where=key))
    trimmed = cache_module._trimmed

    def slow(body: Any) -> Any:
        for key, data in late:
            cache.keep(key, data, decode_manifest(data, where=key))
        return trimmed(body)

    monkeypatch.setattr(cache_module, "_trimmed", slow)
    cache.save()
    again = records.opened()
    assert records.known(again) == list(range(1, 51))
    for stem in (Stem(1, 1, 1, "00000001"), Stem(1, 50, 50, "00000032")):
        found = again.record_of(stem, manifest_key(stem))
        assert isinstance(found, Manifest)
        assert found.producer == {"host": f"node-{stem.step}"}


def test_a_link_in_its_place_is_not_followed(caches: Path, tmp_path: Path) -> None:
    """Neither read through nor written through."""
    records = Records([checkpoint(1)])
    records.keep_all(records.opened()).save()
    path = the_file(caches)
    elsewhere = path.rename(tmp_path / "elsewhere")
    before = elsewhere.read_bytes()
    path.symlink_to(elsewhere)
    assert records.known(records.opened()) == []
    records.keep_all(records.opened()).save()
    assert not path.is_symlink()
    assert elsewhere.read_bytes() == before


def test_what_the_checkpoints_have_in_common_is_kept_once(caches: Path) -> None:
    """The producer and the reasons of thousands are mostly the same words."""
    long = {f"name-{number}": "x" * 50 for number in range(20)}
    records = Records(checkpoint(step, producer=long) for step in range(1, 100))
    records.keep_all(records.opened()).save()
    assert the_file(caches).stat().st_size < 100 * len("".join(long.values())) / 3
    records.data |= Records([replace(checkpoint(100), producer={"other": "one"})]).data
    records.keep_all(records.opened()).save()
    found = records.opened().record_of(Stem(1, 100, 100, f"{100:08x}"), manifest_key(Stem(1, 100, 100, f"{100:08x}")))
    assert isinstance(found, Manifest)
    assert found.producer == {"other": "one"}
