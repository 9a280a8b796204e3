"""The error tree: what is drawn is what is there, and every error survives a pipe between processes."""

from __future__ import annotations

import pickle
import re

import pytest

from ckptmgr.core import errors
from ckptmgr.core.errors import CkptmgrError, ConfigError, MissingExtraError, ObjectNotFoundError, ThrottledError

CLASSES = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, CkptmgrError)]


def drawn() -> tuple[dict[str, str | None], dict[str, str], dict[str, int]]:
    """The tree in the module's docstring: name -> parent, name -> builtin base, name -> exit code where one is given."""
    parents: dict[str, str | None] = {}
    builtin: dict[str, str] = {}
    codes: dict[str, int] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        names = list(re.finditer(r"([A-Z]\w+Error)(?: \((\w+)\))?", line))
        if not names or not re.match(r"    [│├└─ ]*CkptmgrError|    [│├└─ ]*[├└]─", line):
            continue
        depth = names[0].start()
        above = [(column, name) for column, name in above if column < depth]
        base = above[-1][1] if above else None
        chained = line[names[0].end() :].lstrip().startswith("──")
        for place, match in enumerate(names):
            parents[match[1]] = names[0][1] if chained and place else base
            if match[2]:
                builtin[match[1]] = match[2]
        if code := re.search(r"\s{2,}(\d+)\b", line):
            codes.update(dict.fromkeys((match[1] for match in names), int(code[1])))
        above.append((depth, names[0][1]))
    return parents, builtin, codes


def test_the_drawn_tree_is_the_tree() -> None:
    """Every class is drawn once, below its first base."""
    parents, _, _ = drawn()
    actual = {cls.__name__: None if cls is CkptmgrError else cls.__bases__[0].__name__ for cls in CLASSES}
    assert parents == actual


def test_the_drawn_builtin_bases_and_exit_codes_are_right() -> None:
    """`except FileNotFoundError` works where users expect it, and the command line ends as the tree says."""
    _, builtin, codes = drawn()
    actual = {cls.__name__: cls.__bases__[1].__name__ for cls in CLASSES if len(cls.__bases__) > 1}
    assert builtin == actual
    for cls in CLASSES:
        if cls.__name__ in codes:
            assert cls.exit_code == codes[cls.__name__], cls


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_pickles_with_its_attributes(cls: type[CkptmgrError]) -> None:
    """They cross from the transfer process to the trainer; facts and hint must arrive."""
    error = cls("what, where, why", hint="do this", key="run/x", path="a/b", name="boto3", step=7, failed={"a": 1})
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error) == "what, where, why - do this"
    for name in ("message", "hint", "key", "path", "name", "step", "failed"):
        assert getattr(again, name) == getattr(error, name), name


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_has_a_class_sentence_and_a_known_exit_code(cls: type[CkptmgrError]) -> None:
    """One sentence says when it is raised; the codes are those of the interface people script against."""
    assert cls.__doc__
    assert cls.__doc__.splitlines()[0].endswith(".")
    assert cls.exit_code in {1, 2, 3, 4, 5, 6, 7}


def test_without_a_hint_the_message_stands_alone() -> None:
    """No dangling dash."""
    assert str(ConfigError("that is wrong")) == "that is wrong"
    assert ConfigError("that is wrong").hint == ""


def test_class_defaults_are_there_without_being_given() -> None:
    """Code that reads a fact need not ask whether it was set."""
    assert ThrottledError("slow down").retry_after_s is None
    assert ThrottledError("slow down", retry_after_s=2.5).retry_after_s == 2.5
    assert (ObjectNotFoundError("no").backend, ObjectNotFoundError("no").operation) == ("", "")


def test_builtin_handlers_catch() -> None:
    """The second base is a real one."""
    with pytest.raises(FileNotFoundError):
        raise ObjectNotFoundError("gone", key="x")
    with pytest.raises(ImportError):
        raise MissingExtraError("boto3 is missing", hint="pip install 'ckptmgr[s3]'")
