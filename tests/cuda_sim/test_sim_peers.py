"""torch's own DDP and FSDP2 on two simulated GPUs, against the CPU: the simulator must be right."""

import copy

import cuda_sim
import torch
import torch.distributed as dist
from test_sim_runtime import Net
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 5


def model_and_data():
    torch.manual_seed(0)
    return Net(), [torch.randint(0, 50, (4, 16)) for _ in range(STEPS)]


def train(net, batches, device, group=None):
    """Losses; with a group, their mean over its two ranks, each of which has half of a batch."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for tokens in batches:
        optimizer.zero_grad()
        part = tokens if group is None else tokens.chunk(2)[dist.get_rank()]
        loss = net(part.to(device))
        loss.backward()
        optimizer.step()
        value = loss.detach().clone()
        if group is not None:
            dist.all_reduce(value, group=group)
            value /= 2
        losses.append(value.item())
    return losses


def difference(a, b):
    """The largest relative one of two lists of losses."""
    assert len(a) == len(b) == STEPS
    return max(abs(x - y) / max(1, abs(x)) for x, y in zip(a, b, strict=True))


def sharded(net, device, **options):
    mesh = init_device_mesh(device, (2,))
    for module in (net.layer, net.out, net):
        fully_shard(module, mesh=mesh, **options)
    return net


def ddp_and_gloo_ddp():
    net, batches = model_and_data()
    gloo = dist.new_group(backend="gloo")
    on_cpu = DistributedDataParallel(copy.deepcopy(net), process_group=gloo)
    on_cuda = DistributedDataParallel(net.cuda(), device_ids=[dist.get_rank()], bucket_cap_mb=0.02)
    expected = train(on_cpu, batches, "cpu", gloo)
    return difference(train(on_cuda, batches, "cuda", dist.group.WORLD), expected)


def fsdp2_and_one_cpu_process():
    net, batches = model_and_data()
    expected = train(copy.deepcopy(net), batches, "cpu")
    cuda_sim.reset_counters()
    losses = train(sharded(net.cuda(), "cuda"), batches, "cuda", dist.group.WORLD)
    calls = {kind: usage["calls"] for kind, usage in cuda_sim.nccl_counters().items()}
    return difference(losses, expected), calls


def fsdp2_in_bf16():
    net, batches = model_and_data()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expected = train(copy.deepcopy(net), batches, "cpu")
    on_cuda = sharded(net.cuda(), "cuda", mp_policy=policy)
    return difference(train(on_cuda, batches, "cuda", dist.group.WORLD), expected)


def fsdp2_without_its_waits():
    net, batches = model_and_data()
    expected = train(copy.deepcopy(net), batches, "cpu")
    waits = torch.cuda.Stream.wait_stream, torch.cuda.Stream.wait_event
    torch.cuda.Stream.wait_stream = torch.cuda.Stream.wait_event = lambda self, other: None
    try:
        losses = train(sharded(net.cuda(), "cuda"), batches, "cuda", dist.group.WORLD)
    finally:
        torch.cuda.Stream.wait_stream, torch.cuda.Stream.wait_event = waits
    return difference(losses, expected)


def test_ddp_equals_gloo_ddp(both_gpus):
    assert max(both_gpus(2, ddp_and_gloo_ddp)) <= 1e-6


def test_fsdp2_equals_one_cpu_process(both_gpus):
    for worst, calls in both_gpus(2, fsdp2_and_one_cpu_process):
        assert worst <= 1e-6
        assert calls["all_gather"] >= 2 * STEPS
        assert calls["reduce_scatter"] == 3 * STEPS


def test_fsdp2_in_bf16_is_near(both_gpus):
    # bf16 losses of about 4 are 0.016 apart.
    assert max(both_gpus(2, fsdp2_in_bf16)) <= 0.02


def test_fsdp2_without_its_stream_waits_goes_wrong(gpus):
    """The control experiment: the comparisons above notice missing waits between streams."""
    assert all(not worst < 1e-3 for worst in gpus(2, fsdp2_without_its_waits))
