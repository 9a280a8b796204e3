"""Numbers as people read them."""

from __future__ import annotations

import re


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


_FACTORS = {
    "": 1,
    "b": 1,
    **{f"{unit}b": 1000**power for power, unit in enumerate("kmgtp", start=1)},
    **{f"{unit}ib": 1024**power for power, unit in enumerate("kmgtp", start=1)},
    # As rclone, s5cmd, dd and curl read a letter alone.
    **{unit: 1024**power for power, unit in enumerate("kmgtp", start=1)},
}


def parse_size(text: str) -> int | None:
    """The bytes that `text` stands for: `512`, `64MiB`, `1.5 GB` (powers of 1000), `64M` (of 1024); None if it is no size."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    factor = None if match is None else _FACTORS.get(match.group(2).lower())
    return None if match is None or factor is None else round(float(match.group(1)) * factor)


def parse_duration(text: str) -> float | None:
    """The seconds that `text` stands for: `120s`, `2min`, `2m`, `1.5h`, `7d`, `2w`; None if it is no length of time.

    A number without a unit is none: days may be meant, and what is older than so many seconds be removed.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|min|m|h|d|w)\s*", text)
    lengths = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
    return None if match is None else float(match.group(1)) * lengths[match.group(2)]
