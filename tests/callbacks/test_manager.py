"""The callback manager: arguments by name, order, isolation, timing, state."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ckptmgr.callbacks.base import EVENTS, Callback, Priority, TrainerControl, TrainerState
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.core.errors import ConfigError, IncompatibleStateError


class Seconds:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Recorder(Callback):
    """Notes its events in a list that several of them share."""

    def __init__(self, seen: list[str], label: str = "", priority: int = Priority.NORMAL) -> None:
        self.seen = seen
        self.label = label
        self.priority = priority

    def on_step_end(self, **kwargs: Any) -> None:
        self.seen.append(self.label)


class Raises(Callback):
    """Fails at every step."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_step_end(self, **kwargs: Any) -> None:
        raise self.error


def step_end(manager: CallbackManager, step: int = 7, **arguments: Any) -> TrainerControl:
    control = TrainerControl()
    state = TrainerState(global_step=step)
    same = manager.call("on_step_end", args=None, state=state, control=control, **arguments) is control
    assert same, "the caller gets back its own object"
    return control


def test_a_hook_takes_any_subset_of_the_arguments_by_name() -> None:
    """Order and completeness of a hook's parameters do not matter; what the host lacks is None."""
    got: dict[str, Any] = {}

    class Subset(Callback):
        def on_step_end(self, outputs: Any, state: TrainerState, metrics: Any) -> None:
            got.update(outputs=outputs, step=state.global_step, metrics=metrics)

    step_end(CallbackManager([Subset()]), outputs={"loss": 1.0}, batch="unused")
    assert got == {"outputs": {"loss": 1.0}, "step": 7, "metrics": None}


def test_a_hook_with_kwargs_gets_everything() -> None:
    """`**kwargs` receives what the hook does not name."""
    got: dict[str, Any] = {}

    class All(Callback):
        def on_step_end(self, state: TrainerState, **kwargs: Any) -> None:
            got.update(kwargs)

    step_end(CallbackManager([All()]), outputs=1, batch=2)
    assert got.keys() == {"args", "control", "outputs", "batch"}


def test_a_hook_with_positional_only_parameters_is_called() -> None:
    """A third-party hook may forbid keywords for its first parameters."""
    got: list[Any] = []

    class Foreign:
        def on_step_end(self, args: Any, state: Any, control: Any, /, **kwargs: Any) -> None:
            got.extend([args, state.global_step, sorted(kwargs)])

    step_end(CallbackManager([Foreign()]), outputs=1)
    assert got == [None, 7, ["outputs"]]


def test_a_misspelt_required_parameter_is_a_failure_of_that_callback() -> None:
    """Only arguments that some host has are filled with None."""

    class Typo(Callback):
        def on_step_end(self, stat: Any) -> None:
            raise AssertionError("cannot be reached")

    manager = CallbackManager([Typo()])
    step_end(manager)
    assert manager.failures == {"Typo": 1}


def test_processing_class_and_tokenizer_stand_for_each_other() -> None:
    """A hook may use the old or the new name."""
    got: list[Any] = []

    class Old(Callback):
        def on_step_end(self, tokenizer: Any) -> None:
            got.append(tokenizer)

    class New(Callback):
        def on_step_end(self, processing_class: Any) -> None:
            got.append(processing_class)

    manager = CallbackManager([Old(), New()])
    step_end(manager, processing_class="p")
    step_end(manager, tokenizer="t")
    assert got == ["p", "p", "t", "t"]


def test_priority_orders_and_ties_keep_the_order_of_adding() -> None:
    """Saving runs before stopping, logging last."""
    seen: list[str] = []
    manager = CallbackManager()
    for label, priority in [
        ("log", Priority.LOG),
        ("a", 50),
        ("stop", Priority.STOP),
        ("b", 50),
        ("save", Priority.SAVE),
    ]:
        manager.add(Recorder(seen, label, priority))
    step_end(manager)
    assert seen == ["save", "a", "b", "stop", "log"]


