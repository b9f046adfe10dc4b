"""Training on simulated GPUs: the tests of every device, and what a step costs beside FSDP2's."""

import gc
import time

import cuda_sim
import pytest
import torch
import torch.distributed as dist
from device_training import *  # noqa: F403
from device_training import GPT, Block, batch, build, loss_of
from device_waits import *  # noqa: F403
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerocore


@pytest.fixture
def may_hide():
    """The simulated GPU does not overwrite freed memory; the fake NPU does, and shows this one."""
    return ("memory_free",)


LAYERS = 6
UNITS = LAYERS + 1
PARAMETERS = 2 * 1024**2  # of the model of `bytes_beside_the_ledger`


@pytest.fixture(scope="session")
def devices(gpus):
    return gpus


def prepare(system, stage, accumulate=torch.float32):
    torch.manual_seed(0)
    model, bf16 = GPT(LAYERS, dim=128, heads=4, seq=32).cuda(), torch.bfloat16
    if system == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16)
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        for module in [*model.blocks, model]:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if system == "plain":
        return model.to(bf16), None
    precision = zerocore.MixedPrecision(param=bf16, buffer=bf16, accumulate=accumulate)
    zerocore.shard(model, stage, units=[Block], mixed_precision=precision)
    return model, zerocore.AdamW(model.parameters(), lr=1e-3)


def step_cost(system, stage=3, accumulate=torch.float32):
    """Counters of one step after three others."""
    gc.collect()
    torch.cuda.empty_cache()  # of other cases
    model, optimizer = prepare(system, stage, accumulate)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step():
        tokens = torch.randint(256, (2, 32), generator=generator).pin_memory()
        tokens = tokens.cuda(non_blocking=True)
        logits = model(tokens).float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    cuda_sim.reset_counters()
    step()
    waits = {kind: cuda_sim.counters()[kind] for kind in ("stream_syncs", "device_syncs")}
    torch.cuda.synchronize()
    counters = cuda_sim.counters()
    device = str(torch.cuda.current_device())
    return {
        "events": counters["event_records"] + counters["event_waits"],
        "device": counters["devices"][device]["peak"],
        "to the host": counters["copied_bytes"].get("d2h", 0),
        "waits": waits,
        "operators": counters["host_funcs_by_name"],
        "launches": counters["launches"],
    }


def launches(cost, kernel):
    return sum(count for name, count in cost["launches"].items() if f"{kernel}_kernel" in name)


def copies(cost):
    return cost["operators"].get("aten::copy_", 0)


def test_a_step_costs_a_third_of_the_events_of_fsdp2(gpus):
    ours, theirs = gpus(2, step_cost, "zerocore"), gpus(2, step_cost, "fsdp2")
    for own, other in zip(ours, theirs, strict=True):
        assert 0 < own["events"] <= other["events"] / 3
        assert own["device"] < other["device"]
        assert own["to the host"] == 0
        assert own["waits"] == {"stream_syncs": 0, "device_syncs": 0}


@pytest.mark.parametrize("accumulate", [torch.float32, torch.bfloat16])
def test_the_work_of_a_step_by_units(gpus, accumulate):
    """Beside the model's own: a cast for each gather, a packing, a step, a sum in another dtype."""
    ours, plain = gpus(2, step_cost, "zerocore", 3, accumulate), gpus(2, step_cost, "plain")
    for own, other in zip(ours, plain, strict=True):
        assert launches(own, "pack") == UNITS
        assert launches(own, "adamw") == UNITS
        assert launches(own, "sum") == (UNITS if accumulate == torch.float32 else 0)
        gathers = 2 * UNITS - 2  # the root and the last block stay from forward to backward
        sent = {name: n for name, n in own["operators"].items() if name.startswith("nccl")}
        assert sum(n for name, n in sent.items() if "all_gather" in name) == gathers
        assert sum(n for name, n in sent.items() if "reduce_scatter" in name) == UNITS
        assert copies(own) - copies(other) <= gathers
        extra = set(own["operators"]) - set(other["operators"]) - set(sent)
        assert extra <= {"aten::copy_"}, extra


def bytes_beside_the_ledger(stage):
    """Bytes of the allocator at rest after a step, and at the peak of a step; the ledger.

    Wide layers and one token, so that nearly all memory is what the ledger counts.
    """
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(8)]
    model = torch.nn.Sequential(*layers).cuda()
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS
    before = torch.cuda.memory_allocated()
    zerocore.shard(model, stage, units=[torch.nn.Linear])
    optimizer = zerocore.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(1, 512, device="cuda")
    for _ in range(3):
        zerocore.stats(model).reset()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(x).sum().backward()
        optimizer.step()
    held = torch.cuda.memory_allocated() - (before - 4 * PARAMETERS)
    return held, torch.cuda.max_memory_allocated(), zerocore.ledger(model, optimizer)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_allocator_holds_what_the_ledger_says(gpus, stage):
    for held, peak, ledger in gpus(2, bytes_beside_the_ledger, stage):
        assert abs(held - ledger.total) <= 0.02 * ledger.total
        # Besides: the windows, and the full gradients of two units, one of them on its way.
        most = ledger.total + ledger.windows_peak + 2 * 4 * PARAMETERS // 8
        assert abs(peak - most) <= 0.02 * most


def exits(stage):
    """Nothing that a model used is read after it was freed: the simulator would end the process."""
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        model = build("transformer", stage)
        loss_of(model, batch("transformer", 0)).backward()
        del model
        gc.collect()
        torch.cuda.empty_cache()
    # backward() returns before the engine's thread has let go of the last node and its tensors.
    deadline = time.monotonic() + 10
    while torch.cuda.memory_allocated() > before and time.monotonic() < deadline:
        time.sleep(1e-3)
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("stage", [0, 3])
def test_memory_returns_with_the_model(gpus, stage):
    first, second = gpus(2, exits, stage), gpus(2, exits, stage)
    assert first == second
