"""Numbers as people read them."""

from __future__ import annotations


def size_text(number: float) -> str:
    """`number` bytes for a reader: 512 B, 1.2 MB, 3.45 GB (powers of 1000)."""
    value, unit = float(number), "B"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if value < 999.5 or unit == "PB":
            break
        value /= 1000
    return f"{number:.0f} B" if unit == "B" else f"{value:.3g} {unit}"


def duration_text(seconds: float) -> str:
    """`seconds` for a reader, by its two largest units: 8 s, 1 min 40 s, 2 h 5 min, 3 d 4 h."""
    left = round(seconds)
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
        elif parts:
            break  # 1 h 5 s is 1 h
    return " ".join(parts[:2])
