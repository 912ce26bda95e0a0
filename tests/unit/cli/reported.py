"""A made-up report to print and draw."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mergepipe.project.contributions import Contribution, ExpertShare
from mergepipe.project.explain import ParameterGroup
from mergepipe.project.explain_values import LastBuildFacts, ModuleContribution
from mergepipe.project.report_page import (
    OutputReported,
    ReportedBudget,
    ReportedCell,
    ReportedCost,
    ReportedLoss,
    ReportedSource,
    ReportedTensor,
)
from mergepipe.project.reports import Bound

MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
DIGEST = "b3:" + "0123456789abcdef" * 4
BLOCK = 524_288


def fake_contribution(experts: Sequence[str], at: int) -> Contribution:
    """Return numbers that differ from place to place."""
    wave = 0.5 + 0.4 * math.sin(at)
    shares = [wave if number == 0 else (1 - wave) / (len(experts) - 1) for number in range(len(experts))]
    return Contribution(
        base_norm=12.5,
        update_norm=0.125 * (1 + wave),
        update_relative=0.01 * (1 + wave),
        sign_agreement=0.45 + 0.3 * wave if len(experts) > 1 else None,
        experts=tuple(
            ExpertShare(source=name, norm=0.25, norm_share=share, cosine=0.9 - share, sign_agreement=0.5 + share / 3)
            for name, share in zip(experts, shares, strict=True)
        ),
    )


def fake_report(
    *,
    name: str = "assistant",
    experts: Sequence[str] = ("math", "code", "legal"),
    layers: int = 4,
    modules: Sequence[str] = MODULES,
    outside: Sequence[str] = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
    measured: bool = True,
) -> OutputReported:
    """Return a report."""
    places = [(layer, module, f"model.layers.{layer}.{module}.weight") for layer in range(layers) for module in modules]
    places += [(None, tensor.removesuffix(".weight"), tensor) for tensor in outside]
    total = len(experts)
    found = [fake_contribution(experts, at) if measured else None for at in range(len(places))]
    cells, tensors = [], []
    for at, ((layer, module, tensor), numbers) in enumerate(zip(places, found, strict=True)):
        read = at % (total + 1)
        shares = {share.source: share.norm_share for share in numbers.experts} if numbers else {}
        cells.append(
            ReportedCell(
                layer=layer,
                module=module,
                tensors=1,
                read=read,
                total=total,
                update_relative=numbers.update_relative if numbers else None,
                sign_agreement=numbers.sign_agreement if numbers else None,
                shares=shares,
            )
        )
        tensors.append(
            ReportedTensor(
                name=tensor,
                layer=layer,
                module=module,
                operator="task_arithmetic",
                decision="merge",
                dtype="BF16",
                shape=(4096, 128),
                digest=DIGEST,
                read=read,
                total=total,
                state="rebuilt" if at % 2 else "reused",
                why="weight of `math` 0.5 -> 0.6" if at % 2 else "nothing that it is made from changed",
                update_norm=numbers.update_norm if numbers else None,
                update_relative=numbers.update_relative if numbers else None,
                sign_agreement=numbers.sign_agreement if numbers else None,
                shares=shares,
                cosines={share.source: share.cosine for share in numbers.experts} if numbers else {},
            )
        )
    planned = sum(cell.read for cell in cells) * BLOCK
    return OutputReported(
        output=name,
        path=f"build/{name}",
        operator="task_arithmetic",
        operator_version=1,
        digest=DIGEST,
        base="base",
        experts=tuple(experts),
        mergepipe="1.2.3",
        sources=tuple(
            ReportedSource(
                source=source,
                roles=("expert" if number else "base",),
                location={"path": f"models/{source}"},
                digest=DIGEST,
                tensors=len(places),
                bytes=len(places) * 2 * BLOCK,
            )
            for number, source in enumerate(("base", *experts))
        ),
        groups=(
            ParameterGroup(
                operator="task_arithmetic",
                decision="merge",
                base="base",
                tensors=tuple(tensor for _, _, tensor in places),
                layers=(None, *range(layers)),
                params={"lambda": 1.0, "normalize": False},
                experts={source: {"weight": 0.25 * (number + 1)} for number, source in enumerate(experts)},
            ),
        ),
        budget=ReportedBudget(
            budget="50%",
            expert_bytes={"full": len(places) * total * BLOCK, "planned": planned},
            expert_blocks={"total": len(places) * total, "omitted": 17, "zero": 2, "shared": 1},
            by_expert=dict.fromkeys(experts, planned // max(total, 1)),
            bound=Bound(kind="certified", absolute=0.75, relative_to_update=0.125),
            expected_error=0.5,
            omitted_mass=0.2,
            losses=(
                ReportedLoss(
                    tensor=places[0][2], omitted_bytes=BLOCK, bound=0.5, expected=0.25, omitted_mass=0.4
                ),
            ),
        ),
        cost=ReportedCost(
            expert_bytes=planned,
            base_bytes=len(places) * BLOCK,
            output_bytes=len(places) * 2 * BLOCK,
            blocks=len(places),
            shards=2,
            tensors=len(places),
        ),
        last=LastBuildFacts(
            reasons=("weights, parameters or rules changed: weight of `math` 0.5 -> 0.6",),
            run={"expert_bytes_read": 123_456, "base_bytes_read": 65_432, "index_bytes_read": 0, "bytes_written": 7},
            blocks={"total": len(places), "computed": 5, "cached": len(places) - 6, "copied": 1},
            tensors={"rebuilt": 5, "reused": len(places) - 5},
        ),
        contribution=fake_contribution(experts, 3) if measured else None,
        modules=tuple(
            ModuleContribution(
                module=module,
                tensors=layers,
                update_share=1 / len(modules),
                contribution=fake_contribution(experts, at),
            )
            for at, module in enumerate(modules)
        )
        if measured
        else (),
        not_measured=None if measured else "its files are gone",
        measured_bytes_read=0,
        cells=tuple(cells),
        tensors=tuple(tensors),
        decisions=("math: 3 extra tensors that `base` lacks, dropped",),
    )
