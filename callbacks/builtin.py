"""Which callbacks there are: the built-in ones, those of plugins, and any class by its place."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from ckptmgr.core.document import nearest
from ckptmgr.core.errors import ConfigError

GROUP = "ckptmgr.callbacks"
"""The entry-point group of plugins: `[project.entry-points."ckptmgr.callbacks"]`, `MyCallback = "my_package.module:MyCallback"`."""

BUILT_IN = {
    "DPOAccuracyCallback": "ckptmgr.callbacks.dpo_accuracy",
    "EarlyStoppingCallback": "ckptmgr.callbacks.early_stopping",
    "GradientClipCallback": "ckptmgr.callbacks.gradient_clip",
    "LRSchedulerCallback": "ckptmgr.callbacks.lr_schedule",
    "LogCallback": "ckptmgr.callbacks.log",
    "LossMonitorCallback": "ckptmgr.callbacks.loss_monitor",
    "MemoryCallback": "ckptmgr.callbacks.memory",
    "NotifyCallback": "ckptmgr.callbacks.notify",
    "PerformanceProfilerCallback": "ckptmgr.callbacks.profiler",
    "SaveModelCallback": "ckptmgr.callbacks.save_model",
}
"""The module of each built-in callback; imported when it is asked for."""


def built_in(name: str) -> Any:
    """The class of a built-in callback."""
    return getattr(importlib.import_module(BUILT_IN[name]), name)


def find(type_name: str) -> Any:
    """The class, or the function that makes a callback, which `type_name` means: a built-in's name, a plugin's, or `package.module:Class`.

    Raises:
        ConfigError: there is none of that name, with the nearest that there is; or it cannot be imported.
    """
    module, colon, attribute = type_name.partition(":")
    if colon:
        return _imported(type_name, module, attribute)
    if type_name in BUILT_IN:
        return built_in(type_name)
    plugins = {entry.name: entry for entry in entry_points(group=GROUP)}
    if type_name not in plugins:
        raise ConfigError(
            f"there is no callback {type_name!r}",
            hint=f"{nearest(type_name, {*BUILT_IN, *plugins})}; a class of your own is written package.module:Class",
        )
    try:
        return plugins[type_name].load()
    except Exception as error:
        raise ConfigError(
            f"the plugin {type_name} ({plugins[type_name].value}) cannot be imported: {error!r}",
            hint="is everything that it needs installed?",
        ) from error


def _imported(type_name: str, module: str, attribute: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            f"{module!r} of the callback {type_name!r} cannot be imported: {error!r}",
            hint="is its directory on PYTHONPATH, and what it needs installed?",
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name in vars(found) if not name.startswith("_")] if hasattr(found, "__dict__") else []
            raise ConfigError(f"{module} has no {attribute!r}", hint=nearest(part, names))
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{type_name} is no class but {found!r}", hint="name a class of callbacks")
    return found
