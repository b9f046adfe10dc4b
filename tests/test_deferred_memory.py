"""A rank's memory while it builds and shards a model larger than its part."""

import pathlib

import torch
import torch.distributed as dist
from torch import nn

import zerocore
from zerocore.deferred import heap

MB = 2**20
LAYERS, WIDTH = 26, 1024
CACHE_BYTES = 16 * MB


def build():
    """208 MB, initialised twice."""
    layers = [nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(LAYERS)]
    for layer in layers:
        nn.init.normal_(layer.weight, 0.0, 0.02)
    return nn.Sequential(*layers)


def resident(key):
    """Bytes: VmRSS, now, or VmHWM, the peak since it was reset."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":")) * 1024


def peak(how):
    """Peak of resident bytes over those before, and the sum of the first parameter's shards."""
    # What torch and gloo load and allocate when they are first used is not the model's.
    zerocore.shard(zerocore.deferred(lambda: nn.Linear(64, 64), 0, min_bytes=1), 3)
    heap.trim()
    before = resident("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    if how == "deferred":
        model = zerocore.deferred(build, 5, cache_bytes=CACHE_BYTES)
    elif how == "meta":
        with torch.device("meta"):
            model = build()
    else:
        torch.manual_seed(5)
        model = build()
    zerocore.shard(model, 3, bucket_bytes=0)
    most = resident("VmHWM") - before
    held = sum(param.nbytes for param in model.parameters())
    part = torch.tensor([model[20].weight.double().sum().item()], dtype=torch.float64)
    dist.all_reduce(part)
    return most, held, part.item()


def test_peak_is_the_shard_the_largest_unit_and_the_cache(ranks):
    unit = 4 * 2 * WIDTH**2
    deferred = ranks(2, peak, "deferred")
    for most, held, _ in deferred:
        assert held == LAYERS * unit / 2
        # The unit, one parameter beside it, what gloo and the allocator keep.
        bound = held + 2 * unit + CACHE_BYTES + 24 * MB
        assert most < bound, f"{most / MB:.0f} MB, expected less than {bound / MB:.0f}"
    for most, _, part in ranks(2, peak, "eager"):
        assert part == deferred[0][2], "and the values must be the same"
        assert most > bound, "the bound must be one that holds for deferred models only"


def growth(where):
    """Growth of resident bytes while a model of four units is sharded."""
    zerocore.shard(zerocore.deferred(lambda: nn.Linear(64, 64), 0, min_bytes=1), 3)
    with torch.device(where):
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4)))
    heap.trim()
    before = resident("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    zerocore.shard(model, 3, bucket_bytes=0, init="empty" if where == "meta" else None)
    return resident("VmHWM") - before


def test_models_in_memory_grow_by_the_shard_of_a_unit(ranks):
    unit = 4 * 4096**2
    for grown in ranks(2, growth, "cpu"):
        assert grown < unit / 2 + 24 * MB, f"{grown / MB:.0f} MB"


def test_empty_models_grow_by_their_shards(ranks):
    held = 2 * 4 * 4096**2
    for grown in ranks(2, growth, "meta"):
        assert grown < held + 24 * MB, f"{grown / MB:.0f} MB"


def test_peak_of_a_meta_model_is_the_shard_and_the_largest_unit(ranks):
    unit = 4 * 2 * WIDTH**2
    for most, held, _ in ranks(2, peak, "meta"):
        bound = held + unit + 24 * MB
        assert most < bound, f"{most / MB:.0f} MB, expected less than {bound / MB:.0f}"
