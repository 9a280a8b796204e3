"""YAML and JSON documents that remember in which line each value stands, for messages that a reader can act on."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

from ckptmgr.core.errors import ConfigError

Place: TypeAlias = tuple["str | int", ...]
"""Where a value stands: the keys and indices that lead to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A configuration as plain values.

    Attributes:
        value: what it holds.
        name: of its file; "" if it never was text.
        lines: the line of each value, counted from 1; empty if it never was text.
    """

    value: Any
    name: str = ""
    lines: dict[Place, int] = field(default_factory=dict)

    def error(self, place: Place, what: str, hint: str = "") -> ConfigError:
        """The error of a mistake at `place`, to be raised."""
        known = next((place[:length] for length in range(len(place), -1, -1) if place[:length] in self.lines), None)
        where = f"{self.name}:{self.lines[known]}" if known is not None else self.name
        said = spelled(place)
        parts = [part for part in (where, said) if part]
        return ConfigError(f"{': '.join(parts)}: {what}" if parts else what, hint=hint)


def parse(text: str, name: str) -> Document:
    """Read YAML, or JSON, which is YAML too.

    Raises:
        ConfigError: it is neither, with the line; or a key stands twice.
    """
    import yaml

    try:
        kind = _loader()
        root = yaml.compose(text, Loader=kind)
        loader = kind("")
        lines: dict[Place, int] = {}
        value = None if root is None else _plain(root, (), lines, loader, name, set())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f":{mark.line + 1}"
        raise ConfigError(
            f"{name}{line}: this is no YAML: {error.problem or error.context}",
            hint="look at the indentation and the quotes around that line",
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: this is no YAML: {error}", hint="is it a text file?") from error
    return Document(value=value, name=name, lines=lines)


@cache
def _loader() -> Any:
    """PyYAML's safe loader, for which 1e-3 is a number, as in YAML 1.2 and JSON; by itself it wants 1.0e-3."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
    return Loader


def spelled(place: Place) -> str:
    """A place for a reader: `callbacks[0].params.patience`."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def nearest(word: str, known: Iterable[str]) -> str:
    """What a reader can do about an unknown word: the one that was probably meant, else all there are."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not close:
        lowered = {name.lower(): name for name in names}
        close = [lowered[low] for low in difflib.get_close_matches(word.lower(), list(lowered), n=1, cutoff=0.6)]
    everything = f"there is {', '.join(names)}" if names else "there is none"
    return f"did you mean {close[0]}? ({everything})" if close else everything


def _plain(node: Any, place: Place, lines: dict[Place, int], loader: Any, name: str, above: set[int]) -> Any:
    import yaml

    lines[place] = node.start_mark.line + 1
    if id(node) in above:
        raise ConfigError(f"{name}:{lines[place]}: an anchor contains itself", hint="write the values out")
    above = {*above, id(node)}
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise ConfigError(
                    f"{name}:{key_node.start_mark.line + 1}: the key {key!r} is no text", hint="put it in quotes"
                )
            if key in found:
                raise ConfigError(
                    f"{name}:{key_node.start_mark.line + 1}: {spelled((*place, key))} stands here for the second time",
                    hint="keep one of them",
                )
            found[key] = _plain(value_node, (*place, key), lines, loader, name, above)
            lines[(*place, key)] = key_node.start_mark.line + 1
        return found
    if isinstance(node, yaml.SequenceNode):
        return [_plain(each, (*place, index), lines, loader, name, above) for index, each in enumerate(node.value)]
    return loader.construct_object(node, deep=True)
