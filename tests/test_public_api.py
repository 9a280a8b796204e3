"""The names people import: they resolve, they are documented, and errors keep their promises."""

from __future__ import annotations

import ast
import inspect
import pickle
from importlib import import_module
from pathlib import Path

import pytest

import ckptmgr
from ckptmgr.core import errors

PUBLIC_MODULES = [name for name in ("ckptmgr", "ckptmgr.callbacks") if hasattr(import_module(name), "__all__")]
NAMES = [(module, name) for module in PUBLIC_MODULES for name in import_module(module).__all__]
ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.CkptmgrError)]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_public_name_resolves_and_is_documented(module: str, name: str) -> None:
    """Every name in `__all__` can be imported, and says itself what it is for."""
    value = getattr(import_module(module), name)
    if inspect.isclass(value) or inspect.isroutine(value):
        # Not inherited: a class that borrows the text of its base says nothing about itself. Nor made by dataclass.
        text = value.__doc__ or ""
        assert len(text.split()) >= 3
        assert not text.startswith(f"{name}(")


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_star_list_is_sorted_and_without_repeats(module: str) -> None:
    """`__all__` is a list to read."""
    names = import_module(module).__all__
    assert names == sorted(set(names))


def test_lazy_names_are_those_that_type_checkers_see() -> None:
    """`ckptmgr` loads its names late; the imports that stand there for type checkers name the same ones."""
    source = ast.parse(Path(ckptmgr.__file__).read_text())
    (block,) = [node for node in source.body if isinstance(node, ast.If)]
    typed = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed | {"__version__"} == set(ckptmgr.__all__)


def test_dir_lists_the_public_names() -> None:
    """Completion in a shell offers what `__all__` promises."""
    assert set(ckptmgr.__all__) <= set(dir(ckptmgr))


def test_unknown_name_is_an_attribute_error() -> None:
    """`hasattr` and `from ckptmgr import x` behave as with any module."""
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ckptmgr.nonsense  # type: ignore[attr-defined, unused-ignore]


@pytest.mark.parametrize("kind", ERRORS)
def test_error_pickles_with_its_facts(kind: type[errors.CkptmgrError]) -> None:
    """Errors cross from a worker to its supervisor: class, message, hint and facts come along."""
    error = kind("what, where, why", hint="do this", key="a/b", step=7)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error) == "what, where, why - do this"
    assert vars(copy) == vars(error) == {"message": "what, where, why", "hint": "do this", "key": "a/b", "step": 7}
    assert copy.exit_code == kind.exit_code


@pytest.mark.parametrize("kind", ERRORS)
def test_error_says_when_it_is_raised_and_is_in_the_tree(kind: type[errors.CkptmgrError]) -> None:
    """Each class has a sentence of its own, an exit code of the interface, and a place in the drawing at the file's top."""
    assert (kind.__doc__ or "").strip().endswith((".", ")"))
    assert kind.exit_code in range(1, 8)
    drawing = (errors.__doc__ or "").split("Exit codes are")[0]
    assert kind.__name__ in drawing


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.MissingExtraError, ImportError),
        (errors.CheckpointNotFoundError, FileNotFoundError),
        (errors.CheckpointExistsError, FileExistsError),
        (errors.ObjectNotFoundError, FileNotFoundError),
        (errors.ObjectExistsError, FileExistsError),
        (errors.AccessDeniedError, PermissionError),
        (errors.BackendTimeoutError, TimeoutError),
    ],
)
def test_error_is_also_the_builtin_that_users_expect(kind: type[errors.CkptmgrError], builtin: type[Exception]) -> None:
    """`except FileNotFoundError` around a restore works without knowing ckptmgr's classes."""
    with pytest.raises(builtin, match=r"^here$"):
        raise kind("here")
