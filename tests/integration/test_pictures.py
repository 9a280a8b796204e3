"""The pictures of the documentation: drawn from a training, and there where the pages show them."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ckptmgr.demo import pictures

DOCS = Path(__file__).parents[2] / "docs"


def texts(path: Path) -> str:
    """matplotlib draws letters as shapes, and says them in comments."""
    ElementTree.parse(path)
    return " ".join(re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_short_training_is_drawn(tmp_path: Path) -> None:
    """Phases and the bottleneck; losses with saves, the best, and the end."""
    story = pictures.train(tmp_path, steps=8, eval_every=2, good_enough=10.0)
    assert story.stopped == 2
    assert [save.step for save in story.saves] == [2]
    assert story.losses[0][0] == 2
    pictures.draw_profile(story.windows, tmp_path / "profile.svg")
    pictures.draw_losses(story, tmp_path / "losses.svg")
    assert "most of it:" in texts(tmp_path / "profile.svg")
    for word in ("eval_loss", "saved: best so far", "ended by EarlyStoppingCallback"):
        assert word in texts(tmp_path / "losses.svg")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("profile.svg", ("most of it:", "ms a step", "backward")),
        ("losses.svg", ("eval_loss", "saved: best so far", "ended by EarlyStoppingCallback")),
    ],
)
def test_the_pages_show_them(name: str, words: tuple[str, ...]) -> None:
    """Both are in docs/callbacks.md, and are pictures of what it says."""
    assert f"(pictures/{name})" in (DOCS / "callbacks.md").read_text(encoding="utf-8")
    told = texts(DOCS / "pictures" / name)
    assert all(word in told for word in words)


def test_without_matplotlib_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit 2."""
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        pictures.main([str(tmp_path / "out")])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: pictures are drawn by matplotlib - pip install matplotlib\n"
    assert not (tmp_path / "out").exists()
