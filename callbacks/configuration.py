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
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ckptmgr.callbacks.builtin import find
from ckptmgr.callbacks.hooks import check_hooks
from ckptmgr.core.document import UNFIT, Document, Place, close_to, nearest
from ckptmgr.core.errors import ConfigError
from ckptmgr.core.shapes import annotation_of, fit, settled
from ckptmgr.training.config import CallbackSection, manager_from, names_run, read_config

# What an entry says for `CallbackManager.add`.
_HOW = ("name", "priority", "critical", "run_async")


def add_configured(
    add: Callable[..., None], source: str | os.PathLike[str] | Mapping[str, Any], *, manager: Any = None
) -> None:
    """Add the callbacks that a configuration names, with what their entries say.

    If it describes a run and names no `SaveModelCallback`, one comes first: it would save nothing otherwise.

    Args:
        add: `CallbackManager.add`, or what takes the same. It may have been called when this raises.
        source: a path, or a mapping with the keys of the file.
        manager: handed to callbacks that take a `manager`; by default the one that the configuration describes.

    Raises:
        ConfigFileError: mistakes, all of them, each with its line and what is allowed.
        ConfigError: the file cannot be read.
    """
    config, document = read_config(source)
    if manager is None:
        manager = manager_from(config, document)
    lacks_run = manager is None and not names_run(config, document)
    entries = [
        (("callbacks", index), CallbackSection(type=each) if isinstance(each, str) else each)
        for index, each in enumerate(config.callbacks)
        if each is not UNFIT
    ]
    if manager is not None and not any(entry.type == "SaveModelCallback" for _, entry in entries):
        add(find("SaveModelCallback")(manager))
    for place, entry in entries:
        callback = _made(entry, place, document, manager, lacks_run=lacks_run)
        if callback is not None and entry.enabled:
            how = {name: getattr(entry, name) for name in _HOW}
            document.make(partial(add, callback), how, partial(_beside, place))
    document.raise_mistakes()


def _made(entry: CallbackSection, place: Place, document: Document, manager: Any, *, lacks_run: bool) -> Any:
    """The callback of an entry; None if it cannot be made. What is wrong is among the mistakes of `document`."""
    maker: Any = None
    with document.at(*place, "type"):
        maker = find(entry.type)
    if maker is None:
        return None
    kinds, needed, takes_all = _parameters(maker)
    unknown = [] if takes_all else sorted(entry.params.keys() - kinds.keys())
    for name in unknown:
        hint = nearest(name, kinds.keys() - {"manager"})
        document.mistake((*place, "params", name), f"{entry.type} has no parameter {name!r}", hint)
    fitted = {
        name: settled(fit(value, kinds.get(name, Any), (*place, "params", name), document))
        for name, value in entry.params.items()
        if name not in unknown
    }
    params = {name: value for name, value in fitted.items() if value is not UNFIT}
    if "manager" in kinds and manager is not None:
        params.setdefault("manager", manager)
    elif "manager" in needed and lacks_run:
        hint = "add `run: s3://bucket/experiments/name`, or give from_config a manager"
        document.mistake(place, f"{entry.type} needs a run to save to", hint)
    # One that is there in vain, or was probably meant by another name, is not missed as well.
    missing = sorted(needed - entry.params.keys() - {close_to(name, kinds) for name in unknown} - {"manager"})
    if missing:
        document.mistake(place, f"{entry.type} needs {', '.join(missing)}", f"add `params: {{{missing[0]}: …}}`")
    if not needed <= params.keys():
        return None
    return document.make(
        partial(_built, entry.type, maker), params, partial(_beside, (*place, "params")), needed=needed
    )


def _built(name: str, maker: Any, **params: Any) -> Any:
    try:
        callback = maker(**params)
        check_hooks(callback)
        return callback
    except ConfigError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
        raise ConfigError(f"{name} refused its parameters: {error!r}{where}", hint="see its documentation") from error


def _beside(place: Place, name: str) -> Place:
    return (*place, name) if name else place


def _parameters(maker: Any) -> tuple[Mapping[str, Any], frozenset[str], bool]:
    """What a class takes by name, and of which kind each is; what it needs; and whether it takes any other."""
    try:
        parameters = inspect.signature(maker).parameters.values()
    except (TypeError, ValueError, NameError):
        return {}, frozenset(), True
    function = inspect.unwrap(maker.__init__ if inspect.isclass(maker) else maker)
    names = getattr(function, "__globals__", None) or vars(sys.modules.get(getattr(maker, "__module__", ""), object))
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return (
        {each.name: Any if each.annotation is each.empty else annotation_of(each.annotation, names) for each in named},
        frozenset(each.name for each in named if each.default is each.empty),
        any(each.kind is each.VAR_KEYWORD for each in parameters),
    )
