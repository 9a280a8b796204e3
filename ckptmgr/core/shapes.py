"""Whether plain values, those of YAML and JSON, are what an annotation wants: `int`, `float | None`, `Literal["min", "max"]`, `list[str]`, a struct.

A whole number is a float; nothing else is anything else: '0.1' is no number, and true is no 1. What an annotation means that is none of these, such as a
class, is its owner's business: anything fits it.
"""

from __future__ import annotations

import os
import types
from collections import abc
from collections.abc import Callable, Mapping
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from ckptmgr.core.document import UNFIT, Document, FromEnvironment, Place, close_to, nearest

_LISTS = (list, tuple, set, frozenset, abc.Sequence, abc.MutableSequence, abc.Collection, abc.Iterable, abc.Set)
_COLLECTIONS = (list, tuple, set, frozenset)
_MAPPINGS = (dict, abc.Mapping, abc.MutableMapping)


def _is_plain(kind: type | tuple[type, ...]) -> Callable[[Any], bool]:
    # bool is an int: patience=True would be a patience of 1.
    return lambda value: isinstance(value, kind) and not isinstance(value, bool)


# What a scalar must be, and how that is said.
_SCALARS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (_is_plain(Integral), "a whole number"),
    float: (_is_plain(Real), "a number"),
    str: (lambda value: isinstance(value, str), "text"),
    Path: (lambda value: isinstance(value, (str, os.PathLike)), "a path"),
    os.PathLike: (lambda value: isinstance(value, (str, os.PathLike)), "a path"),
    type(None): (lambda value: value is None, "null"),
}


def fit(value: Any, kind: Any, place: Place, document: Document) -> Any:
    """`value` as `kind` wants it.

    A text with variables becomes what is wanted: text, else the number or the word that it reads as. It is left as it is where anything fits.

    Returns:
        It: structs made, all else as it was; UNFIT if it does not fit, which is then a mistake of `document`. In a list, UNFIT stands in place of what
        does not fit; what does not fit of a struct or mapping is left out.
    """
    kinds = _members(kind)
    if value is UNFIT or not all(map(_is_known, kinds)):
        return value
    if isinstance(value, Mapping) and (fitting := [each for each in kinds if _is_mapping(each)]):
        return _fit_mapping(value, fitting[0], place, document) if len(fitting) == 1 else value
    if isinstance(value, _COLLECTIONS) and (fitting := [each for each in kinds if _is_list(each)]):
        return _fit_list(value, fitting[0], place, document) if len(fitting) == 1 else value
    readings = [str(value), value.read] if isinstance(value, FromEnvironment) else [value]
    for reading in readings:
        if any(_is_scalar_of(reading, each) for each in kinds):
            return reading
    document.mistake(place, f"{_shown(value)} does not fit", _advice(value, kinds))
    return UNFIT


def settled(value: Any) -> Any:
    """`value`, where nothing is known of what is wanted: variables as YAML reads them, text if quoted. UNFIT if it holds anything that is."""
    if isinstance(value, FromEnvironment):
        return str(value) if value.is_quoted else value.read
    if isinstance(value, dict):
        made = {name: settled(each) for name, each in value.items()}
        return UNFIT if any(each is UNFIT for each in made.values()) else made
    if isinstance(value, list):
        several = [settled(each) for each in value]
        return UNFIT if any(each is UNFIT for each in several) else several
    return value


def annotation_of(written: Any, names: Mapping[str, Any]) -> Any:
    """An annotation, evaluated if it is text; Any if that cannot be: it may name what only type checkers import.

    Args:
        names: of the module that it stands in.
    """
    holder = types.SimpleNamespace(__annotations__={"it": written})
    try:
        return get_type_hints(holder, globalns=dict(names))["it"]
    except Exception:  # noqa: BLE001 - whatever it is, it is an annotation, and no reason not to train
        return Any


def _fit_mapping(value: Mapping[Any, Any], kind: Any, place: Place, document: Document) -> Any:
    if _is_struct(kind):
        return _fit_struct(value, kind, place, document)
    _, wanted = get_args(kind) or (Any, Any)
    made = {name: fit(each, wanted, (*place, str(name)), document) for name, each in value.items()}
    return {name: each for name, each in made.items() if each is not UNFIT} if isinstance(value, dict) else value


