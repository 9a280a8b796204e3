"""`drain`: upload what a process has left in a local tier, and name what was given up; `resume -- COMMAND` does so at its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptmgr.cli.command import Command, local_directory
from ckptmgr.cli.looking import Json
from ckptmgr.cli.output import count, emit, emit_json, say, size, warn

if TYPE_CHECKING:
    from ckptmgr.core.layout import Stem
    from ckptmgr.run.journal import UploadEntry
    from ckptmgr.run.tier import LocalTier

_EPILOG = """Exit codes: 0 nothing is pending any more; 3 no local tier there; 6 something is still pending, or saves were given up unsent when the
queue was full: they are named once, and then forgotten."""
# As long as a transfer process goes on by default without its trainer, and a minute for what it is at in the end.
_OTHERS_S = 360.0


@dataclass(frozen=True, slots=True)
class Left:
    """What a drain has left behind: ids that are still only on this disk, and ids that had been given up unsent."""

    pending: list[str]
    dropped: list[str]

    @property
    def exit_code(self) -> int:
        return 6 if self.pending or self.dropped else 0


def register(app: typer.Typer) -> None:
    app.command("drain", cls=Command, epilog=_EPILOG, short_help="Upload what is pending in a local tier.")(drain)


def drain(
    local_dir: Annotated[Path, typer.Argument(metavar="LOCAL_DIR", envvar="CKPTMGR_LOCAL_DIR", help="A local tier.")],
    as_json: Json = False,
) -> None:
    """Upload what is pending in a local tier, newest first, each to the run that it was saved for.

    A save that a living process is uploading is waited for, some minutes at most.
    """
    from ckptmgr.run.tier import LocalTier

    tier = LocalTier.open(local_directory(local_dir))
    left = drain_tier(tier, None)
    if as_json:
        emit_json({"local_dir": str(tier.root), "pending": left.pending, "dropped": left.dropped})
    elif not left.pending:
        dropped = f", but {count(len(left.dropped), 'save')} had been given up unsent" if left.dropped else ""
        emit(f"{tier.root}: nothing pending{dropped}")
    if left.exit_code:
        raise typer.Exit(left.exit_code)


def drain_tier(tier: LocalTier | None, default_target: str | None) -> Left:
    """Upload what is pending, and say what was given up. A store that cannot be opened leaves everything.

    Args:
        default_target: for saves whose journal was lost.
    """
    from ckptmgr.backends.registry import normalize_url

    if tier is None:
        return Left([], [])
    fallback = "" if default_target is None else normalize_url(default_target)
    # Before the uploads: what a process was killed over while it gave it up is whole, and waits again.
    dropped = _name_dropped(tier)
    # Those of which the store has parts, too: they are thrown away there.
    open_entries = [*(entry for _, entry in tier.pending()), *(entry for entry in dropped if entry.multiparts)]
    for target in sorted({entry.target or fallback for entry in open_entries}):
        _drain_to(tier, target)
    for entry in dropped:
        tier.forget_evicted(entry.stem)
    pending = [*(manifest.id for manifest, _ in tier.pending()), *_name_unreadable(tier)]
    return Left(pending, [str(entry.stem) for entry in dropped])


def _name_unreadable(tier: LocalTier) -> list[str]:
    """Saves that cannot be uploaded, for nobody can tell what they are; their ids."""
    uploaded = tier.uploaded()
    unreadable = {stem: error for stem, error in tier.run.history().broken.items() if stem not in uploaded}
    for stem, error in unreadable.items():
        warn(f"step {stem.step} ({stem}) cannot be uploaded: {error}")
    return [str(stem) for stem in unreadable]


def _name_dropped(tier: LocalTier) -> list[UploadEntry]:
    from ckptmgr.transfer.queue import evicted

    given_up = evicted(tier)
    for entry in given_up:
        what = f"step {entry.stem.step} ({entry.stem}, {size(entry.size_bytes)})"
        warn(f"{what} was given up before it was uploaded: {entry.error}")
    return given_up


def _drain_to(tier: LocalTier, target: str) -> None:
    from ckptmgr.core.errors import CkptmgrError
    from ckptmgr.run.directory import RunDirectory, same_run
    from ckptmgr.transfer.drain import drain as execute

    if not target:
        warn(f"{tier.root} does not say where some of its saves belong - `ckptmgr push` takes them to a run")
        return
    try:
        run = RunDirectory.open(target)
        same_run(tier.run, run)
        done = execute(tier, run, wait_s=_OTHERS_S, busy=_say_who_has_it)
    except CkptmgrError as exc:
        warn(f"nothing could be uploaded from {tier.root}: {exc}")
        return
    for stem in done.committed:
        say(f"committed step {stem.step} ({stem})")
    others = [stem for stem in done.pending if stem not in done.errors]  # those with an error were logged
    if others:
        ids = ", ".join(map(str, others))
        warn(f"{count(len(others), 'save')} still in the hands of another process: {ids} - run the drain again later")


def _say_who_has_it(stem: Stem) -> None:
    say(
        f"step {stem.step} ({stem}) is being uploaded by another process: waiting for it, {_OTHERS_S / 60:.0f} minutes at most"
    )