def test_a_failing_callback_does_not_reach_the_others_or_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    """The failure is logged with callback, event and step, and counted."""
    seen: list[str] = []
    manager = CallbackManager([Raises(ZeroDivisionError("boom")), Recorder(seen, "after")])
    step_end(manager, step=41)
    assert seen == ["after"]
    assert manager.failures == {"Raises": 1}
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "Raises failed in on_step_end at step 41" in record.getMessage()
    assert "boom" in caplog.text


def test_repeated_failures_are_counted_but_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A hook that fails a thousand times is logged a dozen times."""
    manager = CallbackManager([Raises(ValueError("again"))], most_failures=None)
    for _ in range(1000):
        step_end(manager)
    assert manager.failures == {"Raises": 1000}
    # On a busy machine a call may also be reported as slow.
    failures = [record for record in caplog.records if "failed in" in record.getMessage()]
    assert len(failures) == 3 + 8  # 1, 2, 3, then 4, 8, …, 512


def test_an_error_of_ours_is_one_line_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    """No traceback: the message is complete."""
    step_end(CallbackManager([Raises(ConfigError("the url is wrong", hint="use s3://bucket/run"))]))
    (record,) = caplog.records
    assert record.getMessage().endswith("the url is wrong - use s3://bucket/run")
    assert record.exc_info is None


def test_a_critical_callback_raises(caplog: pytest.LogCaptureFixture) -> None:
    """What a critical callback raises ends the training, and is counted; who ends it shows it."""
    callback = Raises(RuntimeError("stop here"))
    callback.critical = True
    manager = CallbackManager([callback])
    with pytest.raises(RuntimeError, match="stop here"):
        step_end(manager)
    assert manager.failures == {"Raises": 1}
    assert caplog.records == []


def test_a_callback_may_be_critical_for_one_event_only() -> None:
    """A set of events limits what is critical."""
    callback = Raises(RuntimeError("stop here"))
    callback.critical = frozenset({"on_train_begin"})
    manager = CallbackManager([callback])
    step_end(manager)
    assert manager.failures == {"Raises": 1}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_interruptions_pass(error: BaseException) -> None:
    """Ctrl-C and sys.exit are not failures of a callback."""
    with pytest.raises(type(error)):
        step_end(CallbackManager([Raises(error)]))


@pytest.mark.parametrize("critical", [True, ["on_step_end"]], ids=str)
def test_who_adds_a_callback_may_make_it_critical_or_not(critical: bool | list[str]) -> None:
    """In place of what its class says."""
    manager = CallbackManager()
    manager.add(Raises(RuntimeError("stop here")), critical=critical)
    with pytest.raises(RuntimeError, match="stop here"):
        step_end(manager)
    lenient = Raises(RuntimeError("go on"))
    lenient.critical = True
    manager = CallbackManager()
    manager.add(lenient, critical=False)
    step_end(manager)
    assert manager.failures == {"Raises": 1}
    with pytest.raises(ConfigError, match="critical for 'on_stepend', which is no event") as caught:
        manager.add(Recorder([]), critical=["on_stepend"])
    assert caught.value.argument == "critical"


def test_a_critical_callback_inside_a_nested_manager_raises() -> None:
    """A manager inside a manager is no shield for critical callbacks."""
    callback = Raises(RuntimeError("stop here"))
    callback.critical = True
    with pytest.raises(RuntimeError, match="stop here"):
        step_end(CallbackManager([CallbackManager([callback])]))


def test_removed_from_inside_a_hook_is_not_called_any_more() -> None:
    """Removing takes effect within the running event."""
    seen: list[str] = []
    victim = Recorder(seen, "victim")
    manager = CallbackManager()

    class Remover(Callback):
        def on_step_end(self, **kwargs: Any) -> None:
            manager.remove(victim)

    manager.add(Remover())
    manager.add(victim)
    step_end(manager)
    assert seen == []
    assert victim not in manager.callbacks


def test_added_from_inside_a_hook_takes_part_from_the_next_event() -> None:
    """Adding does not extend the running event, and a callback may remove itself."""
    seen: list[str] = []
    manager = CallbackManager()

    class Once(Callback):
        def on_step_end(self, **kwargs: Any) -> None:
            manager.add(Recorder(seen, "new"))
            manager.remove(self)

    manager.add(Once())
    step_end(manager)
    assert seen == []
    step_end(manager)
    assert seen == ["new"]


def test_remove_by_class_and_what_is_not_there() -> None:
    """A class stands for its instances; an unknown one is an error that names those present."""
    manager = CallbackManager([Recorder([]), Recorder([])])
    manager.remove(Recorder)
    assert manager.callbacks == ()
    with pytest.raises(ConfigError, match="no callback Recorder to remove - present: none"):
        manager.remove(Recorder)


def test_remove_reaches_into_nested_managers() -> None:
    """As `from_config` makes one for a trainer, which has a manager of its own."""
    seen: list[str] = []
    manager = CallbackManager(
        [Recorder(seen, "outer"), CallbackManager([Recorder(seen, "inner"), Raises(ValueError())])]
    )
    manager.remove(Recorder)
    step_end(manager)
    assert seen == []
    assert manager.failures == {"Raises": 1}
    with pytest.raises(ConfigError, match="no callback Recorder to remove - present: Raises"):
        manager.remove(Recorder)


def test_a_coroutine_is_no_hook() -> None:
    """It would never run, and only Python would say so."""

    class Posts(Callback):
        async def on_step_end(self, **kwargs: Any) -> None:
            raise AssertionError

    with pytest.raises(ConfigError, match="on_step_end is `async def`, and nobody would await it"):
        CallbackManager([Posts()])


def test_add_refuses_what_is_no_callback_and_what_is_in_already() -> None:
    """Both are mistakes that would stay unnoticed."""
    recorder = Recorder([])
    manager = CallbackManager([recorder])
    with pytest.raises(ConfigError, match="added already"):
        manager.add(recorder)
    with pytest.raises(ConfigError, match="no on_… method"):
        manager.add(object())


def test_a_slow_callback_is_warned_about_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Time is kept per callback and event."""
    clock = Seconds()

    class Slow(Callback):
        def on_step_end(self, **kwargs: Any) -> None:
            clock.now += 0.25

    manager = CallbackManager([Slow()], clock=clock)
    for _ in range(3):
        step_end(manager)
    assert len(caplog.records) == 1
    assert "Slow took 0.25 s in on_step_end" in caplog.text
    clock.now += 60
    step_end(manager)
    assert len(caplog.records) == 2
    timing = manager.timings["Slow"]["on_step_end"]
    assert (timing.calls, timing.total_s, timing.max_s) == (4, 1.0, 0.25)


