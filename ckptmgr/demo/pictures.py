"""The two pictures of the documentation, drawn from the demo's training: where its time goes, and its losses with what callbacks did.

    python -m ckptmgr.demo.pictures DIR

Trains the demo's model with a profiler, early stopping and saves to a store on disk, and writes `profile.svg` and `losses.svg` into DIR. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmgr.core.errors import CkptmgrError, MissingExtraError

if TYPE_CHECKING:
    from ckptmgr.callbacks.breakdown import Breakdown
    from ckptmgr.core.manifest import Manifest

STEPS = 300
EVAL_EVERY = 20
_COLOURS = {
    "data": "#88ccee",
    "forward": "#44aa99",
    "backward": "#117733",
    "compute": "#117733",
    "optimizer": "#999933",
    "callbacks": "#ddcc77",
    "evaluation": "#cc6677",
    "save": "#882255",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What a training left to draw.

    Attributes:
        windows: where the time of successive steps went.
        losses: step and loss of each logged step.
        evaluations: step and loss of each evaluation.
        saves: the committed checkpoints, oldest first.
        stopped: the step at which a callback ended the training; None if none did.
        stopped_by: its name.
    """

    windows: Sequence[Breakdown]
    losses: Sequence[tuple[int, float]]
    evaluations: Sequence[tuple[int, float]]
    saves: Sequence[Manifest]
    stopped: int | None = None
    stopped_by: str = ""


def train(
    directory: Path, *, steps: int = STEPS, eval_every: int = EVAL_EVERY, good_enough: float | None = None
) -> Story:
    """Train the demo's model for at most `steps`, until three evaluations in a row are not better, or one is `good_enough`; saves go to `directory`."""
    import torch

    from ckptmgr.callbacks import EarlyStoppingCallback, PerformanceProfilerCallback, SaveModelCallback
    from ckptmgr.core.policies import Best, EveryNSteps
    from ckptmgr.demo.model import CharTransformer, Windows, standard_library_text
    from ckptmgr.trainer import Trainer, TrainingArguments
    from ckptmgr.training.manager import CheckpointManager

    torch.manual_seed(1234)
    torch.set_num_threads(1)
    text = standard_library_text()
    cut = len(text) * 9 // 10
    model = CharTransformer()
    manager = CheckpointManager(
        str(directory / "store" / "run"),
        local_dir=directory / "disk",
        save=EveryNSteps(5 * eval_every) | Best("eval_loss", mode="min"),
        transfer="thread",
    )
    profiler = PerformanceProfilerCallback(log_interval=eval_every, sample_interval=5)
    trainer = Trainer(
        model,
        TrainingArguments(max_steps=steps, logging_steps=2, eval_steps=eval_every),
        train_dataloader=torch.utils.data.DataLoader(Windows(text[:cut], stride=160), batch_size=16, shuffle=True),
        eval_dataloader=torch.utils.data.DataLoader(Windows(text[cut:], stride=640), batch_size=32),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        callbacks=[
            SaveModelCallback(manager, preemption=False),
            EarlyStoppingCallback("eval_loss", patience=3, threshold=good_enough),
            profiler,
        ],
    )
    result = trainer.train()
    logged = trainer.state.log_history
    return Story(
        windows=tuple(window for window in profiler.windows if window.steps),
        losses=[(entry["step"], entry["loss"]) for entry in logged if "loss" in entry],
        evaluations=[(entry["step"], entry["eval_loss"]) for entry in logged if "eval_loss" in entry],
        saves=manager.list(),
        stopped=result.global_step if result.stopped else None,
        stopped_by=result.stopped or "",
    )


def draw_profile(windows: Sequence[Breakdown], path: Path) -> None:
    """One bar per window, of its phases in ms a step; the title names the bottleneck of all."""
    figure, axes = _figure()
    names = [f"{each.first_step}-{each.last_step}" for each in windows]
    left = [0.0] * len(windows)
    for phase, colour in _COLOURS.items():
        widths = [1000 * each.seconds.get(phase, 0.0) / each.steps for each in windows]
        if any(widths):
            axes.barh(names, widths, left=left, color=colour, label=phase)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
    whole = windows[0]
    for each in windows[1:]:
        whole = whole.with_more(each)
    axes.invert_yaxis()
    axes.set(xlabel="ms a step", ylabel="steps", title=f"Where the time goes; most of it: {whole.bottleneck}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=6, frameon=False)
    _write(figure, path)


def draw_losses(story: Story, path: Path) -> None:
    """Losses by step, with what was saved, the best so far, and where a callback ended the training."""
    figure, axes = _figure()
    axes.plot(*zip(*story.losses, strict=True), color="#88ccee", linewidth=1, label="loss")
    axes.plot(*zip(*story.evaluations, strict=True), color="#117733", marker="o", markersize=3, label="eval_loss")
    values = dict(story.evaluations)
    best = [save.step for save in story.saves if any(reason.startswith("best:") for reason in save.reasons)]
    others = [save.step for save in story.saves if save.step not in best]
    for index, step in enumerate(others):
        axes.axvline(
            step, color="#999933", linewidth=1, linestyle=":", label=None if index else "saved: every n steps, end"
        )
    axes.scatter(
        best, [values[step] for step in best], marker="*", s=60, color="#ddaa33", zorder=3, label="saved: best so far"
    )
    if story.stopped is not None:
        axes.axvline(story.stopped, color="#cc6677", linewidth=2, label=f"ended by {story.stopped_by}")
    axes.set(xlabel="step", ylabel="loss", title="A training, its saves, and its end")
    axes.legend(frameon=False)
    _write(figure, path)


def _figure() -> Any:
    import matplotlib

    matplotlib.use("svg")
    # The same picture of the same training: ids in SVG are random otherwise.
    matplotlib.rcParams["svg.hashsalt"] = "ckptmgr"
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(8, 4.2), layout="constrained")


def _write(figure: Any, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None})
    # matplotlib ends lines with blanks.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and draw."""
    parser = argparse.ArgumentParser(prog="python -m ckptmgr.demo.pictures", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write the pictures")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"at most so many ({STEPS})")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if find_spec("matplotlib") is None:
            raise MissingExtraError(
                "pictures are drawn by matplotlib", hint="pip install matplotlib", extra="matplotlib"
            )
        options.directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as work:
            story = train(Path(work), steps=options.steps)
        draw_profile(story.windows, options.directory / "profile.svg")
        draw_losses(story, options.directory / "losses.svg")
    except CkptmgrError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(f"{options.directory}: profile.svg, losses.svg")


if __name__ == "__main__":
    main()
