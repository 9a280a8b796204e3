"""What a restore did, for programs and for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptmgr.core.conditions import Drift


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore did with each piece, and what is not as it was when the checkpoint was made.

    Attributes:
        restored: pieces that were put back, in the order of restoring.
        missing: pieces that were asked for and are not in the checkpoint.
        unexpected: pieces in the checkpoint that were not asked for.
        changed: restored pieces that are objects of another class than when they were saved; each drift's `what` is `pieces.NAME`.
        drift: of everything else that training runs under, such as the world size or a library's version.
        values: the trees of restored pieces that are plain values, by name.
        notes: what could not be restored on this machine, such as the random states of GPUs that are not here; and the settings of pieces that the
            checkpoint has replaced, such as an optimizer's `weight_decay`.
    """

    restored: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    changed: tuple[Drift, ...] = ()
    drift: tuple[Drift, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def as_document(self) -> dict[str, Any]:
        """JSON values; `values` are left out, which may be of any size and need not be JSON."""
        return {
            "restored": list(self.restored),
            "missing": list(self.missing),
            "unexpected": list(self.unexpected),
            "changed": _documents(self.changed),
            "drift": _documents(self.drift),
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """What a person should know, one line each, the good news first; what there is nothing to say about has no line."""
        lines = [f"restored: {', '.join(self.restored)}" if self.restored else "nothing was restored"]
        if self.missing:
            lines.append(f"not in the checkpoint, and not restored: {', '.join(self.missing)}")
        if self.unexpected:
            lines.append(f"in the checkpoint, and not asked for: {', '.join(self.unexpected)}")
        lines += [
            f"{each.what.partition('.')[2]} was a {each.saved} in the checkpoint, and is a {each.now} now"
            for each in self.changed
        ]
        lines += [f"changed: {each}" for each in self.drift]
        return lines + list(self.notes)


def piece_kinds(pieces: Mapping[str, Any]) -> dict[str, str]:
    """The class of each piece that is an object with a state of its own, for `Conditions.pieces`: `torch.optim.adamw.AdamW`.

    The module is left out for classes of the main module, whose name depends on how the program was started. Plain values have no entry.
    """
    return {name: _class_name(type(piece)) for name, piece in pieces.items() if is_stateful(piece)}


def is_stateful(piece: Any) -> bool:
    """Whether `piece` is an object with `state_dict` and `load_state_dict`, and not a plain value."""
    return callable(getattr(piece, "state_dict", None)) and callable(getattr(piece, "load_state_dict", None))


def _class_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "__main__" else f"{kind.__module__}.{kind.__qualname__}"


def _documents(drifts: Iterable[Drift]) -> list[dict[str, str]]:
    return [{"what": each.what, "saved": each.saved, "now": each.now} for each in drifts]
