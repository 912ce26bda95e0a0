"""Making groups: which source tensors are read together, for which outputs, and with which earlier results at hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.records import StagedTensor
from mergepipe.cache.sources import SourceIndex
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.engine.adapters import AdapterInput, Factors
from mergepipe.engine.coding import CodeInput, CodeKey, given_opener, opener
from mergepipe.engine.staging import StagedShard
from mergepipe.engine.work import Group, Input, InputKey, TensorWork
from mergepipe.errors import InternalError
from mergepipe.graph.blocks import Holding, TensorRecipe
from mergepipe.graph.given import checked_code
from mergepipe.plan.codes import Coded, read_codes
from mergepipe.plan.values import InputRef, OutputPlan, TensorPlan


class GroupMaker:
    """Turns pending output tensors into groups.

    Parameters
    ----------
    shards
        By (output, tensor) the staged shard that the tensor belongs to.
    staged
        By (output, tensor) what an unfinished build left of it.
    """

    def __init__(
        self,
        index: SourceIndex,
        catalog: Catalog,
        shards: Mapping[tuple[str, str], StagedShard],
        staged: Mapping[tuple[str, str], StagedTensor],
    ) -> None:
        self._index = index
        self._catalog = catalog
        self._codes = index.codes
        self._shards = shards
        self._staged = staged
        self._places: dict[tuple[str, int], str] = {}

    def work(self, plan: OutputPlan, tensor: TensorPlan) -> TensorWork:
        """Return the work for one output tensor."""
        name = (plan.output.name, tensor.name)
        earlier = self._catalog.candidates(plan.output.name, tensor.name, tensor.recipe, tensor.shape)
        holdings = [Holding.of_result(result) for result in earlier]
        if name in self._staged:
            holdings.insert(0, Holding.of_staged(self._staged[name]))
        return TensorWork(
            plan=plan,
            recipe=TensorRecipe.of(tensor, plan.geometry),
            shard=self._shards[name],
            inputs=tuple(self._key(slot) if slot else None for slot in tensor.slots),
            candidates=tuple(holdings),
        )

    def group(self, works: Sequence[TensorWork]) -> Group:
        """Return the group of these works with all of their inputs."""
        inputs: dict[InputKey, Input] = {}
        adapters: dict[InputKey, AdapterInput] = {}
        factors: dict[tuple[InputKey, InputKey], Factors] = {}
        levels = self._levels(works)
        for work in works:
            for slot in work.recipe.tensor.slots:
                if slot is None:
                    continue
                if slot.lora is None:
                    key = self._key(slot)
                    if key not in inputs:
                        inputs[key] = self._input(slot, levels[key])
                    continue
                adapters.setdefault(self._key(slot), self._adapter(slot, factors))
                if slot.lora.on is not None:
                    inputs.setdefault(self._key(slot.lora.on), self._input(slot.lora.on))
        return Group(works=tuple(works), inputs=inputs, adapters=adapters, codes=self.codes(works, inputs))

    def codes(self, works: Sequence[TensorWork], inputs: Mapping[InputKey, Input]) -> dict[CodeKey, CodeInput]:
        """Return the codes that these works read."""
        found: dict[CodeKey, CodeInput] = {}
        for work in works:
            for slot, coded in read_codes(work.plan, work.recipe.tensor).items():
                base, expert = (self._index.tensor(ref.source, ref.info) for ref in (coded.base, coded.expert))
                given = checked_code(work.plan, coded.base, coded.expert, self._index)
                if given is not None:
                    base = given.header.base_digest  # the base itself may be cold; `check_given` looks at it then
                if base is None or expert is None:
                    raise InternalError(f"`{work.name}` is merged from a code of content that is not known")
                key, stored = work.code(slot), self._codes.key(base, expert)
                if key not in found:
                    found[key] = CodeInput(
                        base=inputs[key[0]],
                        expert=inputs[key[1]],
                        stored=stored,
                        open=opener(self._codes, stored) if given is None else given_opener(given),
                        header=self._header(coded, stored) if given is None else None,
                        is_given=given is not None,
                    )
        return found

    def _header(self, coded: Coded, stored: bytes) -> tuple[Path, int]:
        from mergepipe.progressive.header import header_bytes  # numpy comes with it

        blocks = coded.expert.grid(self._index.geometry).count
        return self._codes.path(stored), header_bytes(len(coded.expert.info.shape), blocks)

    def _levels(self, works: Sequence[TensorWork]) -> dict[InputKey, bytes | None]:
        """Return which blocks of each stored input any of these works reads; None for all of them."""
        found: dict[InputKey, bytes | None] = {}
        for work in works:
            for slot in work.recipe.tensor.slots:
                for ref in () if slot is None else slot.stored:
                    key = self._key(ref)
                    before = found.get(key, ref.levels)
                    whole = before is None or ref.levels is None
                    found[key] = None if whole else bytes(map(max, before or b"", ref.levels or b""))
        return found

    def groups(self, pending: Iterable[tuple[OutputPlan, TensorPlan]]) -> list[Group]:
        """Return the groups of all pending tensors, in the order of first appearance.

        Tensors of one name are a group, whatever their outputs, for they have inputs in common. So does a tensor of
        another name whose inputs are all read by a group already: a layer that a stack takes a second time.
        """
        members: list[list[TensorWork]] = []
        by_name: dict[str, int] = {}
        by_input: dict[InputKey, int] = {}
        for plan, tensor in pending:
            work = self.work(plan, tensor)
            keys = [key for key in work.inputs if key is not None]
            readers = {by_input.get(key, -1) for key in keys}
            number = readers.pop() if len(readers) == 1 else -1
            if number < 0:
                number = by_name.setdefault(tensor.name, len(members))
            if number == len(members):
                members.append([])
            members[number].append(work)
            for key in keys:
                by_input.setdefault(key, number)
        return [self.group(works) for works in members]

    def hashing(self, sources: Iterable[str], covered: Iterable[Group]) -> list[Group]:
        """Return groups that only hash: the cold tensors of these sources that no other group reads."""
        read: set[InputKey] = set()
        for group in covered:
            read.update(group.inputs)
            for adapter in group.adapters.values():
                read.update((adapter.factors.a.key, adapter.factors.b.key))
        groups = []
        for source in sources:
            for info in self._index.cold(source):
                key = self._stored_key(source, info)
                if key not in read:
                    read.add(key)
                    groups.append(Group(works=(), inputs={key: self._input(InputRef(source=source, info=info))}))
        return groups

    def _key(self, ref: InputRef) -> InputKey:
        if ref.lora is not None:
            on = None if ref.lora.on is None else self._key(ref.lora.on)
            parts = (self._key(ref.lora.a), self._key(ref.lora.b), ref.lora.scaling, ref.lora.transposed, on)
            return str(self._index.file(ref.source, ref.lora.b.info).path), f"adapter {parts}"
        return self._stored_key(ref.source, ref.info)

    def _stored_key(self, source: str, info: TensorInfo) -> InputKey:
        path = self._places.get((source, info.file))
        if path is None:
            path = self._places[source, info.file] = str(self._index.file(source, info).path)
        return path, info.name

    def _input(self, ref: InputRef, levels: bytes | None = None) -> Input:
        known = self._index.blocks(ref.source, ref.info)
        if known is None and levels is not None:
            known = self._index.pins(ref.source, ref.info, levels)
        return Input(
            key=self._key(ref),
            ref=ref,
            file=self._index.file(ref.source, ref.info),
            grid=ref.grid(self._index.geometry),
            known=known,
            levels=levels,
            earlier=self._index.read_blocks(ref.source, ref.info) if known is None else b"",
        )

    def _adapter(self, ref: InputRef, shared: dict[tuple[InputKey, InputKey], Factors]) -> AdapterInput:
        assert ref.lora is not None, "an adapter's tensor has factors"
        pair = (self._key(ref.lora.a), self._key(ref.lora.b))
        if pair not in shared:
            shared[pair] = Factors(a=self._input(ref.lora.a), b=self._input(ref.lora.b))
        return AdapterInput(
            key=self._key(ref),
            ref=ref,
            lora=ref.lora,
            grid=ref.grid(self._index.geometry),
            factors=shared[pair],
            on=None if ref.lora.on is None else self._key(ref.lora.on),
        )
