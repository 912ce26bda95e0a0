"""What users do with an output: transformers loads it, and it is the model that the same merge by hand gives.

By hand means torch, the formula, and the parameters as a reader of `Mergefile.toml` would work them out.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.cli import run_mergepipe

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "family"
FAMILY = Path(os.environ.get("MERGEPIPE_FAMILY") or ROOT.parent / "shared" / "family").absolute()
DOMAINS = ("c", "docs", "js", "legal", "python")
CONTEXT = 256
BATCH = 16

# transformers and torch warn about themselves; what mergepipe does is not in this process.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
needs_family = pytest.mark.skipif(
    not (FAMILY / "eval").is_dir(),
    reason=f"no texts at {FAMILY / 'eval'}; MERGEPIPE_FAMILY may name a folder with some",
)

Tensors = Mapping[str, Any]


@pytest.fixture(scope="module", autouse=True)
def transformers() -> Any:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_OFFLINE", "1")
        environment.setenv("TOKENIZERS_PARALLELISM", "false")
        pytest.importorskip("torch").set_num_threads(1)
        yield pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the folder of the example's outputs, built from a copy of the repository's Mergefile."""
    project = tmp_path_factory.mktemp("example")
    shutil.copytree(ROOT / "examples", project / "examples")
    shutil.copy(ROOT / "Mergefile.toml", project)
    result = run_mergepipe(["build"], project)
    assert result.code == 0, result.text
    return project / "build"


def weights(folder: Path) -> dict[str, Any]:
    """Return all tensors of a checkpoint folder, sharded or not."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def average(*experts: Tensors) -> Callable[[str], Any]:
    def merge(name: str) -> Any:
        total = sum(expert[name].float() for expert in experts)
        return (total / len(experts)).to(experts[0][name].dtype)

    return merge


def task_arithmetic(base: Tensors, *experts: tuple[Tensors, Callable[[str], float]]) -> Callable[[str], Any]:
    """Return base + sum of weight * (expert - base), by tensor name; every step in float32."""
    import torch

    def merge(name: str) -> Any:
        origin = base[name].float()
        total = torch.zeros_like(origin)
        for expert, weight in experts:
            total = total + torch.tensor(weight(name), dtype=torch.float32) * (expert[name].float() - origin)
        return (origin + total).to(base[name].dtype)

    return merge


def always(weight: float) -> Callable[[str], float]:
    return lambda _: weight


def python_weight(name: str) -> float:
    """Return the weight of `python` in `assistant`: a rule raises it in the attention of layers 2 and 3."""
    in_rule = fnmatch.fnmatchcase(name, "*.self_attn.*") and int(name.split(".")[2]) in (2, 3)
    return 0.5 if in_rule else 0.4


def by_hand(output: str) -> dict[str, Any]:
    """Return the tensors of an output of the example, merged by hand."""
    base, python, c, legal, docs = (
        weights(EXAMPLE / name) for name in ("base", "expert-python", "expert-c", "expert-legal", "expert-docs-partial")
    )
    assistant = ((python, python_weight), (c, always(0.35)), (legal, always(0.3)))
    merges = {
        "average": average(python, c),
        "assistant": task_arithmetic(base, *assistant),
        "docs-boost": task_arithmetic(base, (docs, always(1.2))),
    }
    return {name: merges[output](name) for name in base}


def same_bits(ours: Tensors, theirs: Tensors) -> list[str]:
    """Return the names of tensors that differ in a bit (the sign of a zero is none) or are only in one of the two."""
    import torch

    names = sorted({*ours, *theirs})
    return [
        name for name in names if name not in ours or name not in theirs or not torch.equal(ours[name], theirs[name])
    ]


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def model_of(tensors: Tensors, like: Path) -> Any:
    """Return a model with the config of the folder ``like`` and these weights, without a file of mergepipe's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = next(iter(tensors.values())).dtype
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(like), dtype=dtype)
    model.load_state_dict(dict(tensors), strict=True)
    return model.eval()


def nats_per_token(model: Any, tokenizer: Any, text: str) -> float:
    """Return the mean negative log-likelihood of a text's tokens, in windows of `CONTEXT` tokens, in float32."""
    import torch

    ids = tokenizer(text, verbose=False, return_tensors="pt").input_ids[0]
    windows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    total = 0.0
    with torch.inference_mode():
        for batch in windows.split(BATCH):
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
            ).item()
    return total / (len(windows) * (CONTEXT - 1))


@pytest.mark.parametrize("output", ["average", "assistant", "docs-boost"])
def test_the_weights_equal_the_merge_by_hand_bit_for_bit(built, output):
    assert same_bits(weights(built / output), by_hand(output)) == []


@pytest.mark.parametrize("output", ["average", "assistant", "docs-boost"])
def test_transformers_loads_the_output_whole(built, output, transformers):
    _, info = transformers.AutoModelForCausalLM.from_pretrained(built / output, output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}


@pytest.mark.parametrize("output", ["average", "assistant", "docs-boost"])
def test_the_logits_equal_those_of_the_merge_by_hand(built, output):
    import torch

    ids = torch.arange(0, 512, 2).view(2, 128)
    with torch.inference_mode():
        ours = load(built / output)(input_ids=ids).logits
        theirs = model_of(by_hand(output), EXAMPLE / "base")(input_ids=ids).logits
        base = load(EXAMPLE / "base")(input_ids=ids).logits
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, base), "the merge changed something"


