"""The saving callback where a training of Hugging Face's Trainer begins: what it resumed from, which the Trainer does not say, and what to warn of."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.callbacks import huggingface
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.errors import ConflictError

Fake = Callable[..., Any]


class Hosted:
    """Tests with a host: `self.host(out, callback, …)` makes a training."""

    @pytest.fixture(autouse=True)
    def _host(self, hf_trainer: Fake) -> None:
        self.host = hf_trainer


class TestBeginning(Hosted):
    """Where a resumed training comes from: HF does not say."""

    def refusing(self, fake_manager: Fake, *known: Path, **options: Any) -> Any:
        """A manager of a run with commits that knows only these directories."""
        manager = fake_manager(**options)

        def begin(*, resume_from: Path | None = None, expected_bytes: int | None = None) -> None:
            manager.began.append(resume_from)
            if resume_from not in known and not manager.is_restored:
                raise ConflictError("the run has checkpoints, and this start restored none", newest="000001-…")

        manager.begin = begin
        return manager

    def directory(self, path: Path, step: int) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        return path

    def began(self, manager: Any, out: Path, step: int = 4, *, resume_from: Path | None = None, **args: Any) -> Any:
        trainer = self.host(out, SaveModelCallback(manager, resume_from=resume_from), **args)
        trainer.state.global_step = step
        trainer._call("on_train_begin")
        return manager.began

    def test_from_scratch(self, fake_manager: Fake, out: Path) -> None:
        """Nothing was resumed; what lies in the output directory plays no part."""
        self.directory(out / "checkpoint-4", 4)
        assert self.began(fake_manager(), out, 0) == [None]

    def test_the_first_place_that_the_run_knows(
        self, fake_manager: Fake, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What `ckptmgr resume` has named, the argument, the output directory (True), `./<run>`; each once, and only if its step is right."""
        monkeypatch.chdir(tmp_path)
        named = self.directory(tmp_path / "named", 4)
        argument = self.directory(tmp_path / "argument", 4)
        own = self.directory(out / "checkpoint-4", 4)
        default = self.directory(tmp_path / "run/checkpoint-4", 4)
        monkeypatch.setenv("CKPTMGR_RESUME_FROM", str(named))
        manager = self.refusing(fake_manager, default)
        asked = self.began(manager, out, resume_from_checkpoint=str(argument))
        assert asked == [named, argument, own, default]
        self.directory(named, 3)
        monkeypatch.delenv("CKPTMGR_RESUME_FROM")
        assert self.began(self.refusing(fake_manager, own), out, resume_from_checkpoint=True) == [own]

    def test_what_is_given_explicitly_is_all_that_counts(self, fake_manager: Fake, out: Path, tmp_path: Path) -> None:
        """No guess is made then."""
        self.directory(out / "checkpoint-4", 4)
        given = tmp_path / "elsewhere"
        assert self.began(self.refusing(fake_manager, given), out, resume_from=given) == [given]

    def test_a_manager_that_was_asked_for_the_path_knows(self, fake_manager: Fake, out: Path) -> None:
        """resume_path() has noted it."""
        self.directory(out / "checkpoint-4", 4)
        assert self.began(self.refusing(fake_manager, is_restored=True), out) == [None]

    def test_a_path_that_was_asked_for_and_not_handed_over(self, fake_manager: Fake, out: Path) -> None:
        """I12: training would begin at step 0 and be taken for a descendant of step 100."""
        with pytest.raises(ConflictError, match=r"begins at step 0 - hand its path over: trainer\.train\("):
            self.began(self.refusing(fake_manager, is_restored=True), out, 0)

    def test_a_refusal_says_what_to_do(self, fake_manager: Fake, out: Path) -> None:
        """Where it looked, and the ways out."""
        own = self.directory(out / "checkpoint-4", 4)
        with pytest.raises(ConflictError) as refused:
            self.began(self.refusing(fake_manager), out)
        text = str(refused.value)
        assert len(text.splitlines()) == 1
        for part in (
            "the run has checkpoints",
            "step 4",
            str(own),
            "trainer.train(resume_from_checkpoint=manager.resume_path())",
            "SaveModelCallback(manager, resume_from=DIR)",
            "on_existing='new-lineage'",
        ):
            assert part in text

    def test_a_checkpoint_that_resume_has_named_was_not_handed_over(
        self, fake_manager: Fake, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`ckptmgr resume RUN -- python train.py`, and train.py does not look at it."""
        monkeypatch.setenv("CKPTMGR_RESUME_FROM", "/tmp/run/checkpoint-4")
        with pytest.raises(ConflictError, match=r"resume_from_checkpoint='/tmp/run/checkpoint-4'\)"):
            self.began(self.refusing(fake_manager), out, 0)

    def test_another_refusal_is_passed_on(self, fake_manager: Fake, out: Path) -> None:
        """Another place to look at would not help."""
        self.directory(out / "checkpoint-4", 4)
        manager = fake_manager(begin_error=ConflictError("another process is saving"))
        with pytest.raises(ConflictError, match="another process"):
            self.began(manager, out)
        assert len(manager.began) == 1


class TestWarnings(Hosted):
    def warned(self, fake_manager: Fake, out: Path, caplog: pytest.LogCaptureFixture, local: Path, **args: Any) -> str:
        self.host(out, SaveModelCallback(fake_manager(local_dir=local)), **args)._call("on_train_begin")
        return "\n".join(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)

    def test_nothing_to_say(
        self, fake_manager: Fake, out: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        """The usual case is quiet."""
        assert self.warned(fake_manager, out, caplog, tmp_path / "disk", save_strategy="steps", save_steps=4) == ""

    def test_a_tier_on_another_disk(
        self,
        fake_manager: Fake,
        out: Path,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        """Fault row 8: links are impossible, each save is a copy; better to know before step 1."""
        monkeypatch.setattr(huggingface, "is_linkable", lambda source, tier: False)
        text = self.warned(fake_manager, out, caplog, tmp_path / "disk")
        assert "on different disks: each save is copied while training waits" in text
        assert str(out) in text
        assert str(tmp_path / "disk") in text

    def test_no_optimizer(
        self, fake_manager: Fake, out: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        """save_only_model."""
        assert "no optimizer" in self.warned(fake_manager, out, caplog, tmp_path, save_only_model=True)
