"""`ckptmgr.yaml`: where a run is kept, when it is saved, what is kept of it, and which callbacks take part.

    store: s3://bucket/experiments
    run: llama-7b
    save: {every_n_steps: 500, best: eval_loss:min:2}
    keep: {last: 3, best: eval_loss:min:1, within: 7d}
    callbacks:
      - {type: LossMonitorCallback, params: {log_interval: 50}}

JSON with the same keys does as well. CKPTMGR_STORE, CKPTMGR_RUN, CKPTMGR_LOCAL_DIR and CKPTMGR_TRANSFER override the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ckptmgr.core.document import Document, Place, nearest, parse, spelled
from ckptmgr.core.errors import ConfigError
from ckptmgr.core.policies import AnyOf, Best, EveryMinutes, EveryNEpochs, EveryNSteps, SavePolicy, Worst
from ckptmgr.core.retention import AnyRule, KeepBest, KeepEveryNSteps, KeepLast, KeepWithin, KeepWorst, RetentionRule
from ckptmgr.core.selectors import better_direction, split_ranked
from ckptmgr.core.units import parse_duration, parse_size
from ckptmgr.transfer.alarm import FailureBudget
from ckptmgr.transfer.queue import QueueRules

if TYPE_CHECKING:
    from ckptmgr.training.manager import CheckpointManager

STORE_ENV, RUN_ENV = "CKPTMGR_STORE", "CKPTMGR_RUN"


class _Section(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Ranked(_Section):
    """A metric and how many of its best or worst; as text `METRIC[:MODE[:K]]`."""

    metric: str
    mode: Literal["min", "max"] | None = None
    k: int = 1


class SaveSection(_Section):
    """When to save; what is given adds up."""

    every_n_steps: int | None = None
    every_n_epochs: int | None = None
    every_minutes: float | None = None
    best: str | Ranked | list[str | Ranked] | None = None
    worst: str | Ranked | list[str | Ranked] | None = None


class KeepSection(_Section):
    """What is kept; what is given adds up."""

    last: int | None = None
    every_n_steps: int | None = None
    best: str | Ranked | list[str | Ranked] | None = None
    worst: str | Ranked | list[str | Ranked] | None = None
    within: str | None = None


class UploadSection(_Section):
    """How uploads run: see `QueueRules`, `FailureBudget` and `CheckpointManager`."""

    transfer: Literal["process", "thread"] | None = None
    max_bytes: int | str | None = None
    min_free_bytes: int | str | None = None
    when_full: Literal["keep-newest", "skip", "wait"] | None = None
    when_busy: Literal["wait", "skip"] | None = None
    max_block_s: float | None = None
    linger_s: float | None = None
    close_timeout_s: float | None = None
    retry_after_s: float | None = None
    failures: int | None = None
    without_durable_s: float | None = None
    on_failures: Literal["warn", "stop"] | None = None
    prometheus: str | None = None


class CallbackSection(_Section):
    """One callback: `type` is a built-in's name, a plugin's, or `package.module:Class`."""

    type: str
    params: dict[str, Any] = {}
    name: str | None = None
    priority: int | Literal["FIRST", "SAVE", "NORMAL", "STOP", "LOG"] | None = None
    run_async: bool = False


class Config(_Section):
    """The whole file."""

    store: str | None = None
    run: str | None = None
    local_dir: str | None = None
    save: SaveSection | None = None
    keep: KeepSection | None = None
    keep_local: KeepSection | None = None
    upload: UploadSection | None = None
    on_existing: Literal["refuse", "new-lineage"] | None = None
    on_save_error: Literal["log", "raise"] | None = None
    strict: bool | None = None
    refuse_drift: list[str] | None = None
    callbacks: list[str | CallbackSection] = []


def read_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[Config, Document]:
    """A configuration from a file, or from the values themselves.

    Returns:
        It, and the document that it came from, for messages about what its values lead to.

    Raises:
        ConfigError: the file cannot be read, or holds a mistake: its line, and what is allowed.
    """
    if isinstance(source, Mapping):
        document = Document(value=dict(source))
    elif not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"{source!r} is no configuration", hint="give the path of a file, or its values as a dict")
    else:
        path = Path(source)
        try:
            document = parse(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror}", hint="give the configuration's path"
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is no text in UTF-8: {error}", hint="is it the configuration?") from error
    value = {} if document.value is None else document.value
    if not isinstance(value, dict):
        raise document.error(
            (), f"this is no mapping but {type(value).__name__}", f"the keys are {', '.join(_keys(()))}"
        )
    try:
        config = msgspec.convert(value, Config)
    except msgspec.ValidationError as error:
        raise _explained(document, str(error)) from error
    return _overridden(config), document


def schema() -> dict[str, Any]:
    """The JSON schema of the file, for editors."""
    made = msgspec.json.schema(Config)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "ckptmgr.yaml", **made}


def run_url(config: Config, document: Document) -> str | None:
    """The run that it is about; None if it names none.

    Raises:
        ConfigError: a name without a store.
    """
    if config.run is None:
        if config.store is not None:
            raise document.error(("store",), "a store without a run", "add `run: NAME`")
        return None
    if "://" in config.run or config.run.startswith((".", "/", "~")):
        return os.path.expanduser(config.run)
    if config.store is None:
        raise document.error(
            ("run",),
            f"{config.run!r} is a name, and there is no store",
            "add `store: s3://bucket/experiments`, or give a URL",
        )
    return f"{config.store.rstrip('/')}/{config.run}"


def manager_from(config: Config, document: Document) -> CheckpointManager | None:
    """The manager that it describes; None if it names no run. Nothing is touched before its first use.

    Raises:
        ConfigError: a value makes no sense.
    """
    from ckptmgr.training.manager import CheckpointManager

    url = run_url(config, document)
    if url is None:
        for name in (
            "local_dir",
            "save",
            "keep",
            "keep_local",
            "upload",
            "on_existing",
            "on_save_error",
            "strict",
            "refuse_drift",
        ):
            if getattr(config, name) is not None:
                raise document.error(
                    (name,), "there is no run that this is about", "add `run: s3://bucket/experiments/name`"
                )
        return None
    plain = ("local_dir", "on_existing", "on_save_error", "strict", "refuse_drift")
    given: dict[str, Any] = {name: getattr(config, name) for name in plain if getattr(config, name) is not None}
    with _placed(document, ("save",)):
        given["save"] = save_policy(config.save, document)
    with _placed(document, ("keep",)):
        given["keep"] = retention_rule(config.keep, document, ("keep",))
    with _placed(document, ("keep_local",)):
        if (local := retention_rule(config.keep_local, document, ("keep_local",))) is not None:
            given["keep_local"] = local
    with _placed(document, ("upload",)):
        given |= _uploads(config.upload, document)
    with _placed(document, ()):
        return CheckpointManager(url, **given)


def save_policy(section: SaveSection | None, document: Document) -> SavePolicy | None:
    """What `save` says."""
    if section is None:
        return None
    parts: list[SavePolicy] = []
    if section.every_n_steps is not None:
        parts.append(EveryNSteps(section.every_n_steps))
    if section.every_n_epochs is not None:
        parts.append(EveryNEpochs(section.every_n_epochs))
    if section.every_minutes is not None:
        parts.append(EveryMinutes(section.every_minutes))
    kinds: list[tuple[Any, str]] = [(Best, "best"), (Worst, "worst")]
    for kind, name in kinds:
        for index, (metric, mode, k) in enumerate(_ranked(getattr(section, name))):
            try:
                direction = better_direction(metric, mode, ())
            except ConfigError as error:
                raise document.error(
                    ("save", name, index), error.message, "write METRIC:min or METRIC:max, and how many as METRIC:min:K"
                ) from error
            parts.append(kind(metric, mode=direction, k=k))
    return AnyOf(tuple(parts)) if len(parts) > 1 else parts[0] if parts else None


def retention_rule(section: KeepSection | None, document: Document, place: Place) -> RetentionRule | None:
    """What `keep` or `keep_local` says."""
    if section is None:
        return None
    rules: list[RetentionRule] = []
    if section.last is not None:
        rules.append(KeepLast(section.last))
    if section.every_n_steps is not None:
        rules.append(KeepEveryNSteps(section.every_n_steps))
    rules += [KeepBest(*each) for each in _ranked(section.best)]
    rules += [KeepWorst(*each) for each in _ranked(section.worst)]
    if section.within is not None:
        seconds = parse_duration(section.within)
        if seconds is None:
            raise document.error((*place, "within"), f"{section.within!r} is no length of time", "write 12h, 7d or 2w")
        rules.append(KeepWithin(seconds))
    return AnyRule(rules=tuple(rules)) if len(rules) > 1 else rules[0] if rules else None


def _uploads(section: UploadSection | None, document: Document) -> dict[str, Any]:
    if section is None:
        return {}
    values = {name: value for name in section.__struct_fields__ if (value := getattr(section, name)) is not None}
    for name in ("max_bytes", "min_free_bytes"):
        if isinstance(text := values.get(name), str):
            size = parse_size(text)
            if size is None:
                raise document.error(("upload", name), f"{text!r} is no size", "write 50GB, 64MiB or a number of bytes")
            values[name] = size
    queue = {name: values.pop(name) for name in QueueRules.__slots__ if name in values}
    budget = {
        own: values.pop(name)
        for name, own in (
            ("failures", "failures"),
            ("without_durable_s", "without_durable_s"),
            ("on_failures", "action"),
        )
        if name in values
    }
    if queue:
        values["queue"] = QueueRules(**queue)
    if budget:
        values["failures"] = FailureBudget(**budget)
    return values


def _ranked(value: str | Ranked | Sequence[str | Ranked] | None) -> list[tuple[str, Any, int]]:
    several = [] if value is None else [value] if isinstance(value, (str, Ranked)) else value
    return [split_ranked(each) if isinstance(each, str) else (each.metric, each.mode, each.k) for each in several]


def _overridden(config: Config) -> Config:
    """What the environment says instead. CKPTMGR_LOCAL_DIR and CKPTMGR_TRANSFER are looked at here, too: an argument would win over them."""
    changes: dict[str, Any] = {}
    for name, variable in (("store", STORE_ENV), ("run", RUN_ENV), ("local_dir", "CKPTMGR_LOCAL_DIR")):
        if value := os.environ.get(variable):
            changes[name] = value
    if config.upload is not None and os.environ.get("CKPTMGR_TRANSFER"):
        changes["upload"] = msgspec.structs.replace(config.upload, transfer=None)
    return msgspec.structs.replace(config, **changes) if changes else config


class _placed:
    """Puts the place in front of what values of it lead to."""

    def __init__(self, document: Document, place: Place) -> None:
        self._document, self._place = document, place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        already = (
            isinstance(error, ConfigError) and self._document.name and error.message.startswith(self._document.name)
        )
        if isinstance(error, ConfigError) and not already:
            raise self._document.error(self._place, error.message, error.hint) from error


_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<place>[^`]*)`)?$", re.DOTALL)


def _explained(document: Document, message: str) -> ConfigError:
    """The error of a value that is not as it should be, with its line."""
    match = _PLACE.match(message)
    what, path = (match["what"], match["place"] or "") if match is not None else (message, "")
    place = _place(path, document.value)
    unknown = re.search(r"unknown field `([^`]*)`", what)
    if unknown is not None:
        return document.error((*place, unknown[1]), "this key is not known", nearest(unknown[1], _keys(place)))
    missing = re.search(r"missing required field `([^`]*)`", what)
    if missing is not None:
        return document.error(place, f"{missing[1]} is missing", f"add `{missing[1]}: …`")
    allowed = _allowed(place)
    return document.error(place, what[:1].lower() + what[1:], f"it is one of {', '.join(allowed)}" if allowed else "")


def _place(path: str, value: Any) -> Place:
    """msgspec's `.callbacks[0].params[...]` as keys and indices; `[...]` is some key of a mapping, which it does not name."""
    place: list[str | int] = []
    for name, index in re.findall(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]", path):
        if name:
            place.append(name)
        elif index.isdecimal():
            place.append(int(index))
    return tuple(place)


_SECTIONS: dict[str, Any] = {
    "save": SaveSection,
    "keep": KeepSection,
    "keep_local": KeepSection,
    "upload": UploadSection,
    "callbacks": CallbackSection,
}


def _section(place: Place) -> Any:
    words = [part for part in place if isinstance(part, str)]
    if len(words) >= 2 and words[-1] in ("best", "worst"):
        return Ranked
    return _SECTIONS.get(words[0]) if words else Config


def _keys(place: Place) -> list[str]:
    section = _section(place)
    return [] if section is None else list(section.__struct_fields__)


def _allowed(place: Place) -> list[str]:
    """The values of a key that has only a few."""
    words = [part for part in place if isinstance(part, str)]
    if not words:
        return []
    section = _section(place[:-1]) if isinstance(place[-1], str) else None
    annotation = None if section is None else section.__annotations__.get(words[-1], "")
    found = re.search(r"Literal\[([^\]]*)\]", str(annotation))
    return [word.strip().strip("\"'") for word in found[1].split(",")] if found else []


__all__ = ["CallbackSection", "Config", "manager_from", "read_config", "run_url", "schema", "spelled"]
