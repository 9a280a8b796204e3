"""Callbacks from `ckptmgr.yaml`: each entry is found, its parameters are checked, and it is made.

callbacks:
  - type: LossMonitorCallback
    params: {log_interval: 50}
  - type: my_package.module:MyCallback
    priority: LOG
    run_async: true
  - EarlyStoppingCallback
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ckptmgr.callbacks.builtin import find
from ckptmgr.callbacks.hooks import check_hooks
from ckptmgr.core.document import Document, Place, nearest
from ckptmgr.core.errors import ConfigError
from ckptmgr.training.config import CallbackSection, manager_from, read_config


def callbacks_of(
    source: str | os.PathLike[str] | Mapping[str, Any], *, manager: Any = None
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The callbacks that a configuration names, each with the arguments of `CallbackManager.add`.

    If it describes a run and names no `SaveModelCallback`, one comes first: it would save nothing otherwise.

    Args:
        source: a path, or a mapping with the keys of the file.
        manager: handed to callbacks that take a `manager`; by default the one that the configuration describes.

    Raises:
        ConfigError: a mistake, with its line and what is allowed.
    """
    config, document = read_config(source)
    if manager is None:
        manager = manager_from(config, document)
    entries = [CallbackSection(type=each) if isinstance(each, str) else each for each in config.callbacks]
    if manager is not None and not any(entry.type == "SaveModelCallback" for entry in entries):
        yield find("SaveModelCallback")(manager), {}
    for index, entry in enumerate(entries):
        place: Place = ("callbacks", index)
        callback = _made(entry, document, place, manager)
        yield callback, {"name": entry.name, "priority": entry.priority, "run_async": entry.run_async}


def _made(entry: CallbackSection, document: Document, place: Place, manager: Any) -> Any:
    try:
        made = find(entry.type)
    except ConfigError as error:
        raise document.error((*place, "type"), error.message, error.hint) from error
    params = dict(entry.params)
    accepted, required, takes_all = _parameters(made)
    if "manager" in accepted and "manager" not in params:
        if manager is not None:
            params["manager"] = manager
        elif "manager" in required:
            raise document.error(
                place,
                f"{entry.type} needs a run to save to",
                "add `run: s3://bucket/experiments/name`, or give from_config a manager",
            )
    for name in params:
        if name not in accepted and not takes_all:
            raise document.error(
                (*place, "params", name),
                f"{entry.type} has no parameter {name!r}",
                nearest(name, accepted - {"manager"}),
            )
    missing = sorted(required - params.keys())
    if missing:
        raise document.error(place, f"{entry.type} needs {', '.join(missing)}", f"add `params: {{{missing[0]}: …}}`")
    try:
        callback = made(**params)
        check_hooks(callback)
        return callback
    except ConfigError as error:
        raise document.error((*place, "params"), error.message, error.hint) from error
    except Exception as error:
        raise document.error(
            (*place, "params"), f"{entry.type} refused its parameters: {error!r}", "see its documentation"
        ) from error


def _parameters(made: Any) -> tuple[frozenset[str], frozenset[str], bool]:
    """What a class takes by name, what it needs, and whether it takes any other."""
    try:
        parameters = inspect.signature(made).parameters.values()
    except (TypeError, ValueError):
        return frozenset(), frozenset(), True
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return (
        frozenset(p.name for p in named),
        frozenset(p.name for p in named if p.default is p.empty),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )
