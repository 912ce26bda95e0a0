"""How an output's tensors are laid out in shards: names, headers, offsets. Everything follows from shapes alone."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

from mergepipe.digest import content_digest, record_digest
from mergepipe.dtypes import DTYPES
from mergepipe.values import dataclass

_METADATA = {"format": "pt"}  # what transformers asks of a file before it loads it
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlot:
    """A tensor to be laid out: its name, header dtype, shape and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One safetensors file of an output.

    Attributes
    ----------
    name
        The file name in the output directory.
    tensors
        In file order: wider dtypes first, so that every tensor is aligned to its element.
    """

    name: str
    tensors: tuple[TensorSlot, ...]

    @functools.cached_property
    def header(self) -> bytes:
        """The bytes before the data: header length and JSON, padded so that the data is aligned."""
        entries: dict[str, object] = {"__metadata__": _METADATA}
        position = 0
        for tensor in self.tensors:
            end = position + tensor.nbytes
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [position, end],
            }
            position = end
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """The position in the file of every tensor's first byte."""
        position = len(self.header)
        table = {}
        for tensor in self.tensors:
            table[tensor.name] = position
            position += tensor.nbytes
        return table

    @functools.cached_property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    def digest(self, tensor_digests: Sequence[bytes]) -> bytes:
        """Return the shard's digest from those of its tensors, in file order."""
        return shard_digest(self.header, tensor_digests)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """All shards of an output."""

    shards: tuple[Shard, ...]

    @property
    def total_size(self) -> int:
        """Bytes of all tensors, as the index states them."""
        return sum(tensor.nbytes for shard in self.shards for tensor in shard.tensors)

    def index(self) -> bytes | None:
        """Return the content of ``model.safetensors.index.json``, or None for a single shard."""
        if len(self.shards) == 1:
            return None
        weight_map = {tensor.name: shard.name for shard in self.shards for tensor in shard.tensors}
        index = {"metadata": {"total_size": self.total_size}, "weight_map": dict(sorted(weight_map.items()))}
        return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def shard_digest(header: bytes, tensor_digests: Sequence[bytes]) -> bytes:
    """Return the Merkle digest of a safetensors file from its header bytes and tensor digests in file order."""
    return record_digest("shard", content_digest(header), tuple(tensor_digests))


def lay_out(tensors: Sequence[TensorSlot], shard_size: int) -> ShardLayout:
    """Fill shards in the given order, each up to ``shard_size`` bytes of tensor data.

    A tensor larger than that gets a shard of its own; no shard is empty. Names follow Hugging Face's rule.
    """
    groups: list[list[TensorSlot]] = []
    filled = 0
    for tensor in tensors:
        if not groups or (filled and filled + tensor.nbytes > shard_size):
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    return ShardLayout(
        shards=tuple(
            Shard(name=_shard_name(number, len(groups)), tensors=_aligned(group))
            for number, group in enumerate(groups, start=1)
        )
    )


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _aligned(tensors: Sequence[TensorSlot]) -> tuple[TensorSlot, ...]:
    return tuple(sorted(tensors, key=lambda tensor: -DTYPES[tensor.dtype].bits))
