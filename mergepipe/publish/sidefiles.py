"""The files beside the weights: config, generation config, tokenizer, chat template. Nothing else is carried over."""

from __future__ import annotations

import fnmatch
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mergepipe.checkpoints.place import Place, read_small
from mergepipe.checkpoints.sniff import SNIFF_BYTES, sniff
from mergepipe.digest import content_digest
from mergepipe.dtypes import DTYPES, is_mergeable
from mergepipe.errors import MergepipeError, SourceError, raise_collected, redacted
from mergepipe.plan.stacking import restacked
from mergepipe.plan.values import OutputPlan
from mergepipe.values import dataclass

CONFIG = "config.json"

# What loaders and converters look for, by name; weights, training state and READMEs are not among them.
_MODEL_FILES = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenizer.model.v*",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
    "tekken.json",
)
_CARRIED = (
    *_MODEL_FILES,
    *_TOKENIZERS,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
_DTYPE_KEYS = ("torch_dtype", "dtype")
# Where a file says what it was loaded from; the group is the value. On somebody's disk, that is nobody else's business.
_LOADED_FROM = re.compile(r'"(?:_?name_or_path|tokenizer_file)"\s*:\s*"((?:[^"\\]|\\.)*)"')
_LOCAL = re.compile(r"[/~\\]|[A-Za-z]:[/\\]|file:|\.\.?[/\\]")
_PRIVATE = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", *_MODEL_FILES)
_FLOAT_NAMES = frozenset(d.long_name for d in DTYPES.values() if d.is_float and d.long_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFile:
    """A file to be put beside the weights: its name relative to the directory, and its bytes."""

    name: str
    data: bytes

    @property
    def digest(self) -> bytes:
        """The digest of the bytes."""
        return content_digest(self.data)


def has_tokenizer(root: Path) -> bool:
    """Return whether a folder holds a tokenizer."""
    return bool(_carried(root, _TOKENIZERS))


def carried_files(place: Place) -> tuple[SideFile, ...]:
    """Return the files beside the weights of a checkpoint as they are taken along with it, in name order.

    Raises
    ------
    SourceError
        As `side_files`.
    """
    found: list[SideFile] = []
    errors: list[MergepipeError] = []
    for name in sorted([*_carried(place.root), *([CONFIG] if (place.root / CONFIG).is_file() else [])]):
        try:
            found.append(SideFile(name=name, data=_read(place, name)))
        except SourceError as error:
            errors.append(error)
    raise_collected(errors)
    return tuple(found)


def side_files(
    plan: OutputPlan, tokenizer: Place | None, definer: Place | None, *, model: Place | None = None
) -> tuple[SideFile, ...]:
    """Return the side files of an output in name order.

    Parameters
    ----------
    tokenizer
        The folder of the source that the tokenizer and generation config come from; None if it is a single file.
    definer
        The folder of the source that defines the tensors, whose ``config.json`` is taken.
    model
        Where the tokenizer is an adapter's own: the folder that the generation config and the like come from instead.

    Raises
    ------
    SourceError
        For those that cannot be read, or are not what their names say (a Git LFS pointer, a web page); for those of a
        progressive checkpoint that are not what was packed.
    """
    found: list[SideFile] = []
    errors: list[MergepipeError] = []
    places = dict.fromkeys(_carried(model.root, _MODEL_FILES), model) if model is not None else {}
    if tokenizer is not None:
        places |= dict.fromkeys([*_carried(tokenizer.root), *_matching(tokenizer.sealed or (), _CARRIED)], tokenizer)
    for name, place in places.items():
        try:
            found.append(SideFile(name=name, data=_read(place, name)))
        except SourceError as error:
            errors.append(error)
    raise_collected(errors)
    if definer is not None and (definer.root / CONFIG).is_file():
        found.append(SideFile(name=CONFIG, data=adapt_config(_read(definer, CONFIG), plan)))
    return tuple(sorted(found, key=lambda file: file.name))


def _carried(root: Path, patterns: Sequence[str] = _CARRIED) -> list[str]:
    """Return the names of the files that are carried over, whatever they turn out to be."""
    names = [path.relative_to(root).as_posix() for folder in (root, root / "additional_chat_templates")
             if folder.is_dir() for path in sorted(folder.iterdir())]  # fmt: skip
    return _matching(names, patterns)


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def without_private(data: bytes) -> bytes:
    """Return a config without places on the disk of who made it, and without passwords and tokens of URLs.

    The bytes stay as they are where there is none of these.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data
    cleaned = redacted(_LOADED_FROM.sub(_if_public, text))
    return data if cleaned == text else cleaned.encode()


def _if_public(match: re.Match[str]) -> str:
    start, end = (place - match.start() for place in match.span(1))
    return match[0][:start] + match[0][end:] if _LOCAL.match(match[1]) else match[0]


def _read(place: Place, name: str) -> bytes:
    data = read_small(place, name)
    finding = sniff(data[:SNIFF_BYTES])
    if finding is not None and finding.kind in ("git-lfs-pointer", "html"):
        raise place.error(f"is {finding.what}", name=name, hint=finding.hint, found=finding.kind)
    return without_private(data) if name in _PRIVATE else data


def adapt_config(data: bytes, plan: OutputPlan) -> bytes:
    """Return ``config.json`` with the dtype that the weights really have, and with the layers that there are.

    The bytes stay as they are where all of it is right already.
    """
    config = json.loads(data)
    changed = False
    if plan.stack:
        stated = config
        config = restacked(config, plan.stack, {name: source.config for name, source in plan.sources.items()}).config
        changed = config != stated
    stored = stored_dtype(plan)
    if stored is not None:
        changed |= _set_dtype(config, stored, add=plan.output.write.dtype is not None)
    if not changed:
        return data
    # Half of a surrogate pair, which UTF-8 does not have, stays the escape that it was.
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def stored_dtype(plan: OutputPlan) -> str | None:
    """Return the config name of the dtype that most of the output's float elements have, such as ``bfloat16``."""
    counts: Counter[str] = Counter()
    for tensor in plan.tensors:
        if is_mergeable(tensor.dtype):
            counts[tensor.dtype] += tensor.nbytes * 8 // DTYPES[tensor.dtype].bits
    if not counts:
        return None
    return DTYPES[max(sorted(counts), key=lambda name: counts[name])].long_name


def _set_dtype(config: dict[str, Any], dtype: str, *, add: bool) -> bool:
    """Set the dtype wherever a config (or a nested one) states a float dtype; return whether anything changed."""
    changed = _replace_stated(config, dtype)
    if add and not any(key in config for key in _DTYPE_KEYS):
        config["torch_dtype"] = dtype
        changed = True
    return changed


def _replace_stated(config: Mapping[str, Any], dtype: str) -> bool:
    changed = False
    for key, value in list(config.items()):
        if isinstance(value, dict):
            changed |= _replace_stated(value, dtype)
        elif key in _DTYPE_KEYS and isinstance(value, str) and value != dtype and value in _FLOAT_NAMES:
            config[key] = dtype  # type: ignore[index]
            changed = True
    return changed
