"""YAML and JSON documents that remember in which line each value stands, and collect what is wrong with them for a reader to mend at once.

`${NAME}` in a value is the environment's, `${NAME:-text}` has a default for a variable that is unset or empty, and `$${` is a plain `${`. A variable
brings text or a number into one value; it cannot bring keys. What is said of a mistake shows `${NAME}`, never what it stands for.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeAlias

from ckptmgr.core.errors import ConfigError, ConfigFileError, Mistake
from ckptmgr.core.redaction import without_secrets

Place: TypeAlias = tuple["str | int", ...]
"""Where a value stands: the keys and indices that lead to it."""

#: In place of a value that is not as it should be, of which a mistake says so.
UNFIT: Final = object()

# What is shorter is no secret, and may be part of any word; these are words of the messages.
_SHORTEST_SECRET = 4
_WORDS = ("true", "false", "null")


class FromEnvironment(str):
    """A text with variables put in.

    Attributes:
        raw: as it stands in the file.
        read: what YAML reads in it without quotes: a number, true, or text.
        is_quoted: it stands in quotes.
    """

    raw: str
    read: Any
    is_quoted: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Document:
    """A configuration as plain values, and what is wrong with it.

    Attributes:
        value: what it holds. Texts with variables are `FromEnvironment`.
        name: of its file; "" if it never was text.
        lines: the line of each value, counted from 1; empty if it never was text.
        mistakes: found so far.
    """

    value: Any = None
    name: str = ""
    lines: dict[Place, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    _hidden: dict[str, str] = field(default_factory=dict, init=False)

    def mistake(self, place: Place, what: str, hint: str = "", *, line: int | None = None) -> None:
        """Note that something is wrong at `place`; `line` in place of the line that it stands in."""
        known = next((place[:length] for length in range(len(place), -1, -1) if place[:length] in self.lines), None)
        self.mistakes.append(
            Mistake(
                file=self.name,
                line=line if line is not None or known is None else self.lines[known],
                key=spelled(place),
                what=self._shown(what),
                hint=self._shown(hint),
            )
        )

    def is_flawed(self, place: Place) -> bool:
        """Whether a mistake is known of `place`, or of something in it."""
        key = spelled(place)
        return any(each.key == key or each.key.startswith((f"{key}.", f"{key}[")) for each in self.mistakes)

    @contextlib.contextmanager
    def at(self, *place: str | int) -> Iterator[None]:
        """What the body raises as a ConfigError is a mistake at `place`, and goes no further."""
        try:
            yield
        except ConfigError as error:
            self.mistake(place, error.message, error.hint)

    def make(
        self,
        make: Callable[..., Any],
        given: Mapping[str, Any],
        place: Callable[[str], Place],
        *,
        needed: Collection[str] = (),
    ) -> Any:
        """What `make` makes of arguments. Each that it refuses by name (`ConfigError.argument`) is a mistake, and left out, so that it comes to the next.

        Args:
            place: of an argument; of "", where it is about none of them.
            needed: arguments that it cannot do without.

        Returns:
            None, or what it made of those it did not refuse.
        """
        left = dict(given)
        while True:
            try:
                return make(**left)
            except ConfigError as error:
                named = error.argument if error.argument in left else ""
                # What it misses once one is left out is no mistake of the reader's.
                if named or len(left) == len(given):
                    self.mistake(place(named), error.message, error.hint)
                if not named or named in needed:
                    return None
                del left[named]

    def raise_mistakes(self) -> None:
        """Raise what is wrong, if anything is.

        Raises:
            ConfigFileError: with all mistakes.
        """
        if not self.mistakes:
            return
        found = sorted(self.mistakes, key=lambda each: each.line or 0)
        if len(found) == 1:
            (only,) = found
            raise ConfigFileError(str(only).removesuffix(f" - {only.hint}"), hint=only.hint, mistakes=tuple(found))
        said = "\n".join([f"{self.name or 'the configuration'} has {len(found)} mistakes:", *map(str, found)])
        raise ConfigFileError(said, mistakes=tuple(found))

    def hide(self, value: str, raw: str) -> None:
        """From now on `raw` is shown in place of `value`, which came from the environment."""
        if len(value) >= _SHORTEST_SECRET and value.lower() not in _WORDS:
            for form in (value, repr(value)[1:-1]):
                self._hidden.setdefault(form, raw)

    def _shown(self, text: str) -> str:
        if self._hidden:
            longest_first = sorted(self._hidden, key=len, reverse=True)
            text = re.sub("|".join(map(re.escape, longest_first)), lambda match: self._hidden[match[0]], text)
        return without_secrets(text)


def parse(text: str, name: str, variables: Mapping[str, str]) -> Document:
    """Read YAML, or JSON, which is YAML too. What is wrong in a place of it is among its mistakes: a key twice, or no text; a variable that is not set.

    Args:
        variables: of the environment.

    Raises:
        ConfigFileError: it is neither, with the line.
    """
    import yaml

    document = Document(name=name)
    try:
        kind = _loader()
        root = yaml.compose(text, Loader=kind)
        if root is not None:
            document.value = _Reader(document, kind(""), variables).plain(root, (), frozenset())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        told = getattr(error, "problem", None) or getattr(error, "context", None) or str(error)
        hint = "look at the indentation and the quotes around that line" if mark else "is it a text file?"
        if mark and any("${" in line for line in text.splitlines()[mark.line : mark.line + 1]):
            hint = "within braces and brackets, a variable needs quotes around it"
        document.mistake((), f"this is no YAML: {told}", hint, line=mark and mark.line + 1)
        document.raise_mistakes()
    return document


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


def close_to(word: str, known: Iterable[str]) -> str | None:
    """The one of `known` that was probably meant."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not close:
        lowered = {name.lower(): name for name in names}
        close = [lowered[low] for low in difflib.get_close_matches(word.lower(), list(lowered), n=1, cutoff=0.6)]
    return close[0] if close else None


