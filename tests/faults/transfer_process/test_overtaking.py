"""Newest first: what gives way to a newer save, and when."""

from __future__ import annotations

import os
from typing import Any

import pytest

from ckptmgr.backends.retry import RetryPolicy
from ckptmgr.core.errors import TransientBackendError
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.relay import Relay
from ckptmgr.transfer.messages import Committed, Failed, Moved

Scene = Any
DEADLINE_S = 60.0


@pytest.mark.parametrize("host", ["process", "thread"])
def test_an_older_upload_that_waits_for_its_next_try_gives_way(scene: Scene, host: str) -> None:
    """The newest is committed first; the older one goes on later, without a byte of what was confirmed."""
    patient = RetryPolicy(attempts=10, base_s=1000.0, cap_s=1000.0, deadline_s=2000.0)
    failing = scene.faults.add(
        Fault(method="PUT", key="*-000000000100-*/b.bin", status=503, code="SlowDown", times=None)
    )
    (older,) = scene.save(100)
    uploader = scene.uploader(retry=patient) if host == "process" else scene.in_thread(patient)
    uploader.notify()
    assert failing.reached.wait(DEADLINE_S)
    (newer,) = scene.save(200)
    uploader.notify()
    assert scene.wait_for(Committed).stem == newer
    scene.faults.clear()
    uploader.hurry()
    assert scene.wait_for(Committed).stem == older
    assert uploader.close(DEADLINE_S) == []
    assert scene.were_sent_once([older, newer])
    # That it was in trouble is said, and nothing else.
    assert all(isinstance(error, TransientBackendError) for error in uploader.poll_errors())


@pytest.mark.parametrize("host", ["process", "thread"])
def test_in_a_hurry_what_waits_for_its_next_try_is_tried_now(scene: Scene, host: str) -> None:
    """The only one there is: it was to wait for up to a thousand seconds, and the machine has thirty."""
    patient = RetryPolicy(attempts=10, base_s=1000.0, cap_s=1000.0, deadline_s=2000.0)
    failing = scene.faults.add(Fault(method="PUT", key="*/b.bin", status=503, code="SlowDown"))
    (stem,) = scene.save(100)
    uploader = scene.uploader(retry=patient) if host == "process" else scene.in_thread(patient)
    uploader.notify()
    assert failing.reached.wait(DEADLINE_S)
    uploader.hurry()
    assert scene.wait_for(Committed).stem == stem
    assert uploader.close(DEADLINE_S) == []
    assert scene.were_sent_once([stem])


def test_an_older_upload_under_way_gives_way(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a large file on a slow link; its parts stay, and what was confirmed is not sent again."""
    large = {"a.bin": b"a" * 1000, "b.bin": os.urandom(33 << 20)}
    (older,) = scene.save(100, files=large)
    with Relay(scene.store.server.url, bytes_per_s=12_000_000, buffer_bytes=64 << 10) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", relay.url)
        uploader = scene.uploader()
        uploader.notify()
        scene.wait_for(Moved, lambda event: event.sent_bytes > 2 << 20)
        (newer,) = scene.save(200)
        uploader.hurry()
        assert scene.wait_for(Committed).stem == newer
        assert scene.wait_for(Committed).stem == older
        assert uploader.close(DEADLINE_S) == []
        assert len(relay.requests(rf"POST /\S+{older}\S+uploads")) == 1
        assert len(relay.requests(rf"PUT /\S+{older}/a.bin")) == 1
    assert uploader.poll_errors() == []
    assert scene.store.get(f"run/checkpoints/{older}/b.bin") == large["b.bin"]


def test_a_newest_that_is_refused_does_not_keep_the_older_ones_from_going_up(scene: Scene) -> None:
    """In a hurry, too: an older one gives way to what is new, not to what has failed already, or the two would take turns without end."""
    (newer,) = scene.save(200)
    refused = scene.faults.add(Fault(method="PUT", key=f"*/{newer}/*", status=403, code="AccessDenied", times=None))
    uploader = scene.uploader()
    uploader.hurry()
    uploader.notify()
    scene.wait_for(Failed)
    stems = scene.save(*range(100, 110))
    uploader.notify()
    for _ in stems:
        scene.wait_for(Committed)
    assert refused.hits <= 2 * 5  # each of its files once a round at most
    assert uploader.close(DEADLINE_S) == [newer]
