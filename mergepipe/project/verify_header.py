"""In what the header of a safetensors file differs from the one that was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mergepipe.checkpoints.strictjson import Flaw, JsonError, decode
from mergepipe.values import dataclass

LENGTH_BYTES = 8
_METADATA = "__metadata__"
_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderDifference:
    """One thing in which a header differs: in words, and the tensor that it is about, if it is about one."""

    what: str
    tensor: str | None = None


def header_differences(found: bytes, expected: bytes) -> list[HeaderDifference]:
    """Return in what a header differs from the one that was written: none exactly if they are the same bytes.

    Parameters
    ----------
    found
        The first bytes of the file, as many as the header should have; fewer where the file is shorter.
    expected
        The header that was written, its length field included.
    """
    if found == expected:
        return []
    at = first_difference(found, expected)
    if len(found) < len(expected):
        return [HeaderDifference(what=f"the header is cut off after {len(found):,} of {len(expected):,} bytes")]
    differences = []
    if found[:LENGTH_BYTES] != expected[:LENGTH_BYTES]:
        lengths = [int.from_bytes(data[:LENGTH_BYTES], "little") for data in (found, expected)]
        differences.append(HeaderDifference(what=f"the header's length is {lengths[0]:,} and should be {lengths[1]:,}"))
    if found[LENGTH_BYTES:] != expected[LENGTH_BYTES:]:
        differences += _entry_differences(found[LENGTH_BYTES:], expected[LENGTH_BYTES:])
    return differences or [HeaderDifference(what=f"the header is written otherwise, from byte {at:,} on")]


def first_difference(first: bytes, second: bytes) -> int:
    """Return the first position at which two byte strings differ, or the length of the shorter one."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    low, high = 0, shorter  # they agree before `low`, and differ before `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle)
    return low


def _entry_differences(found: bytes, expected: bytes) -> Iterator[HeaderDifference]:
    try:
        entries = decode(found)
    except JsonError as error:
        at = LENGTH_BYTES + first_difference(found, expected)
        yield HeaderDifference(what=f"the header is no JSON any more, from byte {at:,} on: {error.what}")
        return
    if not isinstance(entries, dict):
        what = f"`{entries.subject}` {entries.what}" if isinstance(entries, Flaw) else "it is no object"
        yield HeaderDifference(what=f"the header is damaged: {what}")
        return
    written: Mapping[str, Any] = decode(expected)
    for name in dict.fromkeys((*written, *entries)):
        if entries.get(name) == written.get(name):
            continue
        if name == _METADATA:
            was, now = written.get(name), entries.get(name)
            yield HeaderDifference(what=f"the header's metadata is {_shown(now)} and should be {_shown(was)}")
        elif name not in entries:
            yield HeaderDifference(what=f"the header has no tensor `{name}`", tensor=name)
        elif name not in written:
            yield HeaderDifference(what=f"the header has a tensor `{name}` that was not written", tensor=name)
        else:
            yield from _field_differences(name, entries[name], written[name])


def _field_differences(name: str, entry: Any, written: Mapping[str, Any]) -> Iterator[HeaderDifference]:
    if not isinstance(entry, dict):
        yield HeaderDifference(what=f"tensor `{name}`: its entry in the header is damaged", tensor=name)
        return
    for key in dict.fromkeys((*written, *entry)):
        if entry.get(key) != written.get(key):
            now, was = _shown(entry.get(key)), _shown(written.get(key))
            what = f"tensor `{name}`: `{key}` in the header is {now} and should be {was}"
            yield HeaderDifference(what=what, tensor=name)


def _shown(value: Any) -> str:
    if value is None:
        return "absent"
    text = value.what if isinstance(value, Flaw) else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
