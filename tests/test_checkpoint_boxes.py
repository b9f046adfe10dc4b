"""Ranges of flat tensors as boxes, for every range of small shapes; no processes needed."""

import itertools
import math

import pytest
import torch

from zerocore.checkpoint.boxes import boxes_of
from zerocore.checkpoint.shards import FlatShard
from zerocore.strides import memory_strides, row_major

SHAPES = [
    (),
    (1,),
    (7,),
    (3, 5),
    (1, 4),
    (4, 1),
    (2, 3, 4),
    (3, 1, 2),
    (1, 1, 1),
    (2, 3, 2, 3),
    (3, 3, 3, 3),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_are_the_range_in_order(shape):
    full = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(full.numel() + 1), 2):
        boxes = boxes_of(shape, start, stop)
        assert len(boxes) <= max(2 * len(shape) - 1, 1)
        found = []
        for offsets, sizes, first in boxes:
            part = full[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            assert part.numel() > 0 and part.flatten()[0] == first
            found += part.flatten().tolist()
        assert found == list(range(start, stop))


def test_ranges_outside_are_refused():
    for start, stop in ((-1, 2), (2, 1), (0, 7)):
        with pytest.raises(ValueError, match="within 6 elements"):
            boxes_of((2, 3), start, stop)


MEMORY = {
    "row-major": lambda: torch.randn(3, 4, 2),
    "transposed": lambda: torch.randn(5, 7).t(),
    "permuted": lambda: torch.randn(2, 4, 3).permute(1, 2, 0),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "gaps": lambda: torch.randn(6, 8)[:, ::2],
    "scalar": lambda: torch.randn(()),
    "bf16": lambda: torch.randn(3, 5).bfloat16().t(),
    "complex": lambda: torch.randn(3, 5, dtype=torch.complex64),
    "bool": lambda: torch.randn(3, 5) > 0,
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("memory", MEMORY)
def test_shards_of_any_memory_order_make_the_tensor(memory, ranks):
    tensor = MEMORY[memory]()
    whole = FlatShard.of(tensor)
    found = torch.zeros_like(tensor)
    times = torch.zeros(tensor.shape, dtype=torch.int64)
    for rank in range(ranks):
        for offsets, sizes, values in whole.part(rank, ranks).chunks():
            place = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            assert values.shape == sizes
            found[place] = values
            times[place] += 1
    assert torch.equal(found, tensor)
    assert (times == 1).all()


def test_chunks_are_views_that_fill_the_tensor():
    tensor = torch.zeros(4, 6).t()
    for rank in range(3):
        for chunk in FlatShard.of(tensor).part(rank, 3).chunks():
            chunk.values.fill_(rank + 1)
    assert tensor.t().flatten().tolist() == [1.0] * 8 + [2.0] * 8 + [3.0] * 8


def test_an_empty_tensor_is_one_empty_box():
    for shape in ((0,), (0, 3), (4, 0, 2)):
        [chunk] = FlatShard.of(torch.empty(shape)).chunks()
        assert chunk.sizes == shape and chunk.offsets == (0,) * len(shape)
    assert FlatShard.of(torch.randn(3)).part(0, 4).chunks() == []


def test_memory_strides():
    assert memory_strides(torch.empty(6, 8)[:, ::2]) == (4, 1)
    assert memory_strides(torch.empty(5, 7).t()) == (1, 7)
    assert memory_strides(torch.empty(0, 3)) == (3, 1)
    for shape in ((), (3,), (2, 3, 4), (2, 0, 3), (1, 1, 5)):
        assert row_major(shape) == torch.empty(shape).stride()