def test_a_quick_callback_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """0.1 s is the limit, not beyond it."""
    clock = Seconds()

    class Quick(Callback):
        def on_step_end(self, **kwargs: Any) -> None:
            clock.now += 0.1

    step_end(CallbackManager([Quick()], clock=clock))
    assert caplog.records == []


class Counting(Callback):
    """Counts steps, in its state."""

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, **kwargs: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def test_states_go_by_name_and_occurrence() -> None:
    """Two callbacks of one class get back each its own state, after a trip through JSON."""
    first, second = Counting(), Counting()
    manager = CallbackManager([first, Recorder([]), second])
    step_end(manager)
    manager.remove(first)
    step_end(manager)
    manager = CallbackManager([first, second])
    saved = json.loads(json.dumps(manager.state_dict()))
    assert saved == {"Counting": {"count": 1}, "Counting#2": {"count": 2}}
    fresh = CallbackManager([Counting(), Counting()])
    fresh.load_state_dict(saved)
    assert [callback.count for callback in fresh.callbacks] == [1, 2]


def test_states_without_a_counterpart_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """A callback that is gone, and one that is new, are both said."""
    manager = CallbackManager([Counting()])
    manager.load_state_dict({"Gone": {"x": 1}})
    assert "callback Gone that is not in this training" in caplog.text
    assert "no state of callback Counting" in caplog.text


