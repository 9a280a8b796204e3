"""An upload in parts that goes on where an earlier try ended: what is kept, what is proven, what is dropped."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr.backends.body import BodyDigest, FileBody
from ckptmgr.backends.localfile import SourceFile
from ckptmgr.backends.parts import Part, PartPlan, Receipt
from ckptmgr.backends.partupload import UploadGoneError, upload_parts
from ckptmgr.backends.retry import Retrier, RetryPolicy
from ckptmgr.core.checksums import Digests, digest_bytes
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendTimeoutError,
    ChecksumMismatchError,
    DiskFullError,
    ObjectExistsError,
    PermanentBackendError,
    SourceChangedError,
    ThrottledError,
    TransientBackendError,
)
from ckptmgr.testing.memory_parts import MemoryJournal, MemorySender, failing

RETRIER = Retrier(RetryPolicy(attempts=3), sleep=lambda seconds: None)


def _upload(
    path: Path,
    sender: MemorySender,
    workers: int = 4,
    *,
    journal: MemoryJournal | None = None,
    progress: Callable[[int], object] | None = None,
    part_bytes: int = 1000,
    expected: Digests | None = None,
) -> None:
    with SourceFile(path, expected) as source:
        upload_parts(
            source,
            PartPlan(size=source.size, part_bytes=part_bytes),
            sender,
            what="f",
            retrier=RETRIER,
            workers=workers,
            journal=journal,
            progress=progress,
        )


def _new_file(tmp_path: Path, size: int = 5500) -> Path:
    path = tmp_path / "f"
    path.write_bytes(os.urandom(size))
    return path


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("answers_crc", [True, False])
@pytest.mark.parametrize("error", [BackendTimeoutError("lost"), AccessDeniedError("expired"), Interrupted()])
def test_what_may_pass_keeps_the_parts(tmp_path: Path, error: BaseException, answers_crc: bool) -> None:
    """After a failure that may pass, a refusal of credentials, or an interruption, the next try sends what is missing only. Parts are proven by
    the store's CRC, or else by their MD5."""
    path, journal = _new_file(tmp_path), MemoryJournal()
    sender = MemorySender(failing("send", 4, 99, error))
    sender.answers_crc = answers_crc
    with pytest.raises(type(error)):
        _upload(path, sender, 1, journal=journal)
    assert (sender.aborted, journal.upload_id) == (0, "id-1")
    assert set(sender.parts) == {1, 2, 3}
    sender.fail = lambda step, number: None
    sender.sent.clear()
    _upload(path, sender, journal=journal)
    assert sorted(sender.sent) == [4, 5, 6]
    assert sender.object == path.read_bytes()
    assert journal.begun == ["id-1"]
    assert journal.upload_id is None


@pytest.mark.parametrize("answers_crc", [True, False])
@pytest.mark.parametrize("damage", [b"x" * 1000, b""])
def test_only_parts_that_are_proven_are_kept(tmp_path: Path, answers_crc: bool, damage: bytes) -> None:
    """Other bytes of the same length are sent again; a part of another length means that the file was cut differently."""
    path, journal = _new_file(tmp_path), MemoryJournal()
    sender = MemorySender(failing("send", 4, 99, BackendTimeoutError("lost")))
    sender.answers_crc = answers_crc
    with pytest.raises(BackendTimeoutError):
        _upload(path, sender, 1, journal=journal)
    sender.parts[2] = damage
    sender.fail = lambda step, number: None
    sender.sent.clear()
    _upload(path, sender, journal=journal)
    assert sorted(sender.sent) == ([2, 4, 5, 6] if damage else [1, 2, 3, 4, 5, 6])
    assert sender.object == path.read_bytes()


