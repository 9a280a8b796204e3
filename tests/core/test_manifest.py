"""Manifests: what is written is read back, and nothing damaged is ever taken for one."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr.core import manifest as manifest_module
from ckptmgr.core.checksums import blake3_hex, digest_bytes
from ckptmgr.core.errors import ManifestError, ManifestVersionError
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import (
    ClosingRecord,
    FileEntry,
    Manifest,
    canonical_json,
    content_id,
    decode_manifest,
    encode_closing,
    encode_manifest,
    role_of,
)
from ckptmgr.core.records import (
    AttemptRecord,
    RunRecord,
    TagRecord,
    decode_attempt,
    decode_run,
    decode_tag,
    encode_attempt,
    encode_run,
    encode_tag,
)

STEM = Stem(3, 500, 2, "9f8e7d6c")
WHERE = "runs/demo/manifests/x.json"


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "stem": STEM,
        "run_uuid": "5f0c",
        "files": (
            FileEntry.of("model.safetensors", digest_bytes(b"weights")),
            FileEntry.of("sub/ünïcode file.bin", digest_bytes(b"")),
        ),
        "epoch": 1.5,
        "parent": "000002-000000000400-000001-00000000",
        "created_at": "2026-01-02T03:04:05Z",
        "reasons": ("every_n_steps:500", "best:eval_loss"),
        "metrics": {"eval_loss": 0.1 + 0.2, "acc": 1.0},
        "metric_modes": {"eval_loss": "min"},
        "world_size": 8,
        "producer": {"framework": "torch", "host": "node-1"},
    }
    return Manifest(**{**fields, **changes})


def resealed(data: bytes, **changes: Any) -> bytes:
    """The document with fields changed and its own digest made right again: a well-formed lie."""
    document = {**json.loads(data), **changes}
    document = {key: value for key, value in document.items() if value is not ... and key != "digest"}
    document["digest"] = "blake3:" + blake3_hex(canonical_json(document))
    return canonical_json(document)


# --- round trip -----------------------------------------------------------------------------------------------------------


def test_a_manifest_is_read_back() -> None:
    """Every field, bit by bit."""
    original = manifest()
    assert decode_manifest(encode_manifest(original), where=WHERE) == original


def test_the_same_manifest_has_the_same_bytes() -> None:
    """Bytes do not depend on the order of files or of fields."""
    original = manifest()
    turned = manifest(
        files=original.files[::-1], metrics={name: original.metrics[name] for name in sorted(original.metrics)}
    )
    assert encode_manifest(turned) == encode_manifest(original)


def test_unknown_fields_survive() -> None:
    """A newer minor version's fields are kept by this one, in the manifest and in its files."""
    data = encode_manifest(manifest())
    document = json.loads(data)
    document["files"][0]["blake3_chunks"] = ["ab", "cd"]
    newer = resealed(data, shards={"plan": [1, {"deep": None}]}, files=document["files"])
    read = decode_manifest(newer, where=WHERE)
    assert isinstance(read, Manifest)
    assert read.extra == {"shards": {"plan": [1, {"deep": None}]}}
    assert read.files[0].extra == {"blake3_chunks": ["ab", "cd"]}
    assert encode_manifest(read) == newer