def test_a_callback_whose_state_cannot_be_had_does_not_cost_the_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    """It is left out and counted."""

    class Broken(Counting):
        def state_dict(self) -> dict[str, Any]:
            raise ValueError("no state")

    manager = CallbackManager([Broken(), Counting()])
    saved = manager.state_dict()
    assert saved == {"Counting": {"count": 0}}
    assert manager.failures == {"Broken": 1}
    assert "callback Broken failed in state_dict (failure 1), training goes on" in caplog.text
    # Nor does it cost the resume.
    manager.load_state_dict(saved)


def test_a_refused_state_is_an_error_that_names_the_callback() -> None:
    """A resumed run must not go on with half a state."""
    with pytest.raises(IncompatibleStateError, match="Counting refused") as caught:
        CallbackManager([Counting()]).load_state_dict({"Counting": {"total": 1}})
    assert caught.value.piece == "Counting"  # type: ignore[attr-defined]


def test_the_manager_is_one_hugging_face_callback() -> None:
    """Hosts call hooks by position and keyword, events they added later included, and get the control back."""
    got: list[Any] = []

    class Both(Callback):
        def on_log(self, state: TrainerState, logs: Any) -> None:
            got.append((state.global_step, logs))

        def on_push_begin(self, args: Any, **kwargs: Any) -> None:
            got.append((args, sorted(kwargs)))

    manager = CallbackManager([Both()])
    control = TrainerControl()
    assert manager.on_log("args", TrainerState(global_step=3), control, logs={"loss": 1.0}, model=None) is control
    assert manager.on_push_begin("args", TrainerState(), control, model=None) is control
    assert got == [(3, {"loss": 1.0}), ("args", ["control", "model", "state"])]


def test_every_event_can_be_called_on_a_plain_callback_and_on_the_manager() -> None:
    """All are no-ops by default, as is one that does not exist yet."""
    for event in (*EVENTS, "on_evaluate_end", "on_something_new"):
        assert getattr(Callback(), event)(None, TrainerState(), TrainerControl(), model=None) is None
        control = TrainerControl()
        assert getattr(CallbackManager([Callback()]), event)(args=None, state=None, control=control) is control


def test_no_op_hooks_are_not_called() -> None:
    """What a callback does not override costs nothing and has no time."""
    manager = CallbackManager([Recorder([])])
    for event in EVENTS:
        manager.call(event, control=None)
    assert list(manager.timings["Recorder"]) == ["on_step_end"]


def test_on_evaluate_end_is_on_evaluate() -> None:
    """Either name is called, once, for the one event."""
    seen: list[str] = []

    class End(Callback):
        def on_evaluate_end(self, metrics: Any) -> None:
            seen.append(f"end {metrics}")

    class Plain(Callback):
        def on_evaluate(self, metrics: Any) -> None:
            seen.append(f"plain {metrics}")

    manager = CallbackManager([End(), Plain()])
    manager.call("on_evaluate", control=None, metrics=1)
    manager.call("on_evaluate_end", control=None, metrics=2)
    End().on_evaluate(metrics=3)
    assert seen == ["end 1", "plain 1", "end 2", "plain 2", "end 3"]


def test_a_returned_control_replaces_the_flags() -> None:
    """Hugging Face's hooks return a control of their own."""

    class Returns:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
            return TrainerControl(should_save=True)

    control = step_end(CallbackManager([Returns()]))
    assert control.should_save
    assert not control.should_log


