"""The layout of shards: every tensor once, sizes, names, headers and offsets."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.dtypes import DTYPES
from mergepipe.plan.layout import TensorSlot, lay_out, shard_digest

dtypes = st.sampled_from(["F64", "F32", "BF16", "U8", "BOOL", "F4"])


@st.composite
def slots(draw):
    found = []
    for number in range(draw(st.integers(1, 12))):
        dtype, shape = draw(dtypes), tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        count = 1
        for size in shape:
            count *= size
        name = f"{draw(st.text(max_size=4))}.{number}"
        found.append(TensorSlot(name=name, dtype=dtype, shape=shape, nbytes=DTYPES[dtype].nbytes(count)))
    return found


@given(slots(), st.integers(1, 400))
def test_each_tensor_lies_in_one_shard_in_plan_order(tensors, size):
    layout = lay_out(tensors, size)
    placed = [tensor.name for shard in layout.shards for tensor in shard.tensors]
    assert sorted(placed) == sorted(tensor.name for tensor in tensors)
    order = {tensor.name: number for number, tensor in enumerate(tensors)}
    ranges = [[order[tensor.name] for tensor in shard.tensors] for shard in layout.shards]
    assert [number for shard in ranges for number in sorted(shard)] == list(range(len(tensors)))


@given(slots(), st.integers(1, 400))
def test_a_shard_is_not_empty_and_not_larger_than_asked_for_but_by_one_tensor(tensors, size):
    for shard in lay_out(tensors, size).shards:
        filled = [tensor for tensor in shard.tensors if tensor.nbytes]
        assert shard.tensors
        assert sum(tensor.nbytes for tensor in filled) <= size or len(filled) == 1


@given(slots(), st.integers(1, 400))
def test_headers_cover_their_shards_without_gaps(tensors, size):
    for shard in lay_out(tensors, size).shards:
        length = int.from_bytes(shard.header[:8], "little")
        assert len(shard.header) == 8 + length
        assert len(shard.header) % 8 == 0
        header = json.loads(shard.header[8:])
        assert header.pop("__metadata__") == {"format": "pt"}
        position = 0
        for tensor in shard.tensors:
            start, stop = header[tensor.name]["data_offsets"]
            assert (start, stop - start) == (position, tensor.nbytes)
            assert shard.offsets[tensor.name] == len(shard.header) + start
            assert (header[tensor.name]["dtype"], tuple(header[tensor.name]["shape"])) == (tensor.dtype, tensor.shape)
            position = stop
        assert shard.size == len(shard.header) + position


@given(slots(), st.integers(1, 400))
def test_every_tensor_starts_at_a_multiple_of_its_element(tensors, size):
    for shard in lay_out(tensors, size).shards:
        for tensor in shard.tensors:
            assert shard.offsets[tensor.name] % max(1, DTYPES[tensor.dtype].bits // 8) == 0


@given(slots(), st.integers(1, 400))
def test_the_index_is_there_for_several_shards_and_complete(tensors, size):
    layout = lay_out(tensors, size)
    data = layout.index()
    if len(layout.shards) == 1:
        assert data is None
        assert layout.shards[0].name == "model.safetensors"
        return
    index = json.loads(data)
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors)}
    assert index["weight_map"] == {tensor.name: shard.name for shard in layout.shards for tensor in shard.tensors}
    count = len(layout.shards)
    assert [shard.name for shard in layout.shards] == [
        f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
    ]


def slot(name, nbytes):
    return TensorSlot(name=name, dtype="U8", shape=(nbytes,), nbytes=nbytes)


@pytest.mark.parametrize(
    ("sizes", "shards"),
    [
        ([5, 5], [["0", "1"]]),
        ([5, 6], [["0"], ["1"]]),
        ([11, 1, 1], [["0"], ["1", "2"]]),
        ([1, 11, 1], [["0"], ["1"], ["2"]]),
        ([0, 11], [["0", "1"]]),
        ([0, 0], [["0", "1"]]),
        ([10, 0, 1], [["0", "1"], ["2"]]),
    ],
)
def test_shards_of_ten_bytes(sizes, shards):
    layout = lay_out([slot(str(number), size) for number, size in enumerate(sizes)], 10)
    assert [[tensor.name for tensor in shard.tensors] for shard in layout.shards] == shards


def test_a_shards_digest_depends_on_its_header_and_on_every_tensor():
    one, two = bytes(32), bytes([1]) * 32
    found = {
        shard_digest(b"a", [one, two]),
        shard_digest(b"a", [two, one]),
        shard_digest(b"b", [one, two]),
        shard_digest(b"a", [one]),
        shard_digest(b"a", []),
    }
    assert len(found) == 5
