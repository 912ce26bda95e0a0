"""Sizes in bytes, shares and ages, as people write and read them."""

from __future__ import annotations

import re

_FACTORS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_UNITS = ("KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_SECONDS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days", ""), 86_400),
    **dict.fromkeys(("w", "week", "weeks"), 7 * 86_400),
}
_BYTES = re.compile(r"\b(\d+) B\b", re.ASCII)
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*", re.ASCII)


def parse_size(text: str | int) -> int:
    """Return the bytes of ``"5 GB"``, ``"512 MiB"``, ``"1024"`` or an integer.

    Raises
    ------
    ValueError
        If the text is not a size; the message lists the units.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(f"a size cannot be negative: {text}")
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    factor = _FACTORS.get((match[2] or "b").lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"not a size: {text!r} (write a number and a unit: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)")
    return round(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def parse_age(text: str) -> float:
    """Return the seconds of ``"30d"``, ``"12h"``, ``"90 min"``, ``"2 weeks"``; a number alone is days.

    Raises
    ------
    ValueError
        If the text is no age; the message lists the units.
    """
    match = _SIZE.fullmatch(text)
    factor = _SECONDS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"not an age: {text!r} (write a number and a unit: s, min, h, d, w; a number alone is days)")
    return float(match[1]) * factor


def parse_percent(text: str) -> float | None:
    """Return the share (0 to 1 for 0% to 100%) of ``"25%"``, or None if the text is not a percentage."""
    match = _PERCENT.fullmatch(text)
    return float(match[1]) / 100 if match else None


def format_bytes(count: float) -> str:
    """Return a size for people: ``1.2 MB``, decimal units, three significant digits."""
    if count < 1000:
        return f"{int(count)} B"
    for unit in ("KB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5 or unit == "TB":
            digits = 2 if count < 9.995 else 1 if count < 99.95 else 0
            return f"{count:.{digits}f} {unit}"
    raise AssertionError("unreachable")


def exact_size(count: int) -> str:
    """Return a size with as few digits as it has without rounding it: ``500 KB``, ``1.5 GiB``, ``1234567 B``.

    `parse_size` gives back the same number.
    """
    texts = [f"{count} B"]  # by rising units, of which the largest wins where digits are the same
    for unit in _UNITS:
        factor = _FACTORS[unit.lower()]
        if count >= factor and count * 100 % factor == 0:
            whole, hundredths = divmod(count * 100 // factor, 100)
            digits = f"{whole}.{hundredths:02}".rstrip("0").rstrip(".") if hundredths else str(whole)
            texts.append(f"{digits} {unit}")
    return min(reversed(texts), key=lambda text: len(text.partition(" ")[0].replace(".", "").rstrip("0")))


def budget_words(text: str) -> str:
    """Return a budget as the lock has it (`Budget.text`), with a size as people write it: ``2 MB by samples``."""
    return _BYTES.sub(lambda match: exact_size(int(match[1])), text)


def format_count(count: int, noun: str, plural: str | None = None) -> str:
    """Return ``1 block``, ``1,204 blocks``."""
    word = noun if count == 1 else plural or noun + "s"
    return f"{count:,} {word}"
