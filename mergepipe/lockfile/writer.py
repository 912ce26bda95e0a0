"""Lock to text: the only producer of a lock's bytes.

Canonical TOML, written by hand: fixed key order, one fact per line, one array element per line, LF, a newline at the
end. The same `Lockfile` always gives the same text, and `reader.parse_lock` gives the same `Lockfile` back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from mergepipe.digest import format_digest
from mergepipe.errors import InternalError, LockError
from mergepipe.lockfile.records import (
    BOUND_KEYS,
    LOCATION_KEYS,
    REVISION,
    VERSION,
    LockedExpert,
    LockedLevels,
    LockedOutput,
    LockedRule,
    LockedSlice,
    LockedSource,
    LockedTensor,
    Lockfile,
)
from mergepipe.signatures import ParamValue

HEADER = "# Written by mergepipe: review and commit this file, do not edit it."
_LEVEL_WORDS = {0: "omitted", 255: "exact"}
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_ESCAPED = re.compile(
    r'["\\\x00-\x1f\x7f-\xa0\xad\u061c\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\uffff\U000e0000-\U000e0fff]'
)
_SHORT_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def render_lock(lock: Lockfile) -> str:
    """Return the text of a lock.

    Raises
    ------
    LockError
        If a name cannot be written as Unicode text (a file name that is not UTF-8).
    """
    lines = [HEADER, "", f"version = {VERSION}", f"revision = {_revision(lock)}", f"geometry = {lock.geometry}"]
    for source in lock.sources:
        lines += ["", *_source_lines(source)]
    for output in lock.outputs:
        lines += ["", *_output_lines(output)]
    return "\n".join(lines) + "\n"


def _revision(lock: Lockfile) -> int:
    """Return the lowest revision that has all that a lock says."""
    return REVISION if any(output.levels_version is not None for output in lock.outputs) else 0


def _source_lines(source: LockedSource) -> Iterator[str]:
    unknown = sorted(set(source.location) - set(LOCATION_KEYS))
    if unknown:
        raise InternalError(f"the location of source `{source.name}` has unknown keys: {', '.join(unknown)}")
    yield f"[sources.{key_text(source.name)}]"
    for key in LOCATION_KEYS:
        if key in source.location:
            yield f"{key} = {quote(source.location[key])}"
    yield f"digest = {digest_text(source.digest)}"
    yield f"tensors = {source.tensors}"
    yield f"bytes = {source.bytes}"
    if source.files:
        yield from _array("files", (f"{{ name = {quote(f.name)}, bytes = {f.bytes} }}" for f in source.files))


def _output_lines(output: LockedOutput) -> Iterator[str]:
    table = f"outputs.{key_text(output.name)}"
    yield f"[{table}]"
    yield from _declared_lines(output)
    yield from _result_lines(output)
    for part in output.slices:
        yield ""
        yield f"[[{table}.slices]]"
        yield from _slice_lines(part)
        yield from _rules(f"{table}.slices", part.rules)
    yield from _rules(table, output.rules)
    yield ""
    yield f"[{table}.tensors]"
    for tensor in output.tensors:
        yield f"{quote(tensor.name)} = {quote(tensor_text(tensor))}"
    if output.levels_version is not None:
        yield ""
        yield f"[{table}.levels]"
        for tensor in output.tensors:
            if tensor.levels is not None:
                yield f"{quote(tensor.name)} = {quote(levels_text(tensor.levels))}"


def _declared_lines(output: LockedOutput) -> Iterator[str]:
    yield "publish = false" if output.path is None else f"path = {quote(output.path)}"
    yield f"operator = {quote(output.operator)}"
    yield f"operator_version = {output.operator_version}"
    for name in sorted(output.code):
        yield f"code.{key_text(name)} = {digest_text(output.code[name])}"
    yield f"numerics = {quote(output.numerics)}"
    if output.base is not None:
        yield f"base = {quote(output.base)}"
    yield from _array("experts", map(expert_text, output.experts))
    yield from _dotted("params", output.params)
    yield f"budget = {quote(output.budget)}"
    if output.levels_version is not None:
        yield f"levels_version = {output.levels_version}"
    yield from _dotted("write", output.write)
    for name in sorted(output.sources):
        yield f"sources.{key_text(name)} = {digest_text(output.sources[name])}"


def _result_lines(output: LockedOutput) -> Iterator[str]:
    yield f"expert_bytes_full = {output.expert_bytes_full}"
    yield f"expert_bytes_planned = {output.expert_bytes_planned}"
    for key, text in bound_texts(output.bound).items():
        yield f"bound.{key} = {text}"
    yield f"digest = {digest_text(output.digest)}"
    yield from _array(
        "shards",
        (
            f"{{ name = {quote(shard.name)}, digest = {digest_text(shard.digest)}, bytes = {shard.bytes} }}"
            for shard in output.shards
        ),
    )
    yield from _array(
        "side_files",
        (f"{{ name = {quote(file.name)}, digest = {digest_text(file.digest)} }}" for file in output.side_files),
    )


def _rules(table: str, rules: Iterable[LockedRule]) -> Iterator[str]:
    for rule in rules:
        yield ""
        yield f"[[{table}.rules]]"
        yield from _rule_lines(rule)


def _slice_lines(part: LockedSlice) -> Iterator[str]:
    yield f"layers = {quote(part.layers)}"
    if part.operator is not None:
        yield f"operator = {quote(part.operator)}"
    if part.operator_version is not None:
        yield f"operator_version = {part.operator_version}"
    if part.base is not None:
        yield f"base = {quote(part.base)}"
    if part.base_layers is not None:
        yield f"base_layers = {quote(part.base_layers)}"
    yield from _array("experts", map(expert_text, part.experts))
    yield from _dotted("params", part.params)


def _rule_lines(rule: LockedRule) -> Iterator[str]:
    yield from _array("match", map(quote, rule.match))
    if rule.layers is not None:
        yield f"layers = {quote(rule.layers)}"
    yield from _dotted("params", rule.params)
    for name in sorted(rule.experts):
        key = f"experts.{key_text(name)}"
        yield from _dotted(key, rule.experts[name]) if rule.experts[name] else (f"{key} = {{}}",)


def _array(key: str, elements: Iterable[str]) -> Iterator[str]:
    """Yield an array with one element per line; an empty one on a single line."""
    lines = [f"    {element}," for element in elements]
    yield from (f"{key} = [", *lines, "]") if lines else (f"{key} = []",)


def _dotted(prefix: str, table: Mapping[str, ParamValue]) -> Iterator[str]:
    for key in sorted(table):
        yield f"{prefix}.{key_text(key)} = {value_text(table[key])}"


def expert_text(expert: LockedExpert) -> str:
    """Return an expert as an inline table: ``{ source = "code", weight = 0.4 }``."""
    for key in ("source", "layers"):
        if key in expert.params:
            raise InternalError(f"expert `{expert.source}` has a parameter called `{key}`")
    facts = [f"source = {quote(expert.source)}"]
    facts += [f"layers = {quote(expert.layers)}"] if expert.layers is not None else []
    facts += [f"{key_text(key)} = {value_text(expert.params[key])}" for key in sorted(expert.params)]
    return "{ " + ", ".join(facts) + " }"


def tensor_text(tensor: LockedTensor) -> str:
    """Return what a tensor's line says: ``b3:<hex> 6/6``."""
    return f"{format_digest(tensor.digest)} {tensor.read}/{tensor.total}"


