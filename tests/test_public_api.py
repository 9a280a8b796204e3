"""The names people import: they resolve, they are documented, and they are the ones that type checkers see."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest

import ckptmgr

PUBLIC_MODULES = ("ckptmgr", "ckptmgr.callbacks")
NAMES = [(module, name) for module in PUBLIC_MODULES for name in import_module(module).__all__]


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
