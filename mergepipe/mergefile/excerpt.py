"""The part of a Mergefile that declares one output: what it means, in a canonical form, for a record that travels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from mergepipe.dtypes import WRITE_DTYPES
from mergepipe.mergefile.schema import (
    DEFAULT_SHARD_SIZE,
    Budget,
    CustomOperator,
    ExpertRef,
    Mergefile,
    Output,
    Params,
    Rule,
    Slice,
    Source,
)
from mergepipe.mergefile.template import toml_key, toml_string
from mergepipe.signatures import ParamValue

# What cannot be seen, and what a TOML string can have as an escape. Spelled out: the Unicode tables differ between
# versions of Python.
_HIDDEN = re.compile(
    r"[\x7f-\xa0\xad\u061c\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\uffff\U000e0000-\U000e0fff]"
)
_ELSEWHERE = re.compile(r"(?:[/~]|[A-Za-z]:[\\/])")
_ELSEWHERE_NOTE = "  # elsewhere on the machine of the build"


def excerpt(mergefile: Mergefile, name: str, sources: Iterable[str]) -> str:
    """Return an output, its sources and its custom operators as a Mergefile declares them, without comments.

    Paths that are absolute, or start at somebody's home, are reduced to their last part: they say something about a
    machine and nothing about the merge. What the output has by default is left out.

    Parameters
    ----------
    sources
        What it is made from; of other outputs among them only the name is there.
    """
    output = mergefile.outputs[name]
    operators = dict.fromkeys([output.operator, *(part.operator or output.operator for part in output.slices or ())])
    blocks: list[list[str]] = [["version = 1"]]
    for source in sources:
        declared = mergefile.sources.get(source)
        if declared is None:
            blocks.append([f"# {toml_key('outputs', source)} is another output of the same Mergefile"])
        else:
            blocks.append(list(_source(declared)))
    blocks += [list(_operator(mergefile.operators[used])) for used in operators if used in mergefile.operators]
    blocks += _output(output)
    text = "\n\n".join("\n".join(block) for block in blocks) + "\n"
    return _HIDDEN.sub(_escape, text)


def shown_location(text: str) -> str:
    """Return a path as it may be shown to everybody: the last part alone of one that is absolute."""
    if not _ELSEWHERE.match(text):
        return text
    return text.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1] or "."


def _escape(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"


def _path(key: str, text: str) -> str:
    note = _ELSEWHERE_NOTE if _ELSEWHERE.match(text) else ""
    return f"{key} = {toml_string(shown_location(text))}{note}"


def _source(source: Source) -> Iterator[str]:
    yield f"[{toml_key('sources', source.name)}]"
    if source.path is not None:
        yield _path("path", source.path)
    for key, value in (("hub", source.hub), ("revision", source.revision), ("on", source.on)):
        if value is not None:
            yield f"{key} = {toml_string(value)}"
    if source.progressive is not None:
        yield _path("progressive", source.progressive)


def _operator(operator: CustomOperator) -> Iterator[str]:
    yield f"[{toml_key('operators', operator.name)}]"
    yield _path("python", f"{operator.file}:{operator.function}")


def _output(output: Output) -> list[list[str]]:
    key = toml_key("outputs", output.name)
    head = [f"[{key}]", f"operator = {toml_string(output.operator)}"]
    if output.base is not None:
        head.append(f"base = {toml_string(output.base)}")
    head += _experts(output.experts)
    if output.path != f"build/{output.name}":
        head.append(_path("path", output.path))
    if not output.publish:
        head.append("publish = false")
    blocks = [head]
    if output.params:
        blocks.append([f"[{key}.params]", *_pairs(output.params)])
    blocks += [[f"[[{key}.rules]]", *_rule(rule)] for rule in output.rules]
    for part in output.slices or ():
        blocks.append([f"[[{key}.slices]]", *_slice(part)])
        blocks += [[f"[[{key}.slices.rules]]", *_rule(rule)] for rule in part.rules]
    if output.budget is not None and not output.budget.is_full_read:
        blocks.append([f"[{key}.budget]", *_budget(output.budget)])
    write = list(_write(output))
    return [*blocks, [f"[{key}.write]", *write]] if write else blocks


def _experts(experts: tuple[ExpertRef, ...]) -> list[str]:
    if len(experts) < 2:
        return [f"experts = [{_expert(expert)}]" for expert in experts]
    return ["experts = [", *(f"    {_expert(expert)}," for expert in experts), "]"]


def _expert(expert: ExpertRef) -> str:
    layers = {} if expert.layers is None else {"layers": _range(expert.layers)}
    if not expert.params and not layers:
        return toml_string(expert.source)
    return _inline({"source": expert.source, **layers, **dict(sorted(expert.params.items()))})


def _range(layers: tuple[int, int]) -> str:
    return f"{layers[0]}..{layers[1]}"


def _rule(rule: Rule) -> Iterator[str]:
    if rule.match:
        yield f"match = {_value(rule.match if len(rule.match) > 1 else rule.match[0])}"
    if rule.layers is not None:
        yield f'layers = "{_range(rule.layers)}"'
    if rule.params:
        yield f"params = {_inline(dict(sorted(rule.params.items())))}"
    if rule.experts:
        experts = {name: dict(sorted(params.items())) for name, params in sorted(rule.experts.items())}
        yield f"experts = {_inline(experts)}"


def _slice(part: Slice) -> Iterator[str]:
    if part.operator is not None:
        yield f"operator = {toml_string(part.operator)}"
    if part.base is not None:
        yield f"base = {toml_string(part.base)}"
    yield from _experts(part.experts)
    yield f'layers = "{_range(part.layers)}"'
    if part.base_layers is not None:
        yield f'base_layers = "{_range(part.base_layers)}"'
    if part.params:
        yield f"params = {_inline(dict(sorted(part.params.items())))}"


def _budget(budget: Budget) -> Iterator[str]:
    if budget.expert_reads is not None:
        yield f"expert_reads = {budget.expert_reads}"
    if budget.share is not None:
        yield f'expert_reads = "{100 * budget.share:.15g}%"'
    if budget.max_error is not None:
        yield f"max_error = {budget.max_error!r}"
    if budget.stats != "full":
        yield f"stats = {toml_string(budget.stats)}"
    if budget.uses_levels != replace(budget, precision=None).uses_levels:  # it is not what it is by default
        yield f'precision = "{"levels" if budget.uses_levels else "blocks"}"'


def _write(output: Output) -> Iterator[str]:
    write = output.write
    if write.dtype is not None:
        yield f'dtype = "{next(name for name, dtype in WRITE_DTYPES.items() if dtype == write.dtype)}"'
    if write.shard_size != DEFAULT_SHARD_SIZE:
        yield f"shard_size = {write.shard_size}"
    if write.tokenizer is not None:
        yield f"tokenizer = {toml_string(write.tokenizer)}"


def _pairs(params: Params) -> Iterator[str]:
    yield from (f"{toml_key(name)} = {_value(value)}" for name, value in sorted(params.items()))


def _inline(table: Mapping[str, ParamValue | Params]) -> str:
    pairs = [
        f"{toml_key(name)} = {_inline(value) if isinstance(value, Mapping) else _value(value)}"
        for name, value in table.items()
    ]
    return "{ " + ", ".join(pairs) + " }"


def _value(value: ParamValue | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return toml_string(value) if isinstance(value, str) else repr(value)
