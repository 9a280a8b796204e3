"""What dispatching an event to ten callbacks costs beyond what they do, beside Hugging Face's own handler.

    python bench/callbacks.py [--rounds N] [--assert] [--record docs/benchmarks.md]

Ten callbacks with a hook that does nothing, `on_step_end(self, args, state, control, **kwargs)`, and the arguments that the embedded Trainer hands over. Each
round calls the event many times in each way: the ten hooks by hand, through our `CallbackManager` (which times and shields each call), and through
transformers' `CallbackHandler`, if it is installed (it does neither). Overhead is the time of an event less that of the hooks by hand, in the same
round. The last line of the output is a JSON object with the medians `dispatch_us` and, with transformers, `event_vs_handler`.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from _report import Limit, finish, interleaved, machine, parser, verdicts, warn_if_busy

from ckptmgr.callbacks import Callback, CallbackManager, TrainerControl, TrainerState

LIMITS = {"dispatch_us": Limit(at_most=20.0)}
TITLES = {
    "hooks": "the ten hooks, called by hand",
    "manager": "`CallbackManager`: timed and shielded",
    "handler": "transformers' `CallbackHandler`",
}
CALLBACKS = 10
EVENTS = 5_000


class Nothing(Callback):
    """A hook that does nothing, in the form that every host's callbacks have."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass


def ways(events: int = EVENTS) -> dict[str, Callable[[], float]]:
    """What is timed, by name: each returns the microseconds of one event."""
    # A class of its own each: transformers warns of a second one of a class.
    callbacks = [type(f"Nothing{number}", (Nothing,), {})() for number in range(CALLBACKS)]
    args, state, control = SimpleNamespace(), TrainerState(), TrainerControl()
    given = dict.fromkeys(
        ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader", "processing_class"), object()
    )
    step = {"batch": object(), "outputs": object()}

    def timed(event: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            started = perf_counter()
            for _ in range(events):
                event()
            return (perf_counter() - started) / events * 1e6

        return run

    def by_hand() -> None:
        for callback in callbacks:
            callback.on_step_end(args, state, control, **given, **step)

    manager = CallbackManager(callbacks)
    found = {
        "hooks": timed(by_hand),
        "manager": timed(lambda: manager.call("on_step_end", args=args, state=state, control=control, **given, **step)),
    }
    handler = handler_of(callbacks, given)
    if handler is not None:
        found["handler"] = timed(lambda: handler.call_event("on_step_end", args, state, control))
    return found


def has_transformers() -> bool:
    """Whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def handler_of(callbacks: Sequence[Callback], given: Mapping[str, Any]) -> Any:
    """transformers' own, with the same callbacks; None without transformers."""
    if not has_transformers():
        return None
    logging.getLogger("transformers").setLevel(logging.ERROR)  # of a callback that only a Trainer needs
    from transformers.trainer_callback import CallbackHandler  # type: ignore[import-not-found, unused-ignore]

    handler = CallbackHandler(
        callbacks, given["model"], given["processing_class"], given["optimizer"], given["lr_scheduler"]
    )
    handler.train_dataloader, handler.eval_dataloader = given["train_dataloader"], given["eval_dataloader"]
    return handler


def ratios(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Medians over the rounds: what one event costs beyond the hooks, in µs; and the whole event, hooks included, as a multiple of transformers' handler."""
    over = [manager - hooks for manager, hooks in zip(found["manager"], found["hooks"], strict=True)]
    told = {"dispatch_us": round(median(over), 2)}
    if "handler" in found:
        pairs = zip(found["manager"], found["handler"], strict=True)
        told["event_vs_handler"] = round(median(ours / theirs for ours, theirs in pairs), 2)
    return told


def report(found: Mapping[str, Sequence[float]]) -> str:
    """The measurement as a Markdown section."""
    rounds = len(found["manager"])
    rows = [
        f"| {TITLES[name]} | {median(times):.2f} | {min(times):.2f}-{max(times):.2f} |" for name, times in found.items()
    ]
    return "\n".join(
        [
            "## Callbacks",
            "",
            f"`python bench/callbacks.py --rounds {rounds}`: one event to {CALLBACKS} callbacks whose hooks do nothing, medians of {rounds} interleaved rounds of",
            f"{EVENTS:,} events, in µs. `dispatch_us` is what the manager adds to the hooks, `event_vs_handler` its event beside the other's, which hands over less.",
            "",
            "| way | µs | least to most |",
            "| --- | ---: | ---: |",
            *rows,
            "",
            verdicts(ratios(found), LIMITS),
            "",
            f"{machine(('ckptmgr', *(['transformers'] if has_transformers() else [])))}.",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, record; with `--assert`, 1 when the overhead is above its limit."""
    options = parser(__doc__, rounds=15).parse_args(arguments)
    warn_if_busy()
    found = interleaved(ways(), options.rounds)
    return finish(options, report(found), ratios(found), LIMITS, hint="is the machine idle?")


if __name__ == "__main__":
    sys.exit(main())
