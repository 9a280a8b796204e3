"""ms-swift, with our plugin: killed and resumed, every loss and all weights are those of the uninterrupted run, to the last bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.run.directory import RunDirectory
from ckptmgr.testing.events import Told, agree
from ckptmgr.testing.stores import Store

if find_spec("swift") is None:
    pytest.skip("ms-swift is not installed; CI runs these tests in an environment of its own", allow_module_level=True)

# Each test is one to three trainings, and most of their time is imports.
pytestmark = pytest.mark.timeout(600)

HERE = Path(__file__).parent
SFT = (sys.executable, "-m", "swift.cli.sft")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
CONFIG = """
save: {every_n_steps: 5}
keep: {last: 10}
callbacks:
  - {type: LossMonitorCallback, params: {log_interval: 10}}
  - {type: LogCallback, params: {directory: logs}}
"""

Start = Callable[..., Any]


@pytest.fixture(scope="session")
def assets(_no_real_cloud: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("assets")
    made = subprocess.run(
        [sys.executable, str(HERE / "tiny_model.py"), str(directory)], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return directory


@pytest.fixture(scope="session")
def plugin(_no_real_cloud: None) -> str:
    """As the recipe says it."""
    found = subprocess.run(
        [sys.executable, "-m", "ckptmgr.callbacks.ms_swift"], capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


@pytest.fixture
def start(launch: Start, assets: Path, plugin: str, tmp_path: Path) -> Start:
    """Runs `swift sft` for 20 steps: `start("name", "--option", …)`; it writes to `tmp_path / "name"`."""
    (tmp_path / "ckptmgr.yaml").write_text(CONFIG)
    number = [0]

    def run(
        name: str,
        *options: object,
        ours: bool = True,
        before: tuple[object, ...] = (),
        sft: tuple[object, ...] = SFT,
        **env: str,
    ) -> Any:
        number[0] += 1
        journal, out = tmp_path / f"journal-{number[0]}", tmp_path / name
        own = {
            "JOURNAL": str(journal),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "USE_HF": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "MODELSCOPE_CACHE": str(tmp_path / "cache"),
            "HF_HOME": str(tmp_path / "hf"),
        }
        callbacks = ["ckptmgr", *(["NotifyCallback"] if "CKPTMGR_NOTIFY_URL" in env else [])] if ours else []
        settings: Mapping[str, object] = {
            "--model": assets / "model",
            "--model_type": "qwen2",
            "--template": "qwen2_5",
            "--dataset": assets / "rows.jsonl",
            "--output_dir": out,
            "--add_version": "false",
            "--tuner_type": "full",
            "--torch_dtype": "float32",
            "--attn_impl": "eager",
            "--use_cpu": "true",
            "--max_steps": 20,
            "--per_device_train_batch_size": 4,
            "--gradient_accumulation_steps": 2,
            "--learning_rate": 1e-3,
            "--max_length": 128,
            "--truncation_strategy": "right",
            "--logging_steps": 1,
            "--save_strategy": "no",
            "--eval_strategy": "no",
            "--split_dataset_ratio": 0,
            "--seed": 7,
            "--gradient_checkpointing": "false",
            "--dataloader_num_workers": 0,
            "--dataset_num_proc": 1,
            "--report_to": "none",
            "--check_model": "false",
        }
        words = [word for pair in settings.items() for word in pair]
        plugins = [HERE / "swift_journal.py", *([plugin] if ours else [])]
        command = [
            *before,
            *sft,
            *words,
            "--external_plugins",
            *plugins,
            "--callbacks",
            *callbacks,
            "journal",
            "interrupt",
            "stop",
            "events",
        ]
        return launch([str(word) for word in (*command, *options)], journal, {**own, **env})

    return run


def saved(url: str) -> dict[int, tuple[str, ...]]:
    """The committed steps with their reasons, in the order of attempts."""
    manifests = RunDirectory.open(url).history().manifests
    return {manifest.step: manifest.reasons for _, manifest in sorted(manifests.items())}


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_killed_and_resumed(make_store: Callable[[str], Store], tmp_path: Path, start: Start, kind: str) -> None:
    """One command line for the first start and every other one; the second is on another machine."""
    url = f"{make_store(kind).url}/run"
    before = (sys.executable, "-m", "ckptmgr.cli.main", "resume", url, "--or-start", "--")
    resume = ("--resume_from_checkpoint", "{}")
    whole = start("whole", ours=False)
    assert (whole.code, whole.steps) == (0, list(range(1, 21))), whole.log
    first = start("out", *resume, before=before, CKPTMGR_RUN=url, CKPTMGR_LOCAL_DIR=str(tmp_path / "disk-1"), WHEN="14")
    assert (first.code, first.steps[-1:]) == (128 + signal.SIGKILL, [13]), first.log
    assert set(saved(url)) == {5, 10}
    second = start("out-2", *resume, before=before, CKPTMGR_RUN=url, CKPTMGR_LOCAL_DIR=str(tmp_path / "disk-2"))
    assert (second.code, second.steps) == (0, list(range(11, 21))), second.log
    # It sets fp16 for a model in float32, which has no scaler on a CPU.
    assert "not restored" not in second.log
    differing = {name: value for name, value in second.facts.items() if whole.facts.get(name) != value}
    assert differing == {}
    assert {name for name in whole.facts if int(name.split()[0]) > 10} <= second.facts.keys()
    assert saved(url)[20] == ("every_n_steps:5", "train_end")
    assert len((tmp_path / "logs/log.jsonl").read_text().splitlines()) > 20


@pytest.mark.slow
@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGTERM"])
def test_two_ranks(make_store: Callable[[str], Store], tmp_path: Path, start: Start, signal_name: str) -> None:
    """Under torchrun, on gloo: rank 0 is signalled, both end, and the resumed run is exact."""
    url = f"{make_store('local').url}/run"
    sft = (SFT[0], *TORCHRUN, *SFT[1:])
    before = (sys.executable, "-m", "ckptmgr.cli.main", "resume", url, "--or-start", "--")
    resume = ("--resume_from_checkpoint", "{}")
    both = {"before": before, "sft": sft, "CKPTMGR_RUN": url, "CKPTMGR_LOCAL_DIR": str(tmp_path / "disk")}
    whole = start("whole", ours=False, sft=sft)
    assert (whole.code, whole.steps) == (0, list(range(1, 21))), whole.log
    first = start("out", *resume, **both, SEND=signal_name, WHEN="13")
    last = 10 if signal_name == "SIGKILL" else 13
    assert first.code != 0
    assert max(saved(url)) == last, first.log
    second = start("out-2", *resume, **both)
    assert (second.code, second.steps) == (0, list(range(last + 1, 21))), second.log
    differing = {name: value for name, value in second.facts.items() if whole.facts.get(name) != value}
    assert differing == {}
    assert "not restored" not in second.log


def test_ended_by_a_callback(make_store: Callable[[str], Store], tmp_path: Path, start: Start) -> None:
    """In the middle of an epoch; resumed, it runs no step."""
    url = f"{make_store('local').url}/run"
    env = {"CKPTMGR_RUN": url, "CKPTMGR_LOCAL_DIR": str(tmp_path / "disk")}
    # With accumulation the Trainer looks between two micro-batches, and no further step would be run at all.
    first = start("out", "--gradient_accumulation_steps", 1, **env, STOP="8")
    assert (first.code, first.steps[-1:]) == (0, [8]), first.log
    assert saved(url)[8] == ("train_end",)
    resume = ("--resume_from_checkpoint", tmp_path / "out/checkpoint-8")
    again = start("out", "--gradient_accumulation_steps", 1, *resume, **env)
    assert (again.code, again.steps) == (0, []), again.log
    assert "already stopped (a callback)" in again.log


def test_sigterm(make_store: Callable[[str], Store], tmp_path: Path, start: Start) -> None:
    """`python -m swift.cli.sft` saves, and ends with 143."""
    url = f"{make_store('local').url}/run"
    ended = start("out", CKPTMGR_RUN=url, CKPTMGR_LOCAL_DIR=str(tmp_path / "disk"), SEND="SIGTERM", WHEN="8")
    assert (ended.code, ended.steps[-1:]) == (143, [8]), ended.log
    assert saved(url)[8] == ("sigterm",)


def test_a_mistake_ends_it_before_training(tmp_path: Path, start: Start) -> None:
    (tmp_path / "ckptmgr.yaml").write_text("callbacks: [LossMonitor]")
    ended = start("out")
    assert (ended.code, ended.steps) == (2, []), ended.log
    (line,) = (line for line in ended.log.splitlines() if line.startswith("ckptmgr: error: "))
    assert "LossMonitorCallback" in line


def test_the_page_of_events(start: Start, assets: Path, tmp_path: Path) -> None:
    """docs/events.md: which events come, in which order, with what."""
    rows, recorded = assets / "rows.jsonl", tmp_path / "events.json"
    epochs = ("--max_steps", -1, "--num_train_epochs", 2, "--logging_steps", 2, "--eval_strategy", "epoch")
    data = ("--dataset", f"{rows}#16", "--val_dataset", f"{rows}#4", "--per_device_eval_batch_size", 4)
    done = start("out", *epochs, *data, "--save_strategy", "epoch", ours=False, EVENTS=str(recorded))
    assert done.code == 0, done.log
    found = json.loads(recorded.read_text())
    agree("ms-swift", Told(tuple(found["order"]), found["arguments"]), HERE.parents[1] / "docs" / "events.md")
