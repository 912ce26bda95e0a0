"""Writes the Mergefile that `mergepipe init` starts a project with: valid, small, and explained in comments."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from itertools import count
from types import MappingProxyType

from mergepipe.errors import MergefileError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})
_PLACEHOLDERS = {"base": "models/base", "math": "models/math", "code": "models/code"}

_HEAD = """\
# What `mergepipe build` merges, from what, and how.
version = 1

# Sources: the checkpoints, each under a name of your choice. A path is a folder with safetensors files (or one such
# file), relative to this Mergefile.
"""
_ADAPTERS = """\
# LoRA adapters, each with the checkpoint that it was trained on. They are merged as other experts are.
"""
_OUTPUT_HEAD = """\
# Outputs: the merged checkpoints. `mergepipe build` builds all of them, `mergepipe plan` says what that would read.
"""
_WEIGHTS = {
    "linear": "# Linear: a weighted average of the experts; the weights are divided by their sum.",
    "task_arithmetic": "# Task arithmetic: the base plus the weighted differences between the experts and it.",
}
_TAIL = """\

# Parameters of the operator. One of the experts' may be given here too, for all of them; a list of numbers, such as
# weight = [0.2, 0.6], is spread over the layers from the first to the last.
# [{params}]
# normalize = {normalize}

# Rules: other parameters for some tensors, by name or by layers = "8..16" (8 to 15). Later rules win.
# [[{rules}]]
# match = "*.self_attn.*"
# experts = {{ {expert} = {{ weight = 0.8 }} }}

# A budget: the most that may be read of the experts, as a share or in bytes ("2 GiB"). Without one, all is read.
# [{budget}]
# expert_reads = "100%"

# How the result is written. By default each tensor keeps its dtype, and a shard has 5 GB at most.
# [{write}]
# dtype = "bfloat16"
# shard_size = "5 GB"
"""


def toml_string(text: str) -> str:
    """Return a text as a TOML basic string.

    Raises
    ------
    MergefileError
        If it is not valid Unicode (a file name in another encoding).
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = text.encode("utf-8", "backslashreplace").decode()
        raise MergefileError(
            f"`{shown}` cannot be written in a Mergefile: its name is not UTF-8", hint="rename it"
        ) from None
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_key(*parts: str) -> str:
    """Return a dotted TOML key; parts are quoted where that is needed."""
    return ".".join(part if _BARE_KEY.fullmatch(part) else toml_string(part) for part in parts)


def render_template(sources: Mapping[str, str], base: str | None, adapters: Mapping[str, str] = NO_ADAPTERS) -> str:
    """Return a commented Mergefile over some checkpoints.

    Parameters
    ----------
    sources
        The checkpoints' paths, relative to the Mergefile, by name. If there are none, placeholders stand for them.
    base
        The name of the one that the others were trained from, if there is one: the output is then task arithmetic
        over the others, else an average of all.
    adapters
        The paths of LoRA adapters that were trained on the base, by name.
    """
    if not sources:
        sources, base = _PLACEHOLDERS, "base"
    experts = [name for name in (*sources, *adapters) if name != base] or list(sources)
    operator = "linear" if base is None else "task_arithmetic"
    name, path = _free_output({**sources, **adapters})
    lines = [_HEAD]
    lines += [f"[{toml_key('sources', source)}]\npath = {toml_string(where)}\n" for source, where in sources.items()]
    if adapters:
        assert base is not None, "adapters are those of the base"
        lines += [_ADAPTERS, *(_adapter_table(source, where, base) for source, where in adapters.items())]
    lines += [_OUTPUT_HEAD + f"[{toml_key('outputs', name)}]", _WEIGHTS[operator], f'operator = "{operator}"']
    lines += [] if base is None else [f"base = {toml_string(base)}"]
    lines += ["experts = [", *_expert_lines(experts, operator), "]"]
    lines += [] if path == f"build/{name}" else [f"path = {toml_string(path)}"]
    tables = {key: toml_key("outputs", name, key) for key in ("params", "rules", "budget", "write")}
    normalize = "true" if operator == "linear" else "false"
    tail = _TAIL.format(**tables, normalize=normalize, expert=toml_key(experts[0]))
    return "\n".join(lines) + "\n" + tail


def _adapter_table(name: str, path: str, on: str) -> str:
    return f"[{toml_key('sources', name)}]\npath = {toml_string(path)}\non = {toml_string(on)}\n"


def _expert_lines(experts: list[str], operator: str) -> Iterator[str]:
    weight = 1.0 if operator == "linear" else round(1 / len(experts), 4)
    for expert in experts:
        yield f"    {{ source = {toml_string(expert)}, weight = {weight} }},"


def _free_output(sources: Mapping[str, str]) -> tuple[str, str]:
    """Return a name and a path for the output that no source has, or lies around."""
    taken = [os.path.normpath(path) for path in sources.values()]
    for number in count(1):
        name = "merged" if number == 1 else f"merged-{number}"
        # A source that is the folder of the Mergefile itself leaves only places beside that.
        for folder in ("build", "outputs", ".."):
            path = f"{folder}/{name}"
            if name not in sources and (number > len(sources) + 1 or not any(_touch(path, other) for other in taken)):
                return name, path
    raise AssertionError("unreachable")


def _touch(path: str, other: str) -> bool:
    """Return whether one path is, holds or lies in the other, where both are relative to one folder."""
    if other == ".":
        return not path.startswith("..")
    return f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/")