def nearest(word: str, known: Iterable[str]) -> str:
    """What a reader can do about an unknown word: the one that was probably meant, and all there are."""
    names = sorted(known)
    close = close_to(word, names)
    everything = f"there is {', '.join(names)}" if names else "there is none"
    return f"did you mean {close}? ({everything})" if close else everything


_TEXT, _MERGED = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"
_VARIABLE = re.compile(r"\$(?:(?P<plain>\$)(?=\{)|\{(?:(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^{}]*))?\})?)")


class _Reader:
    """Makes plain values of YAML's nodes."""

    def __init__(self, document: Document, loader: Any, variables: Mapping[str, str]) -> None:
        self._document, self._loader, self._variables = document, loader, variables
        self._checked: set[int] = set()

    def plain(self, node: Any, place: Place, above: frozenset[int]) -> Any:
        import yaml

        self._document.lines.setdefault(place, node.start_mark.line + 1)
        if id(node) in above:
            self._document.mistake(place, "an anchor contains itself", "write the values out")
            return None
        above |= {id(node)}
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place, above)
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(each, (*place, index), above) for index, each in enumerate(node.value)]
        if "${" in node.value and node.tag == _TEXT:
            return self._filled(node, place)
        return self._scalar(node, place)

    def _mapping(self, node: Any, place: Place, above: frozenset[int]) -> dict[str, Any]:
        self._check_keys(node, place)
        # What is merged in (`<<`) comes first, and the mapping's own keys win; where this one is merged in later, too.
        self._loader.flatten_mapping(node)
        pairs = {pair[0].value: pair for pair in node.value if pair[0].tag == _TEXT}
        node.value = list(pairs.values())
        found: dict[str, Any] = {}
        for key, (key_node, value_node) in pairs.items():
            self._document.lines[(*place, key)] = key_node.start_mark.line + 1
            found[key] = self.plain(value_node, (*place, key), above)
        return found

    def _check_keys(self, node: Any, place: Place) -> None:
        if id(node) in self._checked:  # merged keys are among its own by now
            return
        self._checked.add(id(node))
        seen = set()
        for key_node, _ in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if key_node.tag not in (_TEXT, _MERGED):
                said = f"the key {key}" if isinstance(key, str) else "a key"
                self._document.mistake(place, f"{said} is no text", "put it in quotes", line=line)
            elif key in seen:
                self._document.mistake((*place, key), "this key stands here for the second time", "keep one", line=line)
            else:
                seen.add(key)

    def _scalar(self, node: Any, place: Place) -> Any:
        try:
            return self._loader.construct_object(node, deep=True)
        except ValueError as error:  # a date that looks like one
            self._document.mistake(place, f"{node.value!r} cannot be read: {error}", "put it in quotes if it is text")
            return None

    def _filled(self, node: Any, place: Place) -> Any:
        """A text with variables put in."""
        import yaml

        before = len(self._document.mistakes)
        text = _VARIABLE.sub(lambda match: self._value(match, place), node.value)
        if before < len(self._document.mistakes):
            return UNFIT
        if all(match["plain"] for match in _VARIABLE.finditer(node.value)):
            return text
        filled = FromEnvironment(text)
        filled.raw, filled.is_quoted = node.value, node.style is not None
        filled.read = text
        resolved = self._loader.resolve(yaml.ScalarNode, text, (True, False))
        with contextlib.suppress(ValueError):
            filled.read = self._loader.construct_object(yaml.ScalarNode(resolved, text), deep=True)
        return filled

    def _value(self, match: re.Match[str], place: Place) -> str:
        name, default = match["name"], match["default"]
        if match["plain"]:
            return "$"
        if name is None:
            self._document.mistake(
                place, "`${` begins no variable here", "write ${NAME} or ${NAME:-default}; for a plain `${`, `$${`"
            )
            return ""
        value = self._variables.get(name, "")
        if value:
            self._document.hide(value, f"${{{name}}}")
            return value
        if default is not None:
            return default
        self._document.mistake(
            place,
            f"the variable {name} is {'empty' if name in self._variables else 'not set'}",
            f"set it, or write ${{{name}:-default}}",
        )
        return ""
