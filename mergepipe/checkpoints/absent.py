"""Why there is no checkpoint at a path: what lies there instead, and what to do about it."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from mergepipe.checkpoints.discovery import ADAPTER_FILE, SUFFIX, is_adapter_file
from mergepipe.checkpoints.layers import natural_key
from mergepipe.checkpoints.place import Place
from mergepipe.checkpoints.sniff import SNIFF_BYTES, sniff
from mergepipe.checkpoints.wording import enumerate_names, quote
from mergepipe.errors import SourceError

_FOREIGN = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")
# Files of a training run that hold no weights.
_NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
_RECIPE = """convert {what} once (needs torch and safetensors; `weights_only` keeps code in the file from running):
    import torch; from safetensors.torch import save_file
    state = torch.load({file}, map_location="cpu", weights_only=True)
    save_file({{k: v.clone().contiguous() for k, v in state.items()}}, {target}, metadata={{"format": "pt"}})"""


def visible_names(folder: Path) -> tuple[str, ...]:
    """Return the names in a folder, hidden ones left out, in natural order."""
    return tuple(sorted((name for name in os.listdir(folder) if not name.startswith(".")), key=natural_key))


def missing_path(place: Place) -> SourceError:
    """Return the error for a path at which there is nothing."""
    if place.root.is_symlink():
        return place.error(f"is a link to {quote(str(place.root.readlink()))}, which does not exist")
    parent = place.root.parent
    if not parent.is_dir():
        hint = "variables are not expanded in a path; `~` is" if "$" in place.shown else None
        return place.error("does not exist, nor does the folder that it should lie in", hint=hint)
    siblings = [name for name in _names_or_none(parent) if name.endswith(SUFFIX) or (parent / name).is_dir()]
    close = difflib.get_close_matches(place.root.name, siblings, n=1)
    hint = f"did you mean {quote(os.path.join(os.path.dirname(place.shown), close[0]))}?" if close else None
    return place.error("does not exist", hint=hint)


def not_a_weight_file(place: Place) -> SourceError:
    """Return the error for a path that is a file of another kind than ``*.safetensors``."""
    if place.root.name.endswith(".json"):
        hint = "give the path of the checkpoint's folder"
        return place.error("is a file, not a checkpoint", hint=hint)
    if place.root.name.endswith(_FOREIGN):
        return place.error("is not a safetensors file", hint=_conversion(place.root.name))
    if not place.root.is_file():
        return place.error("is not a regular file", hint="give a folder, or one `.safetensors` file")
    try:
        with place.root.open("rb") as file:
            finding = sniff(file.read(SNIFF_BYTES))
    except OSError as error:
        return place.error(f"cannot be read: {error.strerror or error}")
    what = f": it is {finding.what}" if finding else f": its name does not end in `{SUFFIX}`"
    hint = "give a folder, or one `.safetensors` file"
    return place.error(f"is not a checkpoint{what}", hint=hint)


def adapter(place: Place) -> SourceError:
    """Return the error for a LoRA adapter in the place of a checkpoint."""
    return place.error(
        "is a LoRA adapter, not a checkpoint: it holds no weights of its own",
        hint='name the source that it applies to, beside the path of its folder: `on = "..."`',
    )


def no_adapter(place: Place, names: Sequence[str]) -> SourceError:
    """Return the error for a folder of ``names`` that should be an adapter's, and has no config of one."""
    if any(is_adapter_file(name) for name in names):
        return place.error("lacks `adapter_config.json`, which has the scaling", hint="copy it there from the adapter")
    return place.error(
        "is no LoRA adapter: it has no `adapter_config.json`",
        hint="remove `on`: only an adapter applies to another checkpoint",
    )


def no_adapter_weights(place: Place, names: Sequence[str]) -> SourceError:
    """Return the error for an adapter's folder without ``adapter_model.safetensors``, which holds ``names``."""
    foreign = [name for name in names if name.startswith("adapter_model.") and name.endswith(_FOREIGN)]
    if foreign:
        hint = _recipe("it", foreign[0], Path(foreign[0]).stem + SUFFIX)
        return place.error(f"holds no safetensors weights, only {quote(foreign[0])}", hint=hint, files=foreign)
    return place.error(
        f"lacks the adapter's weights: it has no {quote(ADAPTER_FILE)}", f"it holds {enumerate_names(names)}"
    )


def no_weights(place: Place, names: Sequence[str]) -> SourceError:
    """Return the error for a folder without safetensors weights, which holds ``names``."""
    adapters = [name for name in names if is_adapter_file(name)]
    foreign = [name for name in names if name.endswith(_FOREIGN) and not name.startswith(_NOT_WEIGHTS)]
    foreign = [name for name in foreign if name not in adapters]
    if foreign:
        what = f"holds no safetensors weights, only {enumerate_names(foreign)}"
        return place.error(what, hint=_conversion(foreign[0], of=len(foreign)), files=foreign)
    if adapters:
        return adapter(place)
    index = next((name for name in names if name.endswith(".bin.index.json")), None)
    if index is not None:
        again = "download the checkpoint again, in its safetensors version if it has one"
        return place.error(f"holds no weights: the files that {quote(index)} names are not there", hint=again)
    if not names:
        return place.error("is an empty folder", hint="download the checkpoint into it")
    below = [name for name in names if _holds_weights(place.root / name)]
    if not below and "snapshots" in names:
        below = [f"snapshots/{name}" for name in _names_or_none(place.root / "snapshots")]
    hint = f"the weights may be in {enumerate_names([place.show(name) for name in below])}" if below else None
    return place.error("holds no weights (no `*.safetensors` file)", f"it holds {enumerate_names(names)}", hint=hint)


def _conversion(file: str, *, of: int = 1) -> str:
    """Return how to convert a weight file of another format, one ``of`` several."""
    if file.endswith(".gguf"):
        return "GGUF is made for inference, mostly quantised: use the safetensors checkpoint that it was made from"
    if file.endswith((".h5", ".msgpack")):
        return "load it with transformers (`from_tf=True` or `from_flax=True`) and `save_pretrained` it as safetensors"
    return _recipe("it" if of == 1 else "each of them", file, _target(file))


def _recipe(what: str, file: str, target: str) -> str:
    """Return the recipe for a file. Its name is anybody's, and the lines are there to be pasted: names are literals."""
    return _RECIPE.format(what=what, file=json.dumps(file), target=json.dumps(target))


def _target(file: str) -> str:
    """Return the name for the converted file: ``model.safetensors``, with the shard number if there is one."""
    stem = Path(file).stem.removeprefix("pytorch_")
    return (stem if stem.startswith("model-") else "model") + SUFFIX


def _names_or_none(folder: Path) -> tuple[str, ...]:
    try:
        return visible_names(folder)
    except OSError:
        return ()


def _holds_weights(folder: Path) -> bool:
    return folder.is_dir() and any(name.endswith(SUFFIX) for name in _names_or_none(folder))