def _fit_struct(value: Mapping[Any, Any], kind: Any, place: Place, document: Document) -> Any:
    kinds = _fields(kind)
    unknown = [str(name) for name in value if name not in kinds]
    for name in unknown:
        document.mistake((*place, name), "this key is not known", nearest(name, kinds))
    given = {
        name: made
        for name, wanted in kinds.items()
        if name in value and (made := fit(value[name], wanted, (*place, name), document)) is not UNFIT
    }
    needed = {field.name for field in msgspec.structs.fields(kind) if field.required}
    meant = {close_to(name, kinds) for name in unknown}
    for name in sorted(needed - value.keys() - meant):
        document.mistake(place, f"{name} is missing", f"add `{name}: …`")
    return kind(**given) if needed <= given.keys() else UNFIT


def _fit_list(value: Any, kind: Any, place: Place, document: Document) -> Any:
    wanted = get_args(kind) or (Any,)
    if get_origin(kind) is tuple and wanted[-1] is not Ellipsis:
        if len(value) != len(wanted):
            document.mistake(place, f"{len(value)} values do not fit", f"give {len(wanted)} of them")
            return UNFIT
    else:
        wanted = (wanted[0],) * len(value)
    made = [
        fit(each, one, (*place, index), document) for index, (each, one) in enumerate(zip(value, wanted, strict=True))
    ]
    # What is no list is Python's, and stays as it is.
    return made if isinstance(value, list) else value


def _members(kind: Any) -> list[Any]:
    """The kinds that a union is of; of any other kind itself."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return [member for each in get_args(kind) for member in _members(each)]
    return [type(None) if kind is None else kind]


def _bare(kind: Any) -> Any:
    """`list` of `list[int]`."""
    return get_origin(kind) or kind


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _is_mapping(kind: Any) -> bool:
    return _is_struct(kind) or _bare(kind) in _MAPPINGS


def _is_list(kind: Any) -> bool:
    return _bare(kind) in _LISTS


def _is_known(kind: Any) -> bool:
    return _is_mapping(kind) or _is_list(kind) or _bare(kind) is Literal or _bare(kind) in _SCALARS


def _is_scalar_of(value: Any, kind: Any) -> bool:
    if _bare(kind) is Literal:
        return any(type(value) is type(each) and value == each for each in get_args(kind))
    known = _SCALARS.get(_bare(kind))
    return known is not None and known[0](value)


@cache
def _fields(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {name: hints[name] for name in kind.__struct_fields__}


def _shown(value: Any) -> str:
    if isinstance(value, FromEnvironment):
        return value.raw
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, _COLLECTIONS):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    said = repr(value) if isinstance(value, str) else str(value)
    return said if len(said) <= 80 else f"{said[:76]} …"


def _advice(value: Any, kinds: list[Any]) -> str:
    """What to write instead."""
    wanted = f"give {' or '.join(dict.fromkeys(map(_named, kinds)))}"
    if isinstance(value, str) and not isinstance(value, FromEnvironment):
        words = [word for each in kinds if _bare(each) is Literal for word in get_args(each)]
        if meant := close_to(value, [word for word in words if isinstance(word, str)]):
            return f"did you mean {meant}? ({wanted})"
        read = _reading(value)
        if read is not None and any(_is_scalar_of(read, each) for each in kinds):
            return f"write {value} without quotes"
        if any(_is_list(each) and _is_scalar_of(value, *(get_args(each)[:1] or (str,))) for each in kinds):
            return f"write [{value}]"
    elif (
        str in kinds
        and value is not None
        and not isinstance(value, (Mapping, *_COLLECTIONS))
        and not any(map(_is_struct, kinds))
    ):
        return f'write it in quotes: "{_shown(value)}"'
    return wanted


def _named(kind: Any) -> str:
    if _bare(kind) is Literal:
        words = list(map(str, get_args(kind)))
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if _is_struct(kind):
        return f"a mapping with {', '.join(kind.__struct_fields__)}"
    return "a mapping" if _is_mapping(kind) else "a list" if _is_list(kind) else _SCALARS[_bare(kind)][1]


def _reading(text: str) -> Any:
    """The number or truth that `text` would be without quotes."""
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower())