def levels_text(levels: LockedLevels) -> str:
    """Return what a tensor's line about levels says: ``36972 B, 2 omitted, 5 at level 3, 1 exact``."""
    parts = [f"{count} {_LEVEL_WORDS.get(level, f'at level {level}')}" for level, count in levels.blocks.items()]
    return ", ".join([f"{levels.bytes} B", *parts])


def bound_texts(bound: Mapping[str, str | float]) -> dict[str, str]:
    """Return the facts of a bound as TOML values, in their fixed order; its numbers are always floats."""
    unknown = sorted(set(bound) - set(BOUND_KEYS))
    if unknown:
        raise InternalError(f"a bound has unknown keys: {', '.join(unknown)}")
    return {
        key: quote(value) if isinstance(value, str) else value_text(float(value))
        for key in BOUND_KEYS
        if (value := bound.get(key)) is not None
    }


def digest_text(digest: bytes) -> str:
    """Return a digest, or what pins a source, as a TOML string."""
    return f'"{format_digest(digest)}"'


def value_text(value: ParamValue) -> str:
    """Return a parameter value as TOML: the shortest text that reads back as the same value of the same type."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return quote(value)
    return "[" + ", ".join(map(value_text, value)) + "]"


def key_text(key: str) -> str:
    """Return a TOML key: bare where that is allowed, else quoted."""
    return key if _BARE_KEY.fullmatch(key) else quote(key)


def quote(text: str) -> str:
    """Return a TOML basic string on one line.

    Text stands for itself in every script; controls, line separators and invisible or direction marks are escaped,
    so that what a reviewer sees is what the lock says. The set is spelled out rather than taken from the Unicode
    tables, which differ between versions of Python.

    Raises
    ------
    LockError
        If the text holds surrogates, which stand for bytes that are not UTF-8.
    """
    if _SURROGATE.search(text):
        raise LockError(
            f"the name {text!a} is not valid Unicode and cannot be written into the lock",
            hint="rename the file so that its name is valid UTF-8",
        )
    return '"' + _ESCAPED.sub(_escape, text) + '"'


def _escape(match: re.Match[str]) -> str:
    short = _SHORT_ESCAPES.get(match[0])
    code = ord(match[0])
    return short or (f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}")