# --- a callback that does nothing but fail ------------------------------------------------------------------------------------


class Sick(Callback):
    """Fails at the steps it is told to, and notes every event."""

    def __init__(self, fails: Callable[[int], bool]) -> None:
        self.fails = fails
        self.seen: list[str] = []

    def on_step_end(self, state: TrainerState, **kwargs: Any) -> None:
        self.seen.append(f"step {state.global_step}")
        if self.fails(state.global_step):
            raise ValueError("sick")

    def on_log(self, **kwargs: Any) -> None:
        self.seen.append("log")

    def on_train_end(self, **kwargs: Any) -> None:
        self.seen.append("end")


def test_one_that_fails_too_often_in_a_row_is_disabled_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """No other event reaches it, but the end: it may hold something."""
    sick = Sick(lambda step: True)
    manager = CallbackManager([sick], most_failures=3)
    for step in range(1, 6):
        step_end(manager, step=step)
        manager.call("on_log", control=None, logs={})
    manager.call("on_train_end", control=None)
    assert sick.seen == ["step 1", "log", "step 2", "log", "step 3", "end"]
    assert (manager.disabled, manager.failures) == (("Sick",), {"Sick": 3})
    said = [record.getMessage() for record in caplog.records if "disabled" in record.getMessage()]
    assert said == [
        "callback Sick is disabled from step 3 on: on_step_end failed 3 times in a row, the last time with ValueError('sick')"
    ]


def test_failures_with_a_success_between_them_are_no_row() -> None:
    """Two of three fail, for ever."""
    sick = Sick(lambda step: step % 3 != 0)
    manager = CallbackManager([sick], most_failures=3)
    for step in range(1, 31):
        step_end(manager, step=step)
    assert (manager.disabled, manager.failures, len(sick.seen)) == ((), {"Sick": 20}, 30)


def test_a_state_that_can_be_had_again_ends_a_row() -> None:
    """As a hook that comes back: the callback is not disabled for failures far apart."""

    class Now(Counting):
        fails = True

        def state_dict(self) -> dict[str, Any]:
            if self.fails:
                raise ValueError("not now")
            return {}

    callback = Now()
    manager = CallbackManager([callback], most_failures=2)
    for fails in (True, False, True):
        callback.fails = fails
        manager.state_dict()
    assert (manager.failures, manager.disabled) == ({"Now": 2}, ())


def test_a_critical_one_is_not_disabled() -> None:
    """It raises each time; whoever calls decides."""
    callback = Raises(RuntimeError("stop here"))
    callback.critical = True
    manager = CallbackManager([callback], most_failures=2)
    for _ in range(4):
        with pytest.raises(RuntimeError, match="stop here"):
            step_end(manager)
    assert manager.failures == {"Raises": 4}


# --- names, priorities ----------------------------------------------------------------------------------------------------


def test_a_name_and_a_priority_may_be_given_when_adding() -> None:
    """They stand in place of the callback's own."""
    seen: list[str] = []
    manager = CallbackManager([Recorder(seen, "first")])
    manager.add(Recorder(seen, "early"), name="early", priority=Priority.FIRST)
    step_end(manager)
    assert seen == ["early", "first"]
    assert list(manager.timings) == ["early", "Recorder"]


# --- the state is the trainer's ---------------------------------------------------------------------------------------------


class Meddles(Callback):
    """Changes the state."""

    def on_step_end(self, state: TrainerState, **kwargs: Any) -> None:
        state.best_metric = 1.0
        state.log_history.append({"mine": 1})


def test_a_change_of_the_state_is_reported_in_debug_mode_once(caplog: pytest.LogCaptureFixture) -> None:
    """With the callback, the attribute, the event and both values."""
    manager = CallbackManager([Recorder([]), Meddles()], debug=True)
    step_end(manager)
    step_end(manager)
    best, history = [record.getMessage() for record in caplog.records]
    assert best.startswith("callback Meddles changed state.best_metric in on_step_end at step 7, from None to 1.0")
    assert history.startswith(
        "callback Meddles changed state.log_history in on_step_end at step 7, from [] to [{'mine'"
    )


