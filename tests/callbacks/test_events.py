"""The page of events, docs/events.md: what it says of the embedded Trainer is what happens, and it is read and written as it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr import Trainer, TrainingArguments
from ckptmgr.callbacks.base import EVENTS, Callback, TrainerControl
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.testing.events import EventRecorder, Told, agree, documented, updated

PAGE = Path(__file__).parents[2] / "docs" / "events.md"
HOSTS = ("embedded", "transformers", "TRL", "ms-swift", "Lightning")


class SaveEpochs(Callback):
    """Has each epoch saved."""

    def on_epoch_end(self, control: TrainerControl, **kwargs: Any) -> None:
        control.should_save = True


def test_the_embedded_trainer() -> None:
    """The training that the page describes."""
    model = torch.nn.Linear(4, 1)
    recorder = EventRecorder()
    Trainer(
        model,
        TrainingArguments(num_train_epochs=2, gradient_accumulation_steps=2, logging_steps=2, eval_epochs=1),
        train_dataloader=[torch.ones(2, 4)] * 4,
        eval_dataloader=[torch.ones(2, 4)],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss_fn=lambda module, batch: module(batch).square().mean(),
        callbacks=[SaveEpochs(), recorder],
    ).train()
    agree("embedded", recorder.told(), PAGE)


@pytest.mark.parametrize("host", HOSTS)
def test_the_page_knows_every_host(host: str) -> None:
    """An order and a column each, of known events."""
    told = documented(host, PAGE.read_text(encoding="utf-8"))
    assert told.order
    events = {name for line in told.order for name in line.split()}
    assert events == set(told.arguments)
    assert events <= {event.removeprefix("on_") for event in (*EVENTS, "on_push_begin")}


def test_a_page_that_says_something_else_is_found_and_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order and arguments; what it says of other hosts stays."""
    monkeypatch.delenv("UPDATE_EVENTS_PAGE", raising=False)
    recorder = EventRecorder()
    manager = CallbackManager([recorder])
    for event, arguments in (("on_train_begin", {}), ("on_epoch_begin", {}), ("on_log", {"logs": {"loss": 1.0}})):
        manager.call(event, args=None, state=None, control=None, **arguments)
    told = recorder.told()
    assert told == Told(("train_begin", "epoch_begin log"), {"train_begin": "·", "epoch_begin": "·", "log": "logs"})
    page = tmp_path / "events.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(AssertionError, match="the order of events is\ntrain_begin\nepoch_begin log"):
        agree("TRL", told, page)
    before = documented("embedded", page.read_text(encoding="utf-8"))
    monkeypatch.setenv("UPDATE_EVENTS_PAGE", "1")
    agree("TRL", told, page)
    monkeypatch.delenv("UPDATE_EVENTS_PAGE")
    agree("TRL", told, page)
    assert documented("embedded", page.read_text(encoding="utf-8")) == before
    other = Told(told.order, {**told.arguments, "log": "·"})
    with pytest.raises(AssertionError, match="TRL: events bring"):
        agree("TRL", other, page)
    assert documented("TRL", updated("TRL", other, page.read_text(encoding="utf-8"))) == other


def test_an_event_that_a_newer_host_adds_is_recorded() -> None:
    """Else the page would not tell of it."""
    recorder = EventRecorder()
    CallbackManager([recorder]).call("on_something_new", args=None, state=None, control=None, logs={})
    assert recorder.events == ["something_new"]
