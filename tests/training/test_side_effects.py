"""What ckptmgr does beside a training leaves the training's random numbers alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ckptmgr.backends.retry import Retrier, RetryPolicy
from ckptmgr.core.errors import TransientBackendError


def test_retries_draw_none_of_the_trainings_random_numbers() -> None:
    """The uploader's thread shares the global generators with the training: a flaky store must not change a run."""
    waits: list[float] = []

    def fails() -> None:
        raise TransientBackendError("503")

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = (random.random(), np.random.rand(), float(torch.rand(())))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with pytest.raises(TransientBackendError):
        Retrier(RetryPolicy(attempts=5), sleep=waits.append)("upload", fails)
    assert len(waits) == 4
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == expected


def test_ranks_that_seeded_alike_do_not_wait_alike() -> None:
    """Jitter is there to part them."""

    def waits() -> list[float]:
        random.seed(1)
        found: list[float] = []

        def fails() -> None:
            raise TransientBackendError("503")

        with pytest.raises(TransientBackendError):
            Retrier(RetryPolicy(attempts=5), sleep=found.append)("upload", fails)
        return found

    assert waits() != waits()