def test_a_declared_change_and_one_without_debug_mode_are_not_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment asks for debug mode, too."""
    step_end(CallbackManager([Meddles()]))
    meddles = Meddles()
    meddles.changes_state = frozenset({"best_metric", "log_history"})  # type: ignore[attr-defined]
    step_end(CallbackManager([meddles], debug=True))
    assert caplog.records == []
    monkeypatch.setenv("CKPTMGR_DEBUG_CALLBACKS", "1")
    step_end(CallbackManager([Meddles()]))
    assert len(caplog.records) == 2


# --- what it cost -----------------------------------------------------------------------------------------------------------


def test_the_times_are_told_at_the_end_of_training(caplog: pytest.LogCaptureFixture) -> None:
    """A table, the most expensive callback first, once for nested managers too, and on the main process only."""
    clock = Seconds()

    class Slow(Callback):
        def on_step_end(self, **kwargs: Any) -> None:
            clock.now += 0.05

    class Slower(Callback):
        def on_log(self, **kwargs: Any) -> None:
            clock.now += 0.5
            raise ValueError("sick")

    caplog.set_level(logging.INFO)
    for main in (False, True):
        manager = CallbackManager([Slow(), CallbackManager([Slower()], clock=clock)], slow_s=9.0, clock=clock)
        state = TrainerState(is_world_process_zero=main)
        manager.call("on_train_begin", state=state, control=TrainerControl())
        for _ in range(2):
            step_end(manager)
            manager.call("on_log", state=state, control=None, logs={})
        clock.now += 0.9
        manager.call("on_train_end", state=state, control=TrainerControl())
    (table,) = [record.getMessage() for record in caplog.records if "time of callbacks" in record.getMessage()]
    lines = [line.split() for line in table.splitlines()[1:]]
    assert [line[0] for line in lines] == ["callback", "Slower", "Slow"]
    assert lines[1][1:4] == ["2", "1.0", "s"]
    assert "50.0 %" in table


def test_a_callback_is_told_who_dispatches_to_it_and_what_all_hooks_took() -> None:
    """A second of each call, by a clock that only the hooks move; the running one is not in it yet."""
    now = [0.0]
    seen: list[float] = []

    class Looks(Callback):
        dispatcher: Any = None

        def joined(self, dispatcher: Any) -> None:
            self.dispatcher = dispatcher

        def on_step_end(self, **kwargs: Any) -> None:
            seen.append(self.dispatcher.spent_s)
            now[0] += 1.0

    looks = Looks()
    inner = CallbackManager([Looks()], clock=lambda: now[0])
    manager = CallbackManager([looks, inner], clock=lambda: now[0])
    assert looks.dispatcher is manager
    for _ in range(2):
        manager.call("on_step_end", args=None, state=None, control=None)
    assert manager.spent_s == 4.0
    assert inner.spent_s == 2.0
    assert seen == [0.0, 0.0, 2.0, 1.0]


# --- hosts that call by position, and mistakes that would stay unnoticed ------------------------------------------------------


def test_a_host_that_calls_by_position_reaches_any_hook() -> None:
    """As transformers does, without a manager: hooks that name what they need, in any order."""
    got: list[Any] = []

    class Some(Callback):
        def on_log(self, state: TrainerState, control: TrainerControl, logs: Any, **kwargs: Any) -> None:
            got.append((state.global_step, control.should_save, logs, sorted(kwargs)))

        def on_step_end(self, model: Any) -> None:
            got.append(model)

        def on_train_begin(self, **kwargs: Any) -> None:
            got.append(sorted(kwargs))

    class More(Some):
        def on_step_end(self, model: Any) -> None:
            super().on_step_end(model=f"more {model}")

    some: Any = More()
    state, control = TrainerState(global_step=3), TrainerControl()
    some.on_log("args", state, control, logs={"loss": 1.0}, model="m")
    some.on_step_end("args", state, control, model="m", optimizer="o")
    some.on_train_begin("args", state, control, model="m")
    expected = [(3, False, {"loss": 1.0}, ["args", "model"]), "more m", ["args", "control", "model", "state"]]
    assert got == expected
    got.clear()
    manager = CallbackManager([some])
    manager.on_log("args", state, control, logs={"loss": 1.0}, model="m")
    manager.on_step_end("args", state, control, model="m", optimizer="o")
    manager.on_train_begin("args", state, control, model="m")
    assert got == expected


def test_an_event_that_is_none_is_refused_or_named(caplog: pytest.LogCaptureFixture) -> None:
    """A critical callback that never raises, and a hook that nobody calls."""

    class Misspelt(Callback):
        def on_step_ended(self, **kwargs: Any) -> None:
            pass

    CallbackManager([Misspelt()])
    assert "callback Misspelt has a hook on_step_ended, which no host calls: did you mean on_step_end?" in caplog.text
    recorder = Recorder([])
    recorder.critical = frozenset({"on_step_endd"})
    with pytest.raises(
        ConfigError, match=r"Recorder is critical for 'on_step_endd', which is no event - did you mean on_step_end\?"
    ):
        CallbackManager([recorder])


def test_a_priority_by_name() -> None:
    """As in a file."""
    seen: list[str] = []
    manager = CallbackManager([Recorder(seen, "first")])
    manager.add(Recorder(seen, "early"), priority="FIRST")
    step_end(manager)
    assert seen == ["early", "first"]
    with pytest.raises(ConfigError, match="there is no priority 'EARLY' - use a number, or one of FIRST, SAVE"):
        manager.add(Recorder(seen), priority="EARLY")


def test_a_slow_callback_of_a_nested_manager_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """By its own name."""
    clock = Seconds()

    class Slow(Callback):
        def on_step_end(self, **kwargs: Any) -> None:
            clock.now += 0.25

    step_end(CallbackManager([CallbackManager([Slow()], clock=clock)], clock=clock))
    assert [record.getMessage().split(" took")[0] for record in caplog.records] == ["callback Slow"]


@pytest.mark.parametrize("options", [{"slow_s": -1}, {"slow_s": "1"}, {"most_failures": 0}, {"most_failures": True}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    """With the name and what is allowed."""
    with pytest.raises(ConfigError, match=f"CallbackManager: {next(iter(options))} is "):
        CallbackManager(**options)


def test_a_second_training_from_scratch_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    """With the same manager, or in another one; one that goes on, or is resumed, keeps what it knows. Times are those of one training."""
    caplog.set_level(logging.INFO)
    first, second = Counting(), Counting()
    manager = CallbackManager([first, CallbackManager([second])])

    def train(manager: CallbackManager, at: int, steps: int) -> list[int]:
        state, control = TrainerState(global_step=at), TrainerControl()
        manager.call("on_train_begin", args=None, state=state, control=control)
        for state.global_step in range(at + 1, at + steps + 1):
            manager.call("on_step_end", args=None, state=state, control=control)
        manager.call("on_train_end", args=None, state=state, control=control)
        return [first.count, second.count]

    assert train(manager, 0, 3) == [3, 3]
    assert train(manager, 0, 2) == [2, 2]
    assert train(manager, 2, 1) == [3, 3]
    assert train(CallbackManager([first, second]), 0, 1) == [1, 1]
    resumed = CallbackManager([first, second])
    resumed.load_state_dict({"Counting": {"count": 10}, "Counting#2": {"count": 20}})
    assert train(resumed, 0, 1) == [11, 21]
    assert [timing["on_step_end"].calls for timing in manager.timings.values()] == [1, 1]
