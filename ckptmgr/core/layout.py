"""Every key and file name of a run directory; the same on every backend and on local disk.

    <run>/run.json                       what this is: format, kind, uuid
    <run>/attempts/000003.json           one claimed process life
    <run>/checkpoints/<stem>/…           data, a plain copy of the trainer's directory
    <run>/manifests/<stem>.json          the commit (or, later, its closing record)
    <run>/tags/<tag>.json                users' names
    <run>/artifacts/<stem>/…             which artifacts were made from a checkpoint (`ckptmgr.core.artifacts`)
    <run>/.gc/<stem>.json                uncommitted data that gc will remove, on stores where it takes two passes
    <run>/uploads/<stem>.json            local tier only: the upload journal of one save
    <run>/transfer.json, transfer.log, metrics.jsonl     local tier only: what the uploads are doing, and figures to plot
    <run>/restored.json                  local tier only: what the last restore did

Numbers are zero-padded, so that LIST order is (attempt, step, seq); nothing sorts unpadded numbers as strings (I4).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter

from ckptmgr.core.errors import ConfigError, ManifestError

RUN_FILE = "run.json"
ATTEMPTS = "attempts"
CHECKPOINTS = "checkpoints"
MANIFESTS = "manifests"
PARTS = "parts"
TAGS = "tags"
ARTIFACTS = "artifacts"
UPLOADS = "uploads"
# Local tier only: where checkpoints are put for a trainer to read.
RESUMED = "resumed"
# Local tier only, and information: what the host of the uploads says of itself, figures to plot, its log; of the latter two also an older half.
TRANSFER_FILE = "transfer.json"
METRICS_FILE = "metrics.jsonl"
OLD_METRICS_FILE = "metrics.old.jsonl"
LOG_FILE = "transfer.log"
OLD_LOG_FILE = "transfer.old.log"
# Local tier only, and information: what the last restore from or into it did.
RESTORED_FILE = "restored.json"
# The ending of a directory that is still being filled.
PARTIAL = ".partial"
# Written and removed again when a run is created; a kill in between may leave one, which means nothing.
PROBE_PREFIX = ".probe-"
# What a first pass of gc has seen, on a store that does not decide create-only writes.
GC_MARKS = ".gc"
# Below a store or a run: what `ckptmgr doctor` writes and removes again; what a killed one leaves means nothing.
DOCTOR_PREFIX = ".ckptmgr-doctor-"

_STEM = re.compile(r"([0-9]{6,})-([0-9]{12,})-([0-9]{6,})-([0-9a-f]{8})").fullmatch
_NONCE = re.compile("[0-9a-f]{8}").fullmatch
# A stem none of whose numbers outgrew its padding: it can be written in no other way.
_STEM_CHARS = 6 + 1 + 12 + 1 + 6 + 1 + 8
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*").fullmatch
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True, order=True)
class Stem:
    """The name of one save, never reused: attempt, step, the attempt's save counter, and 8 random hexadecimal digits.

    Orders by (attempt, step, seq). Written `000003-000000000500-000002-9f8e7d6c`.
    """

    attempt: int
    step: int
    seq: int
    nonce: str

    def __post_init__(self) -> None:
        if self.attempt < 1 or self.step < 0 or self.seq < 1 or not _NONCE(self.nonce):
            raise ConfigError(
                f"not a stem: attempt {self.attempt}, step {self.step}, seq {self.seq}, nonce {self.nonce!r}"
            )

    def __str__(self) -> str:
        return f"{self.attempt:06d}-{self.step:012d}-{self.seq:06d}-{self.nonce}"

    @staticmethod
    def parse(text: str) -> Stem:
        """The stem written as `text`.

        Raises:
            ConfigError: `text` is not one.
        """
        stem = parse_stem(text)
        if stem is None:
            raise ConfigError(
                f"{text!r} is not a checkpoint id",
                hint="ids look like 000001-000000000500-000002-9f8e7d6c; see `ckptmgr ls`",
            )
        return stem

    @property
    def position(self) -> tuple[int, int]:
        """(step, seq): the order of commits within one attempt."""
        return self.step, self.seq

    def renamed(self, nonce: str) -> Stem:
        """The same save under a new name: an upload that cannot commit under this one goes on under that."""
        return replace(self, nonce=nonce)


def parse_stem(text: str) -> Stem | None:
    """The stem written as `text`, or None if it is something else (foreign data).

    Only the one way to write a stem counts: `0000001-…` would be read as attempt 1, and then looked for under another key.
    """
    match = _STEM(text)
    if match is None:
        return None
    attempt, step, seq, nonce = match.groups()
    if int(attempt) < 1 or int(seq) < 1:
        return None
    stem = Stem(int(attempt), int(step), int(seq), nonce)
    return stem if len(text) == _STEM_CHARS or str(stem) == text else None


#: To sort stems by, in their own order at a fraction of the time.
STEM_ORDER = attrgetter("attempt", "step", "seq", "nonce")


def manifest_key(stem: Stem) -> str:
    return f"{MANIFESTS}/{stem}.json"


def data_prefix(stem: Stem) -> str:
    return f"{CHECKPOINTS}/{stem}"


def data_key(stem: Stem, path: str) -> str:
    return f"{CHECKPOINTS}/{stem}/{path}"


def upload_key(stem: Stem) -> str:
    return f"{UPLOADS}/{stem}.json"


def is_doctors(name: str) -> bool:
    """Whether a directory below a store is one of `ckptmgr doctor`'s."""
    return re.fullmatch(re.escape(DOCTOR_PREFIX) + "[0-9a-f]{8}", name) is not None


