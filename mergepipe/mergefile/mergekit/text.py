"""Writes a Mergefile that was imported: all that it means, and comments on where that comes from."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from mergepipe.dtypes import WRITE_DTYPES
from mergepipe.mergefile.mergekit.methods import METHODS, our_value
from mergepipe.mergefile.schema import ExpertRef, Mergefile, Output, Params, Rule, Slice, Source
from mergepipe.mergefile.suggest import code
from mergepipe.mergefile.template import toml_key, toml_string
from mergepipe.signatures import OperatorSignature, ParamValue, Scalar

_WIDTH = 110
_RULES = "# mergekit takes the first filter that matches, a Mergefile the last rule: hence the reverse order."
_STAGE = "publish = false                  # it is only used by other outputs: no directory is written for it"


def render(
    mergefile: Mergefile,
    origin: str,
    notes: Sequence[str],
    references: Mapping[str, str],
    signatures: Mapping[str, OperatorSignature],
) -> str:
    """Return the text of a Mergefile.

    Parameters
    ----------
    mergefile
        What it means.
    origin
        The name of the file that it was imported from.
    notes
        What to say about that, in sentences.
    references
        By source, how that file calls it.
    signatures
        The operators'.
    """
    lines = [f"# Imported from {code(origin)}, a configuration of mergekit, by `mergepipe import`."]
    if notes:
        lines.append("#")
    for note in notes:
        lines += textwrap.wrap(note, _WIDTH, initial_indent="# - ", subsequent_indent="#   ", break_long_words=False)
    lines += ["version = 1", ""]
    for source in mergefile.sources.values():
        lines += [*_source(source, references[source.name]), ""]
    for output in mergefile.outputs.values():
        lines += [*_output(output, signatures[output.operator]), ""]
    first = lines.index(_RULES) if _RULES in lines else len(lines)
    return "\n".join(line for number, line in enumerate(lines) if line != _RULES or number == first)


def _source(source: Source, reference: str) -> Iterator[str]:
    yield f"[{toml_key('sources', source.name)}]"
    origin = "" if reference in (source.path, source.hub) else f"  # {code(reference)}"
    if source.path is not None:
        yield f"path = {toml_string(source.path)}{origin}"
    if source.hub is not None:
        yield f"hub = {toml_string(source.hub)}{origin if source.revision is None else ''}"
    if source.revision is not None:
        yield f"revision = {toml_string(source.revision)}"
    if source.on is not None:
        yield f"on = {toml_string(source.on)}"


def _output(output: Output, signature: OperatorSignature) -> Iterator[str]:
    key = toml_key("outputs", output.name)
    yield f"[{key}]"
    yield f'operator = "{output.operator}"'
    if output.base is not None:
        yield f"base = {toml_string(output.base)}"
    if output.experts:
        yield from _experts(output.experts)
    if output.path != f"build/{output.name}":
        yield f"path = {toml_string(output.path)}"
    if not output.publish:
        yield _STAGE
    yield from _params(f"{key}.params", output.params, output.operator, signature)
    yield from _rules(f"{key}.rules", output.rules)
    for part in output.slices or ():
        yield from _slice(f"{key}.slices", part)
    yield from _write(f"{key}.write", output)


def _experts(experts: Sequence[ExpertRef]) -> Iterator[str]:
    if len(experts) == 1 or not any(expert.params or expert.layers for expert in experts):
        line = "experts = [" + ", ".join(_expert(expert) for expert in experts) + "]"
        if len(line) <= _WIDTH:
            yield line
            return
    yield "experts = ["
    yield from (f"    {_expert(expert)}," for expert in experts)
    yield "]"


def _expert(expert: ExpertRef) -> str:
    layers = {} if expert.layers is None else {"layers": _range(expert.layers)}
    if not expert.params and not layers:
        return toml_string(expert.source)
    return _inline({"source": expert.source, **layers, **expert.params})


def _range(layers: tuple[int, int]) -> str:
    return f"{layers[0]}..{layers[1]}"


def _params(key: str, params: Params, operator: str, signature: OperatorSignature) -> Iterator[str]:
    if not params:
        return
    yield ""
    yield f"[{key}]"
    specs = signature.all_params()
    for name, value in params.items():
        parameter, ours = METHODS[operator].parameter(name), specs[name].default
        default = None if parameter is None or parameter.default is None else our_value(name, parameter.default)
        comment = ""
        if ours is not None and value == default and value != ours:
            comment = f"  # mergekit's default; mergepipe's is {_value(ours)}"
        yield f"{toml_key(name)} = {_value(value)}{comment}"


def _rules(key: str, rules: Sequence[Rule]) -> Iterator[str]:
    for index, rule in enumerate(rules):
        yield ""
        if index == 0 and len(rules) > 1:
            yield _RULES
        yield f"[[{key}]]"
        yield "match = " + (toml_string(rule.match[0]) if len(rule.match) == 1 else _list(rule.match))
        if rule.params:
            yield f"params = {_inline(rule.params)}"
        if rule.experts:
            yield f"experts = {_inline(rule.experts)}"


def _slice(key: str, part: Slice) -> Iterator[str]:
    yield ""
    yield f"[[{key}]]"
    only = part.experts[0]
    if len(part.experts) == 1 and not only.params:
        yield f"source = {toml_string(only.source)}"
    else:
        yield from _experts(part.experts)
    yield f'layers = "{_range(part.layers)}"'
    if part.base is not None:
        yield f"base = {toml_string(part.base)}"
    if part.base_layers is not None:
        yield f'base_layers = "{_range(part.base_layers)}"'
    if part.params:
        yield f"params = {_inline(part.params)}"
    yield from _rules(f"{key}.rules", part.rules)


def _write(key: str, output: Output) -> Iterator[str]:
    write = output.write
    if write.dtype is None and write.tokenizer is None:
        return
    yield ""
    yield f"[{key}]"
    if write.dtype is not None:
        yield f'dtype = "{next(name for name, dtype in WRITE_DTYPES.items() if dtype == write.dtype)}"'
    if write.tokenizer is not None:
        yield f"tokenizer = {toml_string(write.tokenizer)}"


def _inline(table: Mapping[str, ParamValue | Params]) -> str:
    def shown(value: ParamValue | Params) -> str:
        return _inline(value) if isinstance(value, Mapping) else _value(value)

    return "{ " + ", ".join(f"{toml_key(name)} = {shown(value)}" for name, value in table.items()) + " }"


def _value(value: ParamValue) -> str:
    if isinstance(value, tuple):
        return _list(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return toml_string(value) if isinstance(value, str) else repr(value)


def _list(values: Sequence[Scalar]) -> str:
    return "[" + ", ".join(_value(value) for value in values) + "]"
