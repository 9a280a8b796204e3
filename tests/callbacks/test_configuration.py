"""`CallbackManager.from_config`: what a file says is what is built, and every mistake is one line with its place."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptmgr.callbacks import builtin
from ckptmgr.callbacks.base import Callback, Priority, TrainerControl, TrainerState
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.errors import ConfigError, ConfigFileError
from ckptmgr.core.policies import AnyOf, Best, EveryMinutes, EveryNEpochs, EveryNSteps, Worst
from ckptmgr.core.retention import AnyRule, KeepBest, KeepEveryNSteps, KeepLast, KeepWithin, KeepWorst
from ckptmgr.training import config as training_config


class Mine(Callback):
    """A user's own, in ten lines."""

    def __init__(self, limit: int, *, label: Any = "mine") -> None:
        if limit < 0:
            raise ConfigError(f"limit={limit} is negative", hint="give 0 or more")
        self.limit = limit
        self.label = label

    def on_step_end(self, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.limit


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's that can be imported, with `Mine` in it."""
    monkeypatch.setitem(sys.modules, "my_callbacks", SimpleNamespace(Mine=Mine, number=3))
    return "my_callbacks"


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


WHOLE = """\
store: STORE
run: llama
local_dir: LOCAL
strict: true
save:
  every_n_steps: 500
  every_n_epochs: 1
  every_minutes: 30
  best: eval_loss:min:2
  worst: {metric: accuracy, mode: max}
keep:
  last: 3
  every_n_steps: 1000
  best: [eval_loss, {metric: accuracy, mode: max, k: 2}]
  worst: eval_loss:min:1
  within: 2w
keep_local: {last: 2}
upload: {transfer: thread, max_bytes: 50GB, when_full: skip, linger_s: 0, failures: 3, on_failures: stop}
callbacks:
  - type: my_callbacks:Mine
    params: {limit: 7}
    name: the limit
    priority: LOG
  - {type: SaveModelCallback, params: {save_at_end: false}}
"""


@pytest.fixture
def whole(tmp_path: Path) -> str:
    return WHOLE.replace("STORE", str(tmp_path / "store")).replace("LOCAL", str(tmp_path / "local"))


@pytest.mark.usefixtures("module")
def test_a_whole_file(tmp_path: Path, whole: str) -> None:
    """Each key reaches what it is about."""
    callbacks = CallbackManager.from_config(written(tmp_path / "ckptmgr.yaml", whole))
    saver, mine = callbacks.callbacks
    assert isinstance(saver, SaveModelCallback)
    assert list(callbacks.timings) == ["SaveModelCallback", "the limit"]
    assert (mine.limit, mine.label) == (7, "mine")
    assert saver.save_at_end is False
    manager: Any = callbacks.manager
    same = saver.manager is manager
    assert same
    assert manager.url == f"file://{tmp_path}/store/llama"
    assert manager.local_dir == tmp_path / "local"
    assert manager.strict is True
    assert manager.save_policy == AnyOf(
        (
            EveryNSteps(500),
            EveryNEpochs(1),
            EveryMinutes(30),
            Best("eval_loss", mode="min", k=2),
            Worst("accuracy", mode="max"),
        )
    )
    settings = manager._settings
    assert settings.retention.store == AnyRule(
        rules=(
            KeepLast(3),
            KeepEveryNSteps(1000),
            KeepBest("eval_loss", None, 1),
            KeepBest("accuracy", "max", 2),
            KeepWorst("eval_loss", "min", 1),
            KeepWithin(14 * 86400.0),
        )
    )
    assert settings.retention.local == KeepLast(2)
    assert (settings.in_process, settings.linger_s) == (True, 0)
    assert (settings.queue.max_bytes, settings.queue.when_full) == (50_000_000_000, "skip")
    assert (settings.failures.failures, settings.failures.action) == (3, "stop")
    control = TrainerControl()
    callbacks.call("on_step_end", state=TrainerState(global_step=7), control=control, args=None)
    assert control.should_training_stop


@pytest.mark.usefixtures("module")
def test_json_and_a_mapping_say_the_same(tmp_path: Path) -> None:
    """The three forms of one configuration."""
    plain = {"callbacks": [{"type": "my_callbacks:Mine", "params": {"limit": 7}, "priority": 3}]}
    as_json = written(tmp_path / "ckptmgr.json", json.dumps(plain, indent=2))
    as_yaml = written(
        tmp_path / "ckptmgr.yaml", "callbacks: [{type: 'my_callbacks:Mine', params: {limit: 7}, priority: 3}]"
    )
    for source in (plain, as_json, as_yaml, str(as_yaml)):
        (mine,) = CallbackManager.from_config(source).callbacks
        assert mine.limit == 7


def test_a_run_without_a_saving_callback_gets_one(tmp_path: Path) -> None:
    """Else nothing would be saved, in silence."""
    source = {"run": str(tmp_path / "run"), "save": {"every_n_steps": 5}}
    (saver,) = CallbackManager.from_config(source).callbacks
    assert isinstance(saver, SaveModelCallback)
    assert saver.policy == EveryNSteps(5)


def test_the_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is pointed elsewhere without a change of the file."""
    source = {"store": "s3://nowhere/exp", "run": "a", "local_dir": "/nowhere", "upload": {"transfer": "process"}}
    monkeypatch.setenv("CKPTMGR_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("CKPTMGR_RUN", "b")
    monkeypatch.setenv("CKPTMGR_LOCAL_DIR", str(tmp_path / "local"))
    monkeypatch.setenv("CKPTMGR_TRANSFER", "thread")
    manager: Any = CallbackManager.from_config(source).manager
    assert (manager.url, manager.local_dir) == (f"file://{tmp_path}/store/b", tmp_path / "local")
    assert manager._settings.in_process is True


def test_a_manager_of_ones_own_is_handed_over() -> None:
    """For a manager that is made in Python."""
    mine = SimpleNamespace(save_policy=None, preemption=None, strict=False)
    (saver,) = CallbackManager.from_config({"callbacks": ["SaveModelCallback"]}, manager=mine).callbacks
    assert saver.manager is mine


# --- mistakes -----------------------------------------------------------------------------------------------------------------

CHANGES = [
    ("every_n_steps: 500", "every_n_stps: 500", 6, "save.every_n_stps: this key is not known - did you mean every_n_steps?"),
    ("every_n_steps: 500", "every_n_steps: often", 6, "save.every_n_steps: 'often' does not fit - give a whole number or null"),
    ("every_n_steps: 500", "every_n_steps: 0", 6, "save.every_n_steps: EveryNSteps: n is 0 - n must be a whole number"),
    ("eval_loss:min:2", "accuracy", 9, "save.best: cannot tell whether less or more of 'accuracy' is better"),
    ("mode: max}\n", "mode: up}\n", 10, "save.worst.mode: 'up' does not fit - give one of min, max or null"),
    ("last: 3", "last: 0", 12, "keep.last: KeepLast(0) would keep nothing"),
    ("within: 2w", "within: a while", 16, "keep.within: 'a while' is no length of time - write 12h, 7d or 2w"),
    ("max_bytes: 50GB", "max_bytes: lots", 18, "upload.max_bytes: 'lots' is no size"),
    ("when_full: skip", "when_full: cry", 18, "upload.when_full: 'cry' does not fit - give one of keep-newest, skip, wait or null"),
    ("linger_s: 0", "linger_s: -1", 18, "upload.linger_s: linger_s is -1 - give a number of seconds, 0 or more"),
    ("strict: true", "strict: true\nstrict: false", 5, "strict: this key stands here for the second time"),
    ("keep_local", "keep_locl", 17, "keep_locl: this key is not known - did you mean keep_local?"),
    ("run: llama\n", "", 1, "store: a store without a run"),
    ("store: STORE\n", "", 1, "run: 'llama' is a name, and there is no store"),
    ("run: llama", "run: [llama", 3, "this is no YAML"),
    ("strict: true", "1: llama", 4, "the key 1 is no text"),
    ("my_callbacks:Mine", "my_callbacks:Mime", 20, "callbacks[0].type: my_callbacks has no 'Mime' - did you mean Mine?"),
    ("my_callbacks:Mine", "my_callbacks:number", 20, "callbacks[0].type: my_callbacks:number is no class"),
    ("my_callbacks:Mine", "nowhere:Mine", 20, "'nowhere' of the callback 'nowhere:Mine' cannot be imported"),
    ("my_callbacks:Mine", "EarlyStopingCallback", 20, "there is no callback 'EarlyStopingCallback' - did you mean EarlyStoppingCallback?"),
    ("limit: 7", "limits: 7", 21, "callbacks[0].params.limits: my_callbacks:Mine has no parameter 'limits' - did you mean limit?"),
    ("limit: 7", "limit: -7", 21, "callbacks[0].params: limit=-7 is negative - give 0 or more"),
    ("limit: 7", "limit: x", 21, "callbacks[0].params.limit: 'x' does not fit - give a whole number"),
    ("limit: 7", "label: x", 20, "callbacks[0]: my_callbacks:Mine needs limit"),
    ("priority: LOG", "priority: HIGH", 23, "callbacks[0].priority: 'HIGH' does not fit - give a whole number or one of FIRST, SAVE, NORMAL"),
    ("type: my_callbacks:Mine", "tpe: my_callbacks:Mine", 20, "callbacks[0].tpe: this key is not known - did you mean type?"),
]  # fmt: skip


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("old", "new", "line", "said"), CHANGES, ids=[new.strip() or old.strip() for old, new, *_ in CHANGES]
)
def test_a_mistake_is_one_line_with_its_place(
    tmp_path: Path, whole: str, old: str, new: str, line: int, said: str
) -> None:
    """The file, the line, the key, what is wrong, and what is allowed."""
    old = old.replace("STORE", str(tmp_path / "store"))
    assert old in whole
    path = written(tmp_path / "ckptmgr.yaml", whole.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        CallbackManager.from_config(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}:{line}: ")
    assert said in message


def said_of(source: Any) -> list[str]:
    """All mistakes of a configuration, a line for each."""
    with pytest.raises(ConfigFileError) as caught:
        CallbackManager.from_config(source)
    return list(caught.value.lines)


@pytest.mark.usefixtures("module")
def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    """One round, not one for each; what follows from another mistake is no mistake of its own."""
    text = """\
store: [s3://bucket]
run: llama
save: {every_n_steps: 0, every_minutes: -1, best: [accuracy, {metric: f1, mode: top}]}
keep: {last: 0, within: soon}
upload: {max_bytes: lots, max_block_s: -1, failures: 0, linger_s: -1}
refuse_drift: [3]
stict: true
callbacks:
  - EarlyStopping
  - {type: LossMonitorCallback, params: {log_interval: 0, window: '5', on_spike: [halt], explosion_factor: 1}}
  - {type: my_callbacks:Mine, params: {limits: 1, labell: 2}}
  - {typ: my_callbacks:Mine, priority: HIGH}
  - {type: my_callbacks:Mine, params: {limit: 1.5}}
  - {type: my_callbacks:Mine, params: {limit: 1}, run_async: true, critical: true}
  - {type: my_callbacks:Mine, params: {limit: 1}, critical: [on_step_ended], enabled: 1}
  - SaveModelCallback
"""
    lines = said_of(written(tmp_path / "f.yaml", text))
    assert [line.removeprefix(f"{tmp_path}/f.yaml:").split(" - ")[0] for line in lines] == [
        "1: store: a list does not fit",
        "3: save.best[1].mode: 'top' does not fit",
        "3: save.every_n_steps: EveryNSteps: n is 0",
        "3: save.every_minutes: EveryMinutes: n is -1",
        "3: save.best[0]: cannot tell whether less or more of 'accuracy' is better",
        "4: keep.last: KeepLast(0) would keep nothing",
        "4: keep.within: 'soon' is no length of time",
        "5: upload.max_bytes: 'lots' is no size",
        "5: upload.max_block_s: max_block_s=-1 makes no sense",
        "5: upload.failures: failures=0 would be used up at once",
        "5: upload.linger_s: linger_s is -1",
        "6: refuse_drift[0]: 3 does not fit",
        "7: stict: this key is not known",
        "9: callbacks[0].type: there is no callback 'EarlyStopping'",
        "10: callbacks[1].params.window: '5' does not fit",
        "10: callbacks[1].params.on_spike[0]: 'halt' does not fit",
        "10: callbacks[1].params.log_interval: LossMonitorCallback: log_interval is 0",
        "10: callbacks[1].params.explosion_factor: LossMonitorCallback: explosion_factor is 1",
        "11: callbacks[2].params.labell: my_callbacks:Mine has no parameter 'labell'",
        "11: callbacks[2].params.limits: my_callbacks:Mine has no parameter 'limits'",
        "12: callbacks[3].typ: this key is not known",
        "12: callbacks[3].priority: 'HIGH' does not fit",
        "13: callbacks[4].params.limit: 1.5 does not fit",
        "14: callbacks[5].run_async: the callback Mine is critical, and cannot run beside the training",
        "15: callbacks[6].enabled: 1 does not fit",
        "15: callbacks[6].critical: Mine is critical for 'on_step_ended', which is no event",
    ]


ANNOTATED = """\
from __future__ import annotations
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
if TYPE_CHECKING:
    import torch

@dataclass
class Watch:
    limit: int
    names: Sequence[str]
    rate: float = 0.5
    mode: Literal["a", "b"] = "a"
    more: Mapping[str, float] | None = None
    on: bool = True
    device: torch.device | None = None

    def on_step_end(self, **kwargs):
        pass

class Derived(Watch):
    pass

def make(limit: int, **more):
    if limit == 13:
        return {}["thirteen"]
    return Watch(limit, [], **more)
"""


@pytest.fixture
def annotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's, with classes whose parameters have annotations, as text."""
    written(tmp_path / "annotated_callbacks.py", ANNOTATED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "annotated_callbacks", raising=False)
    return "annotated_callbacks"


@pytest.mark.parametrize("kind", ["Watch", "Derived"])
def test_parameters_of_ones_own_are_checked_by_their_annotations(annotated: str, kind: str) -> None:
    """Also those of a base class; what only a type checker can read is not looked at."""
    good = {"limit": 3, "names": ["a"], "rate": 1, "mode": "b", "more": {"x": 1}, "on": False, "device": "cuda"}
    entry = {"type": f"{annotated}:{kind}", "params": good}
    (made,) = CallbackManager.from_config({"callbacks": [entry]}).callbacks
    assert vars(made) == good
    bad = {"names": "a", "rate": "0.1", "mode": "c", "more": {"x": "y"}, "on": 1, "device": 3}
    assert said_of({"callbacks": [{**entry, "params": bad}]}) == [
        "callbacks[0].params.names: 'a' does not fit - write [a]",
        "callbacks[0].params.rate: '0.1' does not fit - write 0.1 without quotes",
        "callbacks[0].params.mode: 'c' does not fit - give one of a, b",
        "callbacks[0].params.more.x: 'y' does not fit - give a number",
        "callbacks[0].params.on: 1 does not fit - give true or false",
        f"callbacks[0]: {annotated}:{kind} needs limit - add `params: {{limit: …}}`",
    ]
    assert said_of({"callbacks": [f"{annotated}:{kind}"]}) == [
        f"callbacks[0]: {annotated}:{kind} needs limit, names - add `params: {{limit: …}}`"
    ]


def test_a_function_that_makes_one_and_where_it_fails(annotated: str) -> None:
    """It takes what the class takes; its error tells the line of the user's file."""
    source = {"callbacks": [{"type": f"{annotated}:make", "params": {"limit": 2, "rate": 0.25}}]}
    assert CallbackManager.from_config(source).callbacks[0].rate == 0.25
    line = ANNOTATED.splitlines().index('        return {}["thirteen"]') + 1
    (said,) = said_of({"callbacks": [{"type": f"{annotated}:make", "params": {"limit": 13}}]})
    assert said.startswith(f"callbacks[0].params: {annotated}:make refused its parameters: KeyError('thirteen') ")
    assert said.endswith(f"(annotated_callbacks.py:{line}) - see its documentation")


@pytest.mark.usefixtures("module")
def test_entries_say_how_a_callback_takes_part() -> None:
    """What `CallbackManager.add` takes; and one that is off is looked at all the same."""
    entry = {"type": "my_callbacks:Mine", "params": {"limit": 1}}
    callbacks = CallbackManager.from_config(
        {
            "callbacks": [
                {**entry, "name": "last", "priority": 1000},
                {**entry, "name": "first", "priority": "FIRST", "critical": ["on_step_end"]},
                {**entry, "name": "strict", "critical": True},
                {**entry, "name": "beside", "run_async": True},
                {**entry, "name": "off", "enabled": False},
            ]
        }
    )
    assert list(callbacks.timings) == ["first", "strict", "beside", "last"]
    first, strict, beside, last = callbacks.callbacks
    assert (first.critical, strict.critical, beside.critical, last.critical) == ({"on_step_end"}, True, False, False)
    off: dict[str, Any] = {**entry, "params": {}, "enabled": False}
    assert said_of({"callbacks": [off]}) == ["callbacks[0]: my_callbacks:Mine needs limit - add `params: {limit: …}`"]


def test_saving_that_is_off_stays_off(tmp_path: Path) -> None:
    """Nobody puts it back."""
    entry = {"type": "SaveModelCallback", "enabled": False}
    assert CallbackManager.from_config({"run": str(tmp_path), "callbacks": [entry]}).callbacks == ()


@pytest.mark.usefixtures("module")
def test_variables_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run by the name of the job, numbers, defaults, and a secret that no message shows."""
    text = """\
run: STORE/${JOB}
save: {every_n_steps: "${STEPS:-500}"}
callbacks:
  - {type: my_callbacks:Mine, params: {limit: "${LIMIT}", label: "${LIMIT}"}, enabled: "${WATCH:-true}"}
  - type: my_callbacks:Mine
    params:
      limit: ${LIMIT}
      label: ${LIMIT}
"""
    path = written(tmp_path / "f.yaml", text.replace("STORE", str(tmp_path)))
    for name, value in {"JOB": "job-7", "LIMIT": "3"}.items():
        monkeypatch.setenv(name, value)
    callbacks = CallbackManager.from_config(path)
    saver, quoted, plain = callbacks.callbacks
    assert callbacks.manager.url == f"file://{tmp_path}/job-7"
    assert saver.policy == EveryNSteps(500)
    assert (quoted.limit, quoted.label, plain.limit, plain.label) == (3, "3", 3, 3)
    monkeypatch.setenv("WATCH", "false")
    monkeypatch.setenv("STEPS", "hunter2")
    monkeypatch.delenv("JOB")
    assert [line.removeprefix(f"{tmp_path}/f.yaml:") for line in said_of(path)] == [
        "1: run: the variable JOB is not set - set it, or write ${JOB:-default}",
        "2: save.every_n_steps: ${STEPS:-500} does not fit - give a whole number or null",
    ]
    hook = "callbacks: [{type: NotifyCallback, params: {url: '${HOOK}', lag_s: '${HOOK}'}}]"
    monkeypatch.setenv("HOOK", "hunter2://hooks/hunter2")
    lines = said_of(written(tmp_path / "f.yaml", hook))
    assert len(lines) == 2
    assert not any("hunter2" in line for line in lines)


def test_a_file_that_is_not_there_and_one_that_is_no_text(tmp_path: Path) -> None:
    """Neither is a mistake in a line."""
    with pytest.raises(ConfigError, match=r"nothing\.yaml cannot be read: No such file"):
        CallbackManager.from_config(tmp_path / "nothing.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bytes\.yaml is no text"):
        CallbackManager.from_config(tmp_path / "bytes.yaml")
    with pytest.raises(ConfigError, match="a list does not fit - give a mapping with store, run, "):
        CallbackManager.from_config(written(tmp_path / "list.yaml", "[1]"))
    assert CallbackManager.from_config(written(tmp_path / "empty.yaml", "# nothing\n")).callbacks == ()


def test_an_anchor_is_followed_and_one_within_itself_is_refused(tmp_path: Path) -> None:
    """YAML's own way to say a thing once; merge keys, too."""
    source = "x: &r {last: 2}\n"
    with pytest.raises(ConfigError, match="x: this key is not known"):
        CallbackManager.from_config(written(tmp_path / "a.yaml", source))
    good = f"run: {tmp_path}/run\nkeep: &r {{last: 2}}\nkeep_local: {{<<: *r}}\n"
    manager: Any = CallbackManager.from_config(written(tmp_path / "b.yaml", good)).manager
    assert manager._settings.retention.local == KeepLast(2)
    with pytest.raises(ConfigError, match="an anchor contains itself"):
        CallbackManager.from_config(written(tmp_path / "c.yaml", "keep: &k {last: *k}\n"))


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(("text", "value"), [("1e-3", 0.001), ("2E4", 2e4), ("-1.5e+2", -150.0), ("1.", 1.0), ("7", 7)])
def test_numbers_are_those_of_json(tmp_path: Path, text: str, value: float) -> None:
    """To PyYAML by itself, 1e-3 is text."""
    path = written(
        tmp_path / "a.yaml", f"callbacks: [{{type: 'my_callbacks:Mine', params: {{limit: 1, label: {text}}}}}]"
    )
    label = CallbackManager.from_config(path).callbacks[0].label
    assert (label, type(label)) == (value, type(value))


@pytest.mark.parametrize("source", [None, 3])
def test_what_is_no_configuration(source: Any) -> None:
    """A mistake of the caller's."""
    with pytest.raises(ConfigError, match="is no configuration - give the path of a file, or its values as a dict"):
        CallbackManager.from_config(source)


def test_a_misspelt_hook_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Though its class is looked at when it is made, and again when it is added."""

    class Misspelt(Callback):
        def on_step_ended(self, **kwargs: Any) -> None:
            pass

    monkeypatch.setitem(sys.modules, "my_callbacks", SimpleNamespace(Misspelt=Misspelt))
    CallbackManager.from_config({"callbacks": ["my_callbacks:Misspelt"]})
    assert [record.getMessage() for record in caplog.records] == [
        "callback Misspelt has a hook on_step_ended, which no host calls: did you mean on_step_end?"
    ]


def test_a_plugin_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points of the group `ckptmgr.callbacks`; a broken one says which it is."""
    good = SimpleNamespace(name="Theirs", value="theirs:Mine", load=lambda: Mine)

    def fail() -> Any:
        raise ImportError("no module named theirs")

    bad = SimpleNamespace(name="Broken", value="broken:Broken", load=fail)
    monkeypatch.setattr(builtin, "entry_points", lambda group: [good, bad] if group == "ckptmgr.callbacks" else [])
    source = {"callbacks": [{"type": "Theirs", "params": {"limit": 1}}]}
    assert isinstance(CallbackManager.from_config(source).callbacks[0], Mine)
    with pytest.raises(ConfigError, match=r"the plugin Broken \(broken:Broken\) cannot be imported"):
        CallbackManager.from_config({"callbacks": ["Broken"]})
    with pytest.raises(ConfigError, match="did you mean Theirs"):
        CallbackManager.from_config({"callbacks": ["Thiers"]})


@pytest.mark.parametrize("page", ["README.md", "docs/callbacks.md"])
def test_the_files_that_are_shown_are_good_ones(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user copies them."""

    class StopAtLoss(Callback):
        def __init__(self, below: float) -> None:
            self.below = below

        def on_log(self, **kwargs: Any) -> None:
            pass

    package = SimpleNamespace(StopAtLoss=StopAtLoss)
    monkeypatch.setitem(sys.modules, "my_package", package)
    monkeypatch.setitem(sys.modules, "my_package.module", package)
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    shown = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert shown
    for each in shown:
        callbacks = CallbackManager.from_config(written(tmp_path / "ckptmgr.yaml", each))
        assert {"SaveModelCallback", "LossMonitorCallback", "EarlyStoppingCallback"} <= callbacks.timings.keys()


def test_every_built_in_is_there_and_is_a_callback() -> None:
    """The registry names what exists."""
    for name in builtin.BUILT_IN:
        made = builtin.built_in(name)
        assert made.__name__ == name
        assert issubclass(made, Callback)


def test_every_public_name_is_there_and_loads_no_torch() -> None:
    """Names come when they are first used; monitoring a training needs no torch beyond what the training has."""
    code = (
        "import sys, ckptmgr.callbacks as c; assert all(getattr(c, name) is not None for name in c.__all__); "
        "print('torch' in sys.modules, len(c.__all__) == len(set(c.__all__)), set(c.__all__) <= set(dir(c)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True", "True"]


def test_the_schema_names_every_key() -> None:
    """An editor completes from it; an unknown key is an error there, too."""
    made = training_config.schema()
    definitions = made["$defs"]
    assert definitions["Config"]["additionalProperties"] is False
    assert set(definitions["Config"]["properties"]) == set(training_config.Config.__struct_fields__)
    assert definitions["CallbackSection"]["required"] == ["type"]


def test_priorities_have_names() -> None:
    """The names in the file are those in Python."""
    definition = training_config.schema()["$defs"]["CallbackSection"]["properties"]["priority"]
    (named,) = [choice["enum"] for choice in definition["anyOf"] if "enum" in choice]
    assert sorted(named) == sorted(each.name for each in Priority)


def test_the_schema_takes_variables_and_tells_what_keys_are_for() -> None:
    """An editor must not mark `every_n_steps: ${STEPS}`; keys of an entry are those of `add`."""
    definitions = training_config.schema()["$defs"]
    variable = {"type": "string", "pattern": r"\$\{"}
    assert variable in definitions["SaveSection"]["properties"]["every_n_steps"]["anyOf"]
    entry = definitions["CallbackSection"]["properties"]
    assert entry["enabled"]["anyOf"] == [{"type": "boolean"}, variable]
    assert all(each["description"] for each in entry.values())
    taken = inspect.signature(CallbackManager.add).parameters.keys() - {"self", "callback"}
    assert entry.keys() == taken | {"type", "params", "enabled"}