def mark_key(stem: Stem) -> str:
    return f"{GC_MARKS}/{stem}.json"


def attempt_key(number: int) -> str:
    return f"{ATTEMPTS}/{number:06d}.json"


def attempt_bid_key(number: int, nonce: str) -> str:
    """A bid for a number on a store without create-only, beside others' bids; `ckptmgr.core.claims.claim` says who wins."""
    return f"{ATTEMPTS}/{number:06d}-{nonce}.json"


def attempt_number(key: str) -> int | None:
    """The attempt that a key below `attempts/` claims (or bids for); None if it is something else."""
    match = re.fullmatch(r"([0-9]{6,})(?:-[0-9a-f]+)?\.json", key.rsplit("/", 1)[-1])
    return int(match.group(1)) if match else None


def tag_key(tag: str) -> str:
    """Where `tag` is kept.

    Raises:
        ConfigError: not a tag: letters, digits, `.`, `_` and `-` only, at most 100.
    """
    if not _TAG.fullmatch(tag):
        raise ConfigError(
            f"{tag!r} is not a tag",
            hint="use letters, digits, '.', '_' and '-', at most 100, beginning with a letter or digit",
        )
    return f"{TAGS}/{tag}.json"


def check_relative_path(path: str) -> str:
    """`path` itself if it is safe to create below a target directory.

    Raises:
        ManifestError: it is empty, absolute, climbs (`..`), has `.` or empty components, a backslash, a drive letter, or a control
            character (K047). The whole checkpoint is refused then, before the first byte is written.
    """
    parts = path.split("/")
    unsafe = (
        not path
        or any(part in ("", ".", "..") for part in parts)
        or "\\" in path
        or re.match(r"[A-Za-z]:", path) is not None
        or any(ord(char) < 32 or ord(char) == 127 for char in path)
    )
    if unsafe:
        raise ManifestError(
            f"the manifest names the file {path!r}, which is not a plain relative path",
            hint="do not use this checkpoint: it was tampered with",
            path=path,
        )
    return path


def check_unicode(path: str) -> None:
    """Raise ConfigError if the name `path` is not UTF-8 on disk (Python holds such bytes as lone surrogates), which no object store can hold."""
    try:
        path.encode()
    except UnicodeEncodeError as exc:
        raise ConfigError(
            f"the name {path!r} is not UTF-8, and no object store can hold it",
            hint="rename it, or keep it in a run on a disk",
        ) from exc


def check_paths(paths: Iterable[str]) -> None:
    """Refuse a list of files that could not lie beside each other in one directory (duplicates, a file used as a folder).

    Raises:
        ManifestError: names the entry.
    """
    seen: set[str] = set()
    for path in paths:
        if not _PLAIN_PATH(path):  # most are, and there may be a million
            check_relative_path(path)
        if path in seen:
            raise ManifestError(f"the manifest names the file {path!r} twice", path=path)
        seen.add(path)
    for path in seen:
        parent = path
        while "/" in parent:
            parent = parent.rsplit("/", 1)[0]
            if parent in seen:
                raise ManifestError(f"the manifest names {parent!r} both as a file and as a folder", path=parent)