def test_another_cut_begins_anew(tmp_path: Path) -> None:
    """Parts of another size are no use: their upload is aborted first."""
    path, journal = _new_file(tmp_path), MemoryJournal()
    sender = MemorySender(failing("send", 4, 99, BackendTimeoutError("lost")))
    with pytest.raises(BackendTimeoutError):
        _upload(path, sender, journal=journal)
    sender.fail = lambda step, number: None
    _upload(path, sender, journal=journal, part_bytes=2000)
    assert sender.object == path.read_bytes()
    assert (sender.aborted, journal.begun) == (1, ["id-1", "id-2"])


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_an_upload_that_the_store_forgot(tmp_path: Path, when: str) -> None:
    """Aborted by a lifecycle rule between two tries, or in the middle of one: no try of a part helps, a new upload does."""
    path, journal = _new_file(tmp_path), MemoryJournal()
    sender = MemorySender(failing("send", 4, 99, BackendTimeoutError("lost")))
    with pytest.raises(BackendTimeoutError):
        _upload(path, sender, 1, journal=journal)

    def forget(step: str, number: int) -> None:
        if (step, number) == ("send", 4):
            sender.known = False

    if when == "meanwhile":
        sender.fail = forget
        sender.sent.clear()
        with pytest.raises(UploadGoneError):
            _upload(path, sender, 1, journal=journal)
        assert sender.sent == [4]
        assert journal.upload_id is None
    sender.known = False
    sender.fail = lambda step, number: None
    sender.sent.clear()
    _upload(path, sender, journal=journal)
    assert sorted(sender.sent) == [1, 2, 3, 4, 5, 6]
    assert sender.object == path.read_bytes()


@pytest.mark.parametrize("known", [True, False])
def test_an_upload_that_had_ended_is_not_made_again(tmp_path: Path, known: bool) -> None:
    """Its last answer was lost. If the store vouches for the object nothing is sent; if nobody knows what it should be, all is."""
    path, journal = _new_file(tmp_path), MemoryJournal()
    sender = MemorySender()
    _upload(path, sender, journal=journal)
    journal.upload_id = "id-1"
    sender.sent.clear()
    _upload(path, sender, journal=journal, expected=digest_bytes(path.read_bytes()) if known else None)
    assert sorted(sender.sent) == ([] if known else [1, 2, 3, 4, 5, 6])
    assert journal.upload_id is None


def test_parts_that_cannot_be_listed(tmp_path: Path) -> None:
    """Without the right to list parts an upload begins anew. A store that does not answer is asked again later, and nothing is dropped."""
    path, journal = _new_file(tmp_path), MemoryJournal()
    sender = MemorySender(failing("send", 4, 99, BackendTimeoutError("lost")))
    with pytest.raises(BackendTimeoutError):
        _upload(path, sender, journal=journal)
    sender.fail = failing("stored", 0, 99, BackendTimeoutError("silence"))
    with pytest.raises(BackendTimeoutError):
        _upload(path, sender, journal=journal)
    assert (sender.aborted, journal.upload_id) == (0, "id-1")
    sender.fail = failing("stored", 0, 1, AccessDeniedError("no right"))
    _upload(path, sender, journal=journal)
    assert sender.object == path.read_bytes()
    assert journal.begun == ["id-1", "id-2"]


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("send", PermanentBackendError("malformed")),
        ("finish", ObjectExistsError("there")),
        ("finish", ChecksumMismatchError("not what was sent")),
    ],
)
def test_what_is_for_good_drops_the_parts(tmp_path: Path, step: str, error: Exception) -> None:
    """No later try could use them."""
    path, journal = _new_file(tmp_path), MemoryJournal()
    sender = MemorySender(failing(step, 4 if step == "send" else 0, 99, error))
    with pytest.raises(type(error)):
        _upload(path, sender, journal=journal)
    assert (sender.aborted, journal.upload_id) == (1, None)


def test_a_source_that_changes_under_way(tmp_path: Path) -> None:
    """I10: the file is written to while its parts go up: nothing becomes visible, and the parts are dropped; a refusal that this caused is not
    tried again, for it would never end."""
    path, journal = _new_file(tmp_path), MemoryJournal()

    def change(step: str, number: int) -> None:
        if (step, number) == ("send", 3):
            with open(path, "ab") as file:
                file.write(b"more")
            raise TransientBackendError("BadDigest")

    sender = MemorySender(change)
    with pytest.raises(SourceChangedError):
        _upload(path, sender, journal=journal)
    assert sender.sent.count(3) == 1
    assert (sender.aborted, journal.upload_id, sender.object) == (1, None, None)