def test_the_tokenizer_is_that_of_the_base(built, transformers):
    text = "def merge(base, experts):\n    return base"
    ours = transformers.AutoTokenizer.from_pretrained(built / "assistant")
    theirs = transformers.AutoTokenizer.from_pretrained(EXAMPLE / "base")
    assert ours(text).input_ids == theirs(text).input_ids


@needs_family
@pytest.mark.parametrize("output", ["average", "assistant", "docs-boost"])
def test_the_perplexity_equals_that_of_the_merge_by_hand(built, output, transformers):
    tokenizer = transformers.AutoTokenizer.from_pretrained(built / output)
    ours, theirs = load(built / output).float(), model_of(by_hand(output), EXAMPLE / "base").float()
    for domain in DOMAINS:
        text = (FAMILY / "eval" / f"{domain}.txt").read_text(encoding="utf-8")
        assert nats_per_token(ours, tokenizer, text) == nats_per_token(theirs, tokenizer, text), domain


_FAMILY_MERGEFILE = """\
version = 1
[sources]
base = {{ path = '{family}/base' }}
c = {{ path = '{family}/expert-c' }}
js = {{ path = '{family}/expert-js' }}
legal = {{ path = '{family}/expert-legal' }}
python = {{ path = '{family}/expert-python' }}

[outputs.merged]
operator = "task_arithmetic"
base = "base"
experts = ["c", "js", "legal", "python"]
params = {{ weight = 0.3 }}
write = {{ shard_size = "2 MB" }}
"""


@needs_family
def test_a_larger_family_merges_as_by_hand_into_shards(tmp_path, transformers):
    (tmp_path / "Mergefile.toml").write_text(_FAMILY_MERGEFILE.format(family=FAMILY), encoding="utf-8")
    result = run_mergepipe(["build"], tmp_path)
    assert result.code == 0, result.text
    merged = tmp_path / "build" / "merged"
    assert len(list(merged.glob("model-*.safetensors"))) > 1

    experts = [weights(FAMILY / f"expert-{name}") for name in ("c", "js", "legal", "python")]
    base = weights(FAMILY / "base")
    merge = task_arithmetic(base, *((expert, always(0.3)) for expert in experts))
    hand = {name: merge(name) for name in base}
    assert same_bits(weights(merged), hand) == []

    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    text = (FAMILY / "eval" / "legal.txt").read_text(encoding="utf-8")
    ours = nats_per_token(load(merged), tokenizer, text)
    assert ours == nats_per_token(model_of(hand, FAMILY / "base"), tokenizer, text)
    assert ours < nats_per_token(load(FAMILY / "base"), tokenizer, text), "the merge is better than its base here"


_STACK = """\
version = 1
[sources]
base = {{ path = '{example}/base' }}
c = {{ path = '{example}/expert-c' }}
python = {{ path = '{example}/expert-python' }}

[outputs.stack]
operator = "passthrough"
[[outputs.stack.slices]]
source = "c"
layers = "0..3"
[[outputs.stack.slices]]
source = "python"
layers = "1..2"
[[outputs.stack.slices]]
operator = "linear"
experts = ["c", {{ source = "python", layers = "1..3" }}]
layers = "2..4"
"""


def stack_by_hand(name: str, c: Tensors, python: Tensors) -> Any:
    """Return a tensor of the stack: layers 0 to 2 of `c`, 1 of `python`, and two that are averaged."""
    parts = name.split(".")
    if not name.startswith("model.layers."):
        averaged = "embed" not in name
        return average(c, python)(name) if averaged else c[name]
    layer = int(parts[2])

    def at(number: int) -> str:
        return ".".join([*parts[:2], str(number), *parts[3:]])

    if layer < 4:
        return c[name] if layer < 3 else python[at(1)]
    ours, theirs = c[at(layer - 2)], python[at(layer - 3)]
    return ((ours.float() + theirs.float()) / 2).to(ours.dtype)


def test_a_stack_of_six_layers_is_a_model_that_transformers_loads_and_runs(tmp_path, transformers):
    import torch

    (tmp_path / "Mergefile.toml").write_text(_STACK.format(example=EXAMPLE), encoding="utf-8")
    result = run_mergepipe(["build"], tmp_path)
    assert result.code == 0, result.text
    folder = tmp_path / "build" / "stack"
    _, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    model = load(folder)
    assert len(model.model.layers) == model.config.num_hidden_layers == 6

    c, python = weights(EXAMPLE / "expert-c"), weights(EXAMPLE / "expert-python")
    names = [name.replace("layers.0.", f"layers.{layer}.") for name in c for layer in range(6) if "layers.0." in name]
    hand = {name: stack_by_hand(name, c, python) for name in [*names, *(n for n in c if "layers" not in n)]}
    assert same_bits(weights(folder), hand) == []

    config = transformers.AutoConfig.from_pretrained(EXAMPLE / "base", num_hidden_layers=6)
    other = transformers.AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
    other.load_state_dict(hand, strict=True)
    ids = torch.arange(0, 512, 2).view(2, 128)
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)