def test_metrics_that_are_no_finite_numbers_are_kept() -> None:
    """NaN and both infinities, as strings, for JSON has no others."""
    data = encode_manifest(manifest(metrics={"a": math.nan, "b": math.inf, "c": -math.inf, "d": -0.0}))
    assert json.loads(data)["metrics"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": -0.0}
    read = decode_manifest(data, where=WHERE)
    assert isinstance(read, Manifest)
    assert math.isnan(read.metrics["a"])
    assert (read.metrics["b"], read.metrics["c"]) == (math.inf, -math.inf)
    assert math.copysign(1, read.metrics["d"]) == -1


plain = st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain, inner, max_size=3),
    max_leaves=6,
)
paths = st.lists(
    st.from_regex(r"[a-zé %+.-]{1,8}(/[a-z]{1,4}){0,2}", fullmatch=True).filter(
        lambda path: all(part not in (".", "..") for part in path.split("/"))
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda path: path.split("/")[0],
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    files = tuple(
        FileEntry(
            path=path,
            size=draw(st.integers(0, 2**60)),
            blake3=blake3_hex(path.encode()),
            crc64xz=draw(st.none() | st.just("0" * 16)),
            rank=draw(st.none() | st.integers(0, 9)),
            extra=draw(st.dictionaries(plain.map("x_".__add__), json_values, max_size=2)),
        )
        for path in sorted(draw(paths))
    )
    return Manifest(
        stem=Stem(draw(st.integers(1, 10**7)), draw(st.integers(0, 10**13)), draw(st.integers(1, 10**7)), "0badcafe"),
        run_uuid=draw(plain),
        files=files,
        epoch=draw(st.none() | st.floats(0, 1e6)),
        metrics=draw(st.dictionaries(plain, st.floats(allow_nan=False), max_size=3)),
        metric_modes=draw(st.dictionaries(plain, st.sampled_from(["min", "max"]), max_size=2)),
        reasons=tuple(draw(st.lists(plain, max_size=3))),
        producer=draw(st.dictionaries(plain, plain, max_size=2)),
        conditions=draw(st.dictionaries(plain, json_values, max_size=2)),
        extra=draw(st.dictionaries(plain.map("x_".__add__), json_values, max_size=3)),
    )


@given(original=manifests())
def test_any_manifest_is_read_back(original: Manifest) -> None:
    """Whatever names, numbers and unknown fields it has."""
    data = encode_manifest(original)
    assert decode_manifest(data, where=WHERE) == original
    assert encode_manifest(original) == data


@settings(deadline=None)
@given(original=manifests())
def test_both_ways_to_read_a_manifest_agree(original: Manifest) -> None:
    """The one for what this version writes, and the one for everything else; and what is written is what Python's own JSON writes."""
    data = encode_manifest(original)
    quick = manifest_module._decode_known(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_module, "_decode_known", lambda data: None)
        thorough = decode_manifest(data, where=WHERE)
    assert thorough == original
    assert quick in (None, original)
    is_plain = not original.extra and not any(entry.extra for entry in original.files)
    assert (quick is not None) is is_plain
    text = json.dumps(json.loads(data), sort_keys=True, indent=1, ensure_ascii=False)
    assert data == text.encode() + b"\n"


def test_the_same_content_is_known_by_its_files() -> None:
    """Names and bytes count; the stem, and which CRCs were recorded, do not."""
    one = manifest()
    bare = tuple(FileEntry(path=e.path, size=e.size, blake3=e.blake3) for e in one.files[::-1])
    assert one.same_content(manifest(stem=STEM.renamed("00000000"), files=bare))
    assert content_id(bare) == one.content_id
    assert not one.same_content(manifest(files=one.files[:1]))
    moved = FileEntry(path="other.safetensors", size=one.files[0].size, blake3=one.files[0].blake3)
    assert not one.same_content(manifest(files=(moved, one.files[1])))


# --- damage ---------------------------------------------------------------------------------------------------------------


def test_a_manifest_cut_anywhere_is_refused() -> None:
    """Truncated at every byte; without only its last newline it still says the same."""
    data = encode_manifest(manifest())
    for length in range(len(data) - 1):
        with pytest.raises(ManifestError):
            decode_manifest(data[:length], where=WHERE)
    assert decode_manifest(data[:-1], where=WHERE) == manifest()


def test_every_flipped_bit_is_refused() -> None:
    """All of them, one at a time. None changes what the manifest says without being noticed."""
    original = manifest()
    data = encode_manifest(original)
    refused = 0
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            read = decode_manifest(bytes(damaged), where=WHERE)
        except ManifestError:
            refused += 1
        else:
            assert read == original  # white space, or a digit of an exponent, written another way
    assert refused >= len(data) * 8 - 16


def test_every_flipped_bit_of_a_closing_record_leaves_it_closed_or_refused() -> None:
    """A closed checkpoint never looks open again."""
    data = encode_closing(ClosingRecord(stem=STEM, closed="pruned", closed_at="2026-01-01T00:00:00Z"))
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            read = decode_manifest(bytes(damaged), where=WHERE)
        except ManifestError:
            continue
        assert isinstance(read, ClosingRecord)
        assert read.closed == "pruned"


@given(data=st.binary(max_size=80) | json_values.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_refused(data: bytes) -> None:
    """Whatever lies under manifests/, the answer is a ManifestError that names it."""
    with pytest.raises(ManifestError, match=WHERE):
        decode_manifest(data, where=WHERE)


ODD_JSON = [
    b'{"format": "ckptmgr", "version": 1, "x": NaN}',
    b'{"format": "ckptmgr", "version": 1, "x": -Infinity}',
    b'{"format": "ckptmgr", "version": 1, "x": 1e999}',
    b'{"format": "ckptmgr", "version": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"format": "ckptmgr", "version": 1, "x": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"format": "ckptmgr", "version": 1, "x": ' + b"9" * 5000 + b"}",
    b'{"format": "ckptmgr", "version": 1, "closed": ["pruned"]}',
    b'{"format": "ckptmgr", "version": 1, "closed": "pruned", "id": 5}',
    b'{"format": "ckptmgr", "version": 1, "closed": "pruned"}',
    b'{"format": "ckptmgr", "version": 1, "closed": "reopened", "id": "000003-000000000500-000002-9f8e7d6c"}',
    b'{"format": "ckptmgr", "version": true}',
    b'{"format": "ckptmgr", "version": 0}',
    b'{"format": "ckptmgr", "version": "1"}',
    b'{"format": "ckptmgr"}',
    b"\xff\xfe{\x00}\x00",
]


@pytest.mark.parametrize("data", ODD_JSON, ids=range(len(ODD_JSON)))
def test_odd_json_is_refused(data: bytes) -> None:
    """JSON that Python reads, or chokes on, in its own way ends as a ManifestError too."""
    with pytest.raises(ManifestError, match=WHERE):
        decode_manifest(data, where=WHERE)


LIES: list[dict[str, Any]] = [
    {"step": 501},
    {"attempt": 4},
    {"id": "../../x"},
    {"id": ...},
    {"files": ...},
    {"files": "model"},
    {"files": [{"path": "a", "size": -1, "blake3": "0" * 64}]},
    {"files": [{"path": "a", "size": 1, "blake3": "0" * 63}]},
    {"files": [{"path": "a", "size": 1, "blake3": "G" * 64}]},
    {"files": [{"path": "a", "size": "1", "blake3": "0" * 64}]},
    {"files": [{"path": "a", "size": 1}]},
    {"metrics": {"eval_loss": "low"}},
    {"metrics": {"eval_loss": None}},
    {"metrics": {"eval_loss": 10**400}},
    {"world_size": "many"},
    {"run_uuid": 5},
    {"size_bytes": ...},
]


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_manifest_whose_fields_make_no_sense_is_refused(lie: dict[str, Any]) -> None:
    """Even with its own digest right: somebody wrote it, but not us."""
    with pytest.raises(ManifestError):
        decode_manifest(resealed(encode_manifest(manifest()), **lie), where=WHERE)


K047 = [
    "../../outside.txt",
    "/abs/outside.txt",
    "a/../../outside.txt",
    "..\\outside.txt",
    "C:\\x",
    "",
    ".",
    "a\0b",
    "a\nb",
]


@pytest.mark.parametrize("path", K047)
def test_an_unsafe_path_refuses_the_whole_manifest(path: str) -> None:
    """K047: on reading, and on writing, so that no reader has to cope."""
    good = FileEntry.of("good", digest_bytes(b"good"))
    evil = FileEntry(path=path, size=1, blake3="0" * 64)
    with pytest.raises(ManifestError, match="not a plain relative path"):
        encode_manifest(manifest(files=(good, evil)))
    files = [{"path": name, "size": 1, "blake3": "0" * 64} for name in ("good", path)]
    with pytest.raises(ManifestError, match="not a plain relative path"):
        decode_manifest(resealed(encode_manifest(manifest()), files=files), where=WHERE)


@pytest.mark.parametrize("names", [("a", "a"), ("a", "a/b")])
def test_files_in_each_others_way_refuse_the_whole_manifest(names: tuple[str, str]) -> None:
    """K047: a duplicate name, or a file that is also a folder."""
    files = [{"path": name, "size": 1, "blake3": "0" * 64} for name in names]
    with pytest.raises(ManifestError, match=r"twice|both as a file and as a folder"):
        decode_manifest(resealed(encode_manifest(manifest()), files=files), where=WHERE)


def test_a_newer_major_version_says_upgrade() -> None:
    """It is not damaged, and must not be treated so; whatever else is in it is not looked at."""
    with pytest.raises(ManifestVersionError, match="upgrade ckptmgr") as caught:
        decode_manifest(b'{"format": "ckptmgr", "version": 2, "files": "all new"}', where=WHERE)
    assert caught.value.__dict__["version"] == 2


# --- other records --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", ["pruned", "aborted"])
@pytest.mark.parametrize("closed_at", [None, "2026-01-01T00:00:00Z"])
def test_a_closing_record_is_read_back(closed: Any, closed_at: str | None) -> None:
    """And is told from a manifest."""
    record = ClosingRecord(stem=STEM, closed=closed, closed_at=closed_at)
    assert decode_manifest(encode_closing(record), where=WHERE) == record


def test_the_other_records_are_read_back() -> None:
    """run.json, a claim, a tag."""
    run = RunRecord(uuid="5f0c", kind="artifact", create_only=False, created_at="2026-01-01T00:00:00Z")
    claim = AttemptRecord(number=3, how="explicit", parent=STEM, previous=2, claim_id="c", host="node-1")
    tag = TagRecord(tag="best", stem=STEM, created_at=None)
    assert decode_run(encode_run(run), where=WHERE) == run
    assert decode_attempt(encode_attempt(claim), where=WHERE) == claim
    assert decode_tag(encode_tag(tag), where=WHERE) == tag


@pytest.mark.parametrize("decode", [decode_run, decode_attempt, decode_tag])
def test_the_other_records_refuse_what_they_are_not(decode: Any) -> None:
    """Missing fields, other JSON, no JSON, a newer version."""
    for data in (b"", b"[]", b"{}", b'{"format": "ckptmgr", "version": 1}', encode_manifest(manifest())[:-9]):
        with pytest.raises(ManifestError, match=WHERE):
            decode(data, where=WHERE)
    with pytest.raises(ManifestVersionError):
        decode(b'{"format": "ckptmgr", "version": 2}', where=WHERE)


@pytest.mark.parametrize("decode", [decode_attempt, decode_tag])
def test_records_refuse_a_stem_that_is_none(decode: Any) -> None:
    """A pointer to nowhere is found when it is read."""
    document = {"format": "ckptmgr", "version": 1, "attempt": 1, "how": "auto", "parent": "x", "tag": "t", "id": "x"}
    with pytest.raises(ManifestError, match="not a checkpoint id"):
        decode(canonical_json(document), where=WHERE)


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("model.safetensors", "weights"),
        ("model.safetensors.index.json", "weights"),
        ("pytorch_model-00001-of-00002.bin", "weights"),
        ("last.ckpt", "weights"),
        ("optimizer.pt", "optimizer"),
        ("global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt", "optimizer"),
        ("scheduler.pt", "scheduler"),
        ("rng_state_3.pth", "rng"),
        ("trainer_state.json", "trainer"),
        ("tokenizer_config.json", "tokenizer"),
        ("config.json", "config"),
        ("notes.txt", "other"),
    ],
)
def test_the_role_of_a_file_is_known_by_its_name(path: str, role: str) -> None:
    """`pull --only weights` takes what it says."""
    assert role_of(path) == role
