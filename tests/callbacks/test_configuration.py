"""`CallbackManager.from_config`: what a file says is what is built, and every mistake is one line with its place."""

from __future__ import annotations

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
from ckptmgr.core.errors import ConfigError
from ckptmgr.core.policies import AnyOf, Best, EveryMinutes, EveryNEpochs, EveryNSteps, Worst
from ckptmgr.core.retention import AnyRule, KeepBest, KeepEveryNSteps, KeepLast, KeepWithin, KeepWorst
from ckptmgr.training import config as training_config


class Mine(Callback):
    """A user's own, in ten lines."""

    def __init__(self, limit: int, *, label: str = "mine") -> None:
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
    ("every_n_steps: 500", "every_n_steps: often", 6, "save.every_n_steps: expected `int | null`, got `str`"),
    ("every_n_steps: 500", "every_n_steps: 0", 5, "save: EveryNSteps: n is 0 - n must be a whole number"),
    ("eval_loss:min:2", "accuracy", 9, "save.best[0]: cannot tell whether less or more of 'accuracy' is better"),
    ("mode: max}\n", "mode: up}\n", 10, "save.worst.mode: invalid enum value 'up' - it is one of min, max"),
    ("last: 3", "last: 0", 11, "keep: KeepLast(0) would keep nothing"),
    ("within: 2w", "within: a while", 16, "keep.within: 'a while' is no length of time - write 12h, 7d or 2w"),
    ("max_bytes: 50GB", "max_bytes: lots", 18, "upload.max_bytes: 'lots' is no size"),
    ("when_full: skip", "when_full: cry", 18, "upload.when_full: invalid enum value 'cry' - it is one of keep-newest, skip, wait"),
    ("linger_s: 0", "linger_s: -1", 1, "linger_s"),
    ("strict: true", "strict: true\nstrict: false", 5, "strict stands here for the second time"),
    ("keep_local", "keep_locl", 17, "keep_locl: this key is not known - did you mean keep_local?"),
    ("run: llama\n", "", 1, "store: a store without a run"),
    ("store: STORE\n", "", 1, "run: 'llama' is a name, and there is no store"),
    ("run: llama", "run: [llama", 3, "this is no YAML"),
    ("run: llama", "1: llama", 2, "the key 1 is no text"),
    ("my_callbacks:Mine", "my_callbacks:Mime", 20, "callbacks[0].type: my_callbacks has no 'Mime' - did you mean Mine?"),
    ("my_callbacks:Mine", "my_callbacks:number", 20, "callbacks[0].type: my_callbacks:number is no class"),
    ("my_callbacks:Mine", "nowhere:Mine", 20, "'nowhere' of the callback 'nowhere:Mine' cannot be imported"),
    ("my_callbacks:Mine", "EarlyStopingCallback", 20, "there is no callback 'EarlyStopingCallback' - did you mean EarlyStoppingCallback?"),
    ("limit: 7", "limits: 7", 21, "callbacks[0].params.limits: my_callbacks:Mine has no parameter 'limits' - did you mean limit?"),
    ("limit: 7", "limit: -7", 21, "callbacks[0].params: limit=-7 is negative - give 0 or more"),
    ("limit: 7", "limit: x", 21, "callbacks[0].params: my_callbacks:Mine refused its parameters: TypeError"),
    ("limit: 7", "label: x", 20, "callbacks[0]: my_callbacks:Mine needs limit"),
    ("priority: LOG", "priority: HIGH", 23, "callbacks[0].priority: invalid enum value 'HIGH' - it is one of FIRST, SAVE, NORMAL"),
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


def test_a_file_that_is_not_there_and_one_that_is_no_text(tmp_path: Path) -> None:
    """Neither is a mistake in a line."""
    with pytest.raises(ConfigError, match=r"nothing\.yaml cannot be read: No such file"):
        CallbackManager.from_config(tmp_path / "nothing.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bytes\.yaml is no text"):
        CallbackManager.from_config(tmp_path / "bytes.yaml")
    with pytest.raises(ConfigError, match="this is no mapping but list"):
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
