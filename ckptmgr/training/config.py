"""`ckptmgr.yaml`: where a run is kept, when it is saved, what is kept of it, and which callbacks take part.

    store: s3://bucket/experiments
    run: llama-7b
    save: {every_n_steps: 500, best: eval_loss:min:2}
    keep: {last: 3, best: eval_loss:min:1, within: 7d}
    callbacks:
      - {type: LossMonitorCallback, params: {log_interval: 50}}

JSON with the same keys does as well. `${NAME}` and `${NAME:-default}` in a value are the environment's. CKPTMGR_STORE, CKPTMGR_RUN, CKPTMGR_LOCAL_DIR
and CKPTMGR_TRANSFER override the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from ckptmgr.core.document import UNFIT, Document, Place, parse
from ckptmgr.core.errors import ConfigError
from ckptmgr.core.policies import AnyOf, Best, EveryMinutes, EveryNEpochs, EveryNSteps, SavePolicy, Worst
from ckptmgr.core.retention import AnyRule, KeepBest, KeepEveryNSteps, KeepLast, KeepWithin, KeepWorst, RetentionRule
from ckptmgr.core.selectors import better_direction, split_ranked
from ckptmgr.core.shapes import fit
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
    """One callback; but for `type`, `params` and `enabled`, its keys are arguments of `CallbackManager.add`."""

    type: Annotated[str, msgspec.Meta(description="A built-in's name, a plugin's, or package.module:Class.")]
    params: Annotated[dict[str, Any], msgspec.Meta(description="Arguments of the class, by name.")] = {}
    enabled: Annotated[bool, msgspec.Meta(description="false: it is checked, and takes no part.")] = True
    name: Annotated[str | None, msgspec.Meta(description="In logs and in saved state; by default its class.")] = None
    priority: Annotated[
        int | Literal["FIRST", "SAVE", "NORMAL", "STOP", "LOG"] | None,
        msgspec.Meta(description="Smaller numbers run first: FIRST 0, SAVE 25, NORMAL 50, STOP 75, LOG 100."),
    ] = None
    critical: Annotated[
        bool | list[str] | None,
        msgspec.Meta(description="true: what it raises ends the training; a list: in these events only."),
    ] = None
    run_async: Annotated[
        bool,
        msgspec.Meta(description="Run it in a thread of its own, which training never waits for; it may only watch."),
    ] = False


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
    """A configuration from a file, or from the values themselves, which are taken as they are.

    Returns:
        It, as far as it holds no mistakes, and the document that it came from, which has those; `Document.raise_mistakes` raises them.

    Raises:
        ConfigError: the file cannot be read at all.
    """
    if isinstance(source, Mapping):
        document = Document(value=dict(source))
    elif not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"{source!r} is no configuration", hint="give the path of a file, or its values as a dict")
    else:
        path = Path(source)
        try:
            document = parse(path.read_text(encoding="utf-8"), str(path), os.environ)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror}", hint="give the configuration's path"
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is no text in UTF-8: {error}", hint="is it the configuration?") from error
    config = fit({} if document.value is None else document.value, Config, (), document)
    return Config() if config is UNFIT else _overridden(config), document


def schema() -> dict[str, Any]:
    """The JSON schema of the file, for editors."""
    made = msgspec.json.schema(Config)
    for section in made["$defs"].values():
        for key in section["properties"].values():
            options = key.get("anyOf", [key])
            if {"integer", "number", "boolean", None} & {each.get("type") for each in options if "$ref" not in each}:
                # What is no text may be a variable, which is one.
                told = (
                    [{name: key.pop(name) for name in ("type", "enum") if name in key}] if options == [key] else options
                )
                key["anyOf"] = [*told, {"type": "string", "pattern": r"\$\{"}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "ckptmgr.yaml", **made}


def run_url(config: Config, document: Document) -> str | None:
    """The run that it is about; None if it names none, or a name without a store, which is a mistake."""
    if config.run is None:
        if config.store is not None and not _is_given("run", document):
            document.mistake(("store",), "a store without a run", "add `run: NAME`")
        return None
    if "://" in config.run or config.run.startswith((".", "/", "~")):
        return os.path.expanduser(config.run)
    if config.store is None:
        if not _is_given("store", document):
            hint = "add `store: s3://bucket/experiments`, or give a URL"
            document.mistake(("run",), f"{config.run!r} is a name, and there is no store", hint)
        return None
    return f"{config.store.rstrip('/')}/{config.run}"


def names_run(config: Config, document: Document) -> bool:
    """Whether it says where to save, be it in vain."""
    return bool(config.run or config.store or _is_given("run", document) or _is_given("store", document))


def manager_from(config: Config, document: Document) -> CheckpointManager | None:
    """The manager that it describes; None if it names no run. Nothing is touched before its first use.

    What makes no sense is among the mistakes of `document`, and left out.
    """
    url = run_url(config, document)
    given: dict[str, Any] = {name: value for name in _PLAIN if (value := getattr(config, name)) is not None}
    if config.refuse_drift is not None:
        given["refuse_drift"] = [each for each in config.refuse_drift if each is not UNFIT]
    given |= {
        "save": save_policy(config.save, document),
        "keep": retention_rule(config.keep, document, "keep"),
        **_uploads(config.upload, document),
    }
    if (local := retention_rule(config.keep_local, document, "keep_local")) is not None:
        given["keep_local"] = local
    if url is not None or names_run(config, document):
        from ckptmgr.training.manager import CheckpointManager  # which loads torch

        # In place of a run that is named in vain, any: the rest is to be looked at, too.
        make = partial(CheckpointManager, url or "./run")
        made: CheckpointManager | None = document.make(make, given, _where)
        return made
    sections = (*_PLAIN, "refuse_drift", "save", "keep", "keep_local", "upload")
    without = [name for name in sections if getattr(config, name) is not None]
    if without:
        hint = "add `run: s3://bucket/experiments/name`"
        document.mistake((without[0],), "there is no run that this is about", hint)
    return None


def save_policy(section: SaveSection | None, document: Document) -> SavePolicy | None:
    """What `save` says."""
    if section is None:
        return None
    parts: list[SavePolicy] = []
    timed: list[tuple[str, Any]] = [
        ("every_n_steps", EveryNSteps),
        ("every_n_epochs", EveryNEpochs),
        ("every_minutes", EveryMinutes),
    ]
    for name, policy in timed:
        if (every := getattr(section, name)) is not None:
            with document.at("save", name):
                parts.append(policy(every))
    kinds: list[tuple[Any, str]] = [(Best, "best"), (Worst, "worst")]
    for kind, name in kinds:
        for place, (metric, mode, k) in _ranked(getattr(section, name), ("save", name), document):
            try:
                direction = better_direction(metric, mode, ())
            except ConfigError as error:
                hint = "write METRIC:min or METRIC:max, and how many as METRIC:min:K"
                document.mistake(place, error.message, hint)
            else:
                with document.at(*place):
                    parts.append(kind(metric, mode=direction, k=k))
    with document.at("save"):
        return AnyOf(tuple(parts)) if len(parts) > 1 else parts[0] if parts else None
    return None


def retention_rule(section: KeepSection | None, document: Document, name: str) -> RetentionRule | None:
    """What `keep` or `keep_local`, which is `name`, says."""
    if section is None:
        return None
    rules: list[RetentionRule] = []
    counted: list[tuple[str, Any]] = [("last", KeepLast), ("every_n_steps", KeepEveryNSteps)]
    for key, rule in counted:
        if (number := getattr(section, key)) is not None:
            with document.at(name, key):
                rules.append(rule(number))
    kinds: list[tuple[str, Any]] = [("best", KeepBest), ("worst", KeepWorst)]
    for key, rule in kinds:
        for place, each in _ranked(getattr(section, key), (name, key), document):
            with document.at(*place):
                rules.append(rule(*each))
    if section.within is not None:
        seconds = parse_duration(section.within)
        if seconds is None:
            hint = "write 12h, 7d or 2w"
            document.mistake((name, "within"), f"{section.within!r} is no length of time", hint)
        else:
            with document.at(name, "within"):
                rules.append(KeepWithin(seconds))
    return AnyRule(rules=tuple(rules)) if len(rules) > 1 else rules[0] if rules else None


def _uploads(section: UploadSection | None, document: Document) -> dict[str, Any]:
    if section is None:
        return {}
    values = {name: value for name in section.__struct_fields__ if (value := getattr(section, name)) is not None}
    for name in ("max_bytes", "min_free_bytes"):
        if isinstance(text := values.get(name), str):
            if (size := parse_size(text)) is None:
                hint = "write 50GB, 64MiB or a number of bytes"
                document.mistake(("upload", name), f"{text!r} is no size", hint)
                del values[name]
            else:
                values[name] = size
    queue = {name: values.pop(name) for name in QueueRules.__slots__ if name in values}
    budget = {own: values.pop(name) for own, name in _BUDGET.items() if name in values}
    groups: list[tuple[str, Any, dict[str, Any]]] = [
        ("queue", QueueRules, queue),
        ("failures", FailureBudget, budget),
    ]
    for name, kind, given in groups:
        if given and (made := document.make(kind, given, _where)) is not None:
            values[name] = made
    return values


# The file's name for what FailureBudget calls otherwise.
_BUDGET = {"failures": "failures", "without_durable_s": "without_durable_s", "action": "on_failures"}
_PLAIN = ("local_dir", "on_existing", "on_save_error", "strict")


def _where(argument: str) -> Place:
    """Where the file has an argument of CheckpointManager, QueueRules or FailureBudget."""
    name = _BUDGET.get(argument, argument)
    return ("upload", name) if name in UploadSection.__struct_fields__ else (name,) if name else ("run",)


def _is_given(name: str, document: Document) -> bool:
    """Whether the file has it, be it in vain."""
    return isinstance(document.value, Mapping) and document.value.get(name) is not None


def _ranked(value: Any, place: Place, document: Document) -> Iterator[tuple[Place, tuple[str, Any, int]]]:
    """METRIC, MODE and K of each, and where it stands; without those in which something does not fit."""
    several = {(*place, index): each for index, each in enumerate(value)} if isinstance(value, list) else {place: value}
    for where, each in several.items():
        if isinstance(each, str):
            yield where, split_ranked(each)
        elif isinstance(each, Ranked) and not document.is_flawed(where):
            yield where, (each.metric, each.mode, each.k)


def _overridden(config: Config) -> Config:
    """What the environment says instead. CKPTMGR_LOCAL_DIR and CKPTMGR_TRANSFER are looked at here, too: an argument would win over them."""
    changes: dict[str, Any] = {}
    for name, variable in (("store", STORE_ENV), ("run", RUN_ENV), ("local_dir", "CKPTMGR_LOCAL_DIR")):
        if value := os.environ.get(variable):
            changes[name] = value
    if config.upload is not None and os.environ.get("CKPTMGR_TRANSFER"):
        changes["upload"] = msgspec.structs.replace(config.upload, transfer=None)
    return msgspec.structs.replace(config, **changes) if changes else config


__all__ = ["CallbackSection", "Config", "manager_from", "names_run", "read_config", "run_url", "schema"]
