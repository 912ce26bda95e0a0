"""Which codes of deltas a group makes: those that a budget asks for and nobody knows, and packs that are gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from mergepipe.cache.progressive import CodeStore
from mergepipe.cache.sources import SourceIndex
from mergepipe.engine.coding import CodeKey, Coding
from mergepipe.engine.meter import Meter
from mergepipe.engine.work import Group, Input
from mergepipe.graph.given import checked_code
from mergepipe.graph.prices import are_coded
from mergepipe.plan.codes import coded_slots, read_codes
from mergepipe.plan.values import OutputPlan, TensorPlan, first_users

BeginCodings = Callable[[Group, CodeStore, SourceIndex], Iterable[Coding]]
"""Begins codes that a group makes."""


def begin_codings(group: Group, codes: CodeStore, index: SourceIndex) -> Iterator[Coding]:
    """Begin the codes that budgets of the group's outputs ask for, where they are not known from earlier."""
    begun: set[CodeKey] = set()
    for work in group.works:
        for coded in coded_slots(work.plan, work.recipe.tensor):
            if coded.expert.coded_only:
                continue
            base, expert = (group.inputs[key] for key in (work.inputs[0], work.inputs[coded.slot]) if key is not None)
            pair = (base.key, expert.key)
            if pair not in begun and not _is_known(base, expert, codes, index):
                begun.add(pair)
                yield Coding.begin(codes, base, expert, index.geometry.block_elements)


def first_codings(group: Group, codes: CodeStore, index: SourceIndex) -> Iterator[Coding]:
    """Begin the codes that resolved plans of the group's outputs read, and that are not known from earlier."""
    begun: set[CodeKey] = set()
    for work in group.works:
        (tensor,) = (tensor for tensor in work.plan.tensors if tensor.name == work.name)
        for slot, coded in read_codes(work.plan, tensor).items():
            if coded.expert.coded_only:
                continue
            base, expert = (group.inputs[key] for key in (work.inputs[0], work.inputs[slot]) if key is not None)
            pair = (base.key, expert.key)
            if pair not in begun and not _is_known(base, expert, codes, index):
                begun.add(pair)
                yield Coding.begin(codes, base, expert, index.geometry.block_elements)


def uncoded_tensors(
    plans: Iterable[OutputPlan], codes: CodeStore, index: SourceIndex
) -> Iterator[tuple[OutputPlan, TensorPlan]]:
    """Yield the tensors of resolved plans that read codes of which nothing is known, as if they were read whole."""
    for plan in plans:
        for tensor in plan.tensors:
            if not are_coded(read_codes(plan, tensor).values(), codes, index):
                yield plan, replace(tensor, access=None)


def lacking_packs(groups: Iterable[Group], codes: CodeStore) -> list[Group]:
    """Return the groups that read packs which are not there."""
    return [
        group
        for group in groups
        if not all(code.is_given or codes.has_pack(code.stored) for code in group.codes.values())
    ]


def remade_codings(group: Group, codes: CodeStore, index: SourceIndex) -> Iterator[Coding]:
    """Begin again the packs that the group reads and that are not there."""
    for code in group.codes.values():
        if not code.is_given and not codes.has_pack(code.stored):
            codes.quarantine(code.stored)  # what is no file and has the name of one
            yield Coding.begin(codes, code.base, code.expert, index.geometry.block_elements)


def check_given(group: Group, index: SourceIndex) -> None:
    """Check that the codes of progressive checkpoints that a group has read are against its bases: it read these too.

    Raises
    ------
    PlanError
        If one is against another.
    """
    for work in group.works:
        for coded in read_codes(work.plan, work.recipe.tensor).values():
            checked_code(work.plan, coded.base, coded.expert, index)


def count_headers(plans: Sequence[OutputPlan], index: SourceIndex, meters: Mapping[str, Meter]) -> None:
    """Count what was read of the headers of progressive checkpoints, for the first output that uses each.

    Those that none of these outputs uses are left for the next run.
    """
    users = first_users(plans)
    for source, count in index.given.take_read(users).items():
        meters[users[source]].index_bytes += count


def finish_codings(codings: Iterable[Coding], codes: CodeStore | None, index: SourceIndex) -> None:
    """Put finished packs into the cache; the content of all inputs is known by now.

    Raises
    ------
    StorageError
        If the file system refuses.
    """
    for coding in codings:
        assert codes is not None, "codes are made where they can be kept"
        base, expert = (index.tensor(one.ref.source, one.ref.info) for one in (coding.base, coding.expert))
        assert base is not None, "what was read whole is known"
        assert expert is not None, "what was read whole is known"
        coding.finish(codes, base, expert)


def _is_known(base: Input, expert: Input, codes: CodeStore, index: SourceIndex) -> bool:
    digests = [index.tensor(one.ref.source, one.ref.info) for one in (base, expert)]
    if digests[0] is None or digests[1] is None:
        return False
    key = codes.key(digests[0], digests[1])
    return codes.prices(key) is not None or codes.adopt(key) is not None