def test_an_abort_that_fails_is_not_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The id stays in the journal: the next try, or whoever removes the entry, finds it."""
    path, journal = _new_file(tmp_path), MemoryJournal()

    def fail(step: str, number: int) -> None:
        if step == "finish":
            raise PermanentBackendError("never")
        if step == "abort":
            raise BackendTimeoutError("silence")

    with pytest.raises(PermanentBackendError):
        _upload(path, MemorySender(fail), journal=journal)
    assert journal.upload_id == "id-1"
    assert "stay in the store" in caplog.text


def test_a_journal_that_cannot_be_written(tmp_path: Path) -> None:
    """An upload that would be forgotten is not begun: the disk is full, and no part is sent."""

    class Full(MemoryJournal):
        def began(self, upload_id: str) -> None:
            raise DiskFullError("no room")

    sender = MemorySender()
    with pytest.raises(DiskFullError):
        _upload(_new_file(tmp_path), sender, journal=Full())
    assert (sender.sent, sender.aborted) == ([], 1)


def test_progress_is_told_in_one_thread_and_counts_once(tmp_path: Path) -> None:
    """Bytes that are sent again, or that the store held already, do not count again; the caller's own thread is told."""
    path, journal, told, threads = _new_file(tmp_path), MemoryJournal(), list[int](), set[int]()

    def progress(count: int) -> None:
        told.append(count)
        threads.add(threading.get_ident())

    sender = MemorySender(failing("send", 2, 2, BackendTimeoutError("lost")))
    _upload(path, sender, progress=progress)
    assert sum(told) == 5500
    assert min(told) >= 0
    assert threads == {threading.get_ident()}

    sender = MemorySender(failing("send", 4, 99, BackendTimeoutError("lost")))
    with pytest.raises(BackendTimeoutError):
        _upload(path, sender, 1, journal=journal)
    sender.fail = lambda step, number: None
    told.clear()
    _upload(path, sender, journal=journal, progress=progress)
    assert sum(told) == 2500


def test_an_interruption_is_noticed_while_the_store_is_silent(tmp_path: Path) -> None:
    """The caller is told several times a second, so that it can end an upload in which nothing moves; waits between tries end at once."""
    path, journal = _new_file(tmp_path), MemoryJournal()
    waiting = threading.Event()

    def silence(step: str, number: int) -> None:
        if step == "send":
            waiting.set()
            raise ThrottledError("later", retry_after_s=3600.0)

    def interrupt(count: int) -> None:
        if waiting.is_set():
            raise Interrupted

    patient = Retrier(RetryPolicy(attempts=9, deadline_s=1e6))
    with SourceFile(path) as source, pytest.raises(Interrupted):
        upload_parts(
            source,
            PartPlan(size=source.size, part_bytes=1000),
            MemorySender(silence),
            what="f",
            retrier=patient,
            progress=interrupt,
            journal=journal,
        )
    assert journal.upload_id == "id-1"


class LossySender(MemorySender):
    """Fails before a step has its effect, or after it: then the answer is lost."""

    def begin(self) -> str:
        made = super().begin()
        self.fail("begun", 0)
        return made

    def send(self, upload_id: str, part: Part, body: FileBody, digest: BodyDigest) -> Receipt | None:
        receipt = super().send(upload_id, part, body, digest)
        try:
            self.fail("answered", part.number)
        except BaseException:
            self.refused.append(part.number)
            raise
        return receipt

    def finish(self, upload_id: str, receipts: list[Receipt], size: int, crc: str | None) -> None:
        super().finish(upload_id, receipts, size, crc)
        self.fail("finished", 0)


@pytest.mark.parametrize("seed", range(150))
def test_any_failures_in_any_order(tmp_path: Path, seed: int) -> None:
    """A third of all steps fail, before or after their effect, or interrupt: tried again and again with one journal, the object is made in the end,
    is right, and no part goes again whose answer had arrived."""
    path, journal, dice = _new_file(tmp_path, 9 * 1000 + 1), MemoryJournal(), random.Random(seed)
    expected = digest_bytes(path.read_bytes())

    def fail(step: str, number: int) -> None:
        if dice.random() < 0.3:
            raise dice.choice([BackendTimeoutError("lost"), AccessDeniedError("expired"), Interrupted()])

    sender = LossySender(fail)
    sender.answers_crc = bool(seed % 2)
    for _ in range(200):
        try:
            _upload(path, sender, dice.choice([1, 4]), journal=journal, expected=expected)
        except (BackendTimeoutError, AccessDeniedError, Interrupted):
            continue
        break
    assert sender.object == path.read_bytes()
    assert journal.upload_id is None
    for number in range(1, 11):
        assert sender.sent.count(number) <= sender.begun + sender.refused.count(number)
