"""Short ways to parse a text and to look at what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from unit.mergefile.signatures import SIGNATURES

from mergepipe.errors import CollectedErrors, MergefileError, MergepipeError
from mergepipe.mergefile.parse import parse_mergefile

if TYPE_CHECKING:
    from mergepipe.mergefile.schema import Mergefile, Output

PATH = Path("/project/Mergefile.toml")
SOURCES = """\
version = 1
[sources.base]
path = "models/base"
[sources.math]
path = "models/math"
[sources.code]
path = "models/code"
"""
DESIGN_EXAMPLE = """\
version = 1

[sources.base]
path = "models/qwen-base"            # relative to the Mergefile

[sources.math]
path = "models/math"

[sources.code]
path = "models/code-lora"            # adapter_config.json present -> a LoRA adapter
on = "base"                          # the checkpoint that the adapter applies to

[sources.chat]
hub = "org/model"                    # optional extra `hub`; resolved from the local hub cache first
revision = "0123abcd"                # a commit; a branch name is resolved and pinned in the lock

[outputs.assistant]
operator = "ties"
base = "base"
experts = ["math", { source = "code", weight = 0.4 }, { source = "chat", weight = [0.2, 0.6] }]
path = "build/assistant"             # default: build/<name>

[outputs.assistant.params]           # operator parameters; per-expert ones may be given here for all
density = 0.5
lambda = 1.0

[[outputs.assistant.rules]]          # later rules win; per-tensor overrides
match = "*.self_attn.*"              # glob on tensor names; or a list; or layers = "8..16"
params = { density = 0.8 }
experts = { math = { weight = 0.9 } }

[outputs.assistant.budget]
expert_reads = "25%"                 # or bytes: "2 GiB"; absent or "100%": the full-read merge
# max_error = 1e-3                   # the dual: fewest bytes whose certified relative error stays within this

[outputs.assistant.write]
dtype = "bfloat16"                   # default: the base's dtype per tensor
shard_size = "5 GB"
tokenizer = "base"                   # which source the tokenizer and side files come from
"""


def parse(text: str, path: Path = PATH) -> Mergefile:
    """Parse a valid Mergefile."""
    return parse_mergefile(text, path, SIGNATURES)


def output(body: str) -> Output:
    """Return the only output of a Mergefile over `SOURCES`."""
    (found,) = parse(SOURCES + body).outputs.values()
    return found


def errors_of(error: MergepipeError) -> list[MergefileError]:
    members = error.errors if isinstance(error, CollectedErrors) else (error,)
    assert all(type(member) is MergefileError for member in members)
    assert error.exit_status == 2
    return list(members)


def problems(text: str, path: Path = PATH) -> list[MergefileError]:
    """Return what is wrong with a text."""
    with pytest.raises(MergepipeError) as caught:
        parse_mergefile(text, path, SIGNATURES)
    return errors_of(caught.value)


def only_problem(text: str, path: Path = PATH) -> MergefileError:
    """Return the one thing that is wrong with a text."""
    found = problems(text, path)
    assert len(found) == 1, [error.message for error in found]
    return found[0]


def line_of(text: str, part: str) -> int:
    """Return the line (from 1) at which ``part`` first occurs."""
    return text[: text.index(part)].count("\n") + 1


def check(body: str, key_path: str, what: str, hint: str | None = None) -> None:
    """Check the only problem of a Mergefile: its line (where ``@`` ends it), its key path, the rest of its message."""
    text = SOURCES + body
    error = only_problem(text.replace("@", ""))
    line = text[: text.index("@")].count("\n") + 1
    place = f"Mergefile.toml:{line}: {key_path}: "
    assert error.message.startswith(place), error.message
    assert error.message.removeprefix(place).replace("\n  ", "; ") == what
    assert (error.facts["line"], error.facts["key_path"]) == (line, key_path)
    if hint is not None:
        assert error.hint is not None
        assert hint in error.hint
