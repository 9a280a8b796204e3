"""ms-swift's plugin: its `--callbacks` then knows `ckptmgr`, which is what the configuration names, and the built-in callbacks.

    export CKPTMGR_CONFIG=ckptmgr.yaml                      # default: ./ckptmgr.yaml, if it is there; or only CKPTMGR_RUN, the run to save to
    python -m swift.cli.sft … --external_plugins "$(python -m ckptmgr.callbacks.ms_swift)" --callbacks ckptmgr

Run as a module, it prints its own path. ms-swift loads that file, under a name of its own, and so registers; importing `ckptmgr.callbacks.ms_swift`
does nothing by itself, and `register()` is for a plugin of your own that brings other callbacks too. Imports no ms-swift before that.

Facts of ms-swift 4.6 that this goes by:
- The plugin's folder comes first on `sys.path`: it is one of its own, because the modules beside it have names such as `accelerate`.
- A callback is made as `callbacks_map[name](args, trainer)` before the Trainer's own `__init__`: the trainer is an empty shell then.
- A training that is resumed in the middle of an epoch gets another loader (`get_train_dataloader(skip_batches=…)`), where accelerate would take the parts of
  the first one, which are watched.
- The root logger has no handler, so that nothing of ours below a warning would be seen.
- With `--use_flash_ckpt true` (DLRover) `on_save` comes while another process still writes the files, or after they were given up and deleted: such saves
  cannot be taken, and the training is not begun.
- What ends the process in a constructor of a callback ends it before any step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ckptmgr.callbacks.builtin import BUILT_IN, built_in
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.core.errors import ConfigError

NAME = "ckptmgr"
# On the trainer that has the configuration's callbacks.
_CONFIGURED = "_ckptmgr_configured"
CONFIG_ENV, CONFIG = "CKPTMGR_CONFIG", "ckptmgr.yaml"

# What the configuration named, until a trainer takes it.
_made_early: list[CallbackManager] = []


def register() -> None:
    """Have ms-swift's `--callbacks` know `ckptmgr`, and each built-in callback with its defaults by its own name."""
    from swift.callbacks import callbacks_map  # type: ignore[import-not-found, import-untyped, unused-ignore]

    for name in BUILT_IN:
        # Saving needs a run, and so the configuration.
        callbacks_map[name] = _maker(_saving if name == "SaveModelCallback" else partial(_with_defaults, name))
    callbacks_map[NAME] = _maker(configured)
    if NAME in sys.argv:
        # Mistakes are told now: until callbacks are made, ms-swift loads the model and the data.
        _show_log()
        with _mistakes_told():
            _made_early.append(configured())


def configured() -> CallbackManager:
    """The callbacks of the configuration that the environment names, saving included.

    Raises:
        ConfigError: a mistake in it; or there is none, and no run either.
    """
    if _made_early:
        return _made_early.pop()
    named = os.environ.get(CONFIG_ENV)
    if not named and not Path(CONFIG).is_file():
        if not os.environ.get("CKPTMGR_RUN"):
            raise ConfigError(
                f"nothing says where to save: there is no {CONFIG} in {Path.cwd()}",
                hint=f"set {CONFIG_ENV} to its path, or CKPTMGR_RUN to the run's URL",
            )
        return CallbackManager.from_config({})
    return CallbackManager.from_config(named or CONFIG)


def _saving() -> CallbackManager:
    made = configured()
    if made.manager is None:
        raise ConfigError("SaveModelCallback needs a run to save to", hint="set CKPTMGR_RUN to its URL, or add `run:`")
    return made


def _with_defaults(name: str) -> Any:
    return built_in(name)()


def _maker(make: Callable[[], Any]) -> Callable[[Any, Any], Any]:
    """As ms-swift calls it. Each mistake is one line, and they are the end of the process with 2."""

    def callback(args: Any, trainer: Any) -> Any:
        _show_log()
        with _mistakes_told():
            made = make()
            if isinstance(made, CallbackManager):
                _refuse_second(trainer)
                _refuse_flash(made, args)
                _keep_watched(trainer)
            return made

    return callback


@contextlib.contextmanager
def _mistakes_told() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            for line in error.lines:
                print(f"ckptmgr: error: {line}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None


def _refuse_second(trainer: Any) -> None:
    if getattr(trainer, _CONFIGURED, False):
        raise ConfigError(
            f"--callbacks names {NAME} twice: SaveModelCallback is the same configuration",
            hint=f"leave {NAME} alone there: it saves, too",
        )
    if trainer is not None:
        setattr(trainer, _CONFIGURED, True)


def _refuse_flash(callbacks: CallbackManager, args: Any) -> None:
    if callbacks.manager is not None and getattr(args, "use_flash_ckpt", False):
        raise ConfigError(
            "--use_flash_ckpt: checkpoints are written after ms-swift has said that they are there, and cannot be taken",
            hint="leave it out: ckptmgr uploads in the background, too",
        )


def _keep_watched(trainer: Any) -> None:
    """Have the loader of a resumed epoch take its batches, and what makes them, from the first loader: as accelerate would."""
    make = getattr(trainer, "get_train_dataloader", None)
    first: list[Any] = []

    def get_train_dataloader(*args: Any, **kwargs: Any) -> Any:
        assert make is not None
        loader = make(*args, **kwargs)
        skipping: Any = getattr(loader, "batch_sampler", None)
        if not kwargs.get("skip_batches"):
            first[:] = [loader]
        elif first and type(loader) is type(first[0]) and hasattr(skipping, "batch_sampler"):
            skipping.batch_sampler = first[0].batch_sampler
            loader.collate_fn = first[0].collate_fn
        return loader

    if make is not None:
        trainer.get_train_dataloader = get_train_dataloader


def _show_log() -> None:
    """Show what callbacks have to say, in ms-swift's form, unless the program has set logging up itself."""
    log = logging.getLogger(NAME)
    if log.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[%(levelname)s:%(name)s] %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    # Else all lines come twice as soon as somebody gives the root logger a handler.
    log.propagate = False


if __name__ != "ckptmgr.callbacks.ms_swift":
    # Loaded by its path.
    register()
