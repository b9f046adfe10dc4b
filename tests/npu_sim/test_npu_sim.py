"""The fake NPU and its hccl against the CPU and gloo, and what they are there to find."""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu
from torch.nn.parallel import DistributedDataParallel

TIMES = 20


def npu_sim():
    """The compiled part, in a rank."""
    import torch_npu

    return torch_npu._C


def early():
    return os.environ["NPU_SIM_SCHEDULE"] == "early"


OPERATORS = [
    lambda a, b: a + b,
    lambda a, b: a @ b.T,
    lambda a, b: torch.cat([a, b], 1),
    lambda a, b: a[1:4, ::2].contiguous(),
    lambda a, b: a.t().reshape(-1),
    lambda a, b: (a > b).nonzero(),
    lambda a, b: a.softmax(-1),
    lambda a, b: a.sort(1)[0],
    lambda a, b: torch.where(a > 0, a, b),
    lambda a, b: a.sum(0, keepdim=True) * 2 - 1,
    lambda a, b: a.bfloat16() * b.bfloat16(),
    lambda a, b: a.double().square(),
    lambda a, b: torch.stack(a.unbind(0)[:3]),
    lambda a, b: a.expand(2, 6, 5).clone(),
    lambda a, b: a.masked_fill(b > 0, 0.5),
    lambda a, b: a.gather(1, b.argsort(1)),
    lambda a, b: torch.split(a, 2)[1] + 1,
    lambda a, b: a.clone().fill_diagonal_(3),
    lambda a, b: a.clone().index_add_(0, torch.tensor([0, 2], device=a.device), b[:2]),
    lambda a, b: a.unfold(1, 2, 1).sum(-1),
    lambda a, b: torch.linalg.vector_norm(a, 2, 1),
    lambda a, b: a.cumsum(1),
    lambda a, b: torch.topk(a, 2)[0],
    lambda a, b: a.var(0),
    lambda a, b: torch.einsum("ij,ij->i", a, b),
    lambda a, b: a.to(torch.int64),
    lambda a, b: torch._foreach_add([a, b], 1.0)[1],
    lambda a, b: gelu(a),
    lambda a, b: a.view(torch.int32),
]


def operators():
    torch.manual_seed(0)
    a, b = torch.randn(6, 5), torch.randn(6, 5)
    for i, f in enumerate(OPERATORS):
        expected, got = f(a, b), f(a.npu(), b.npu())
        assert got.is_npu and torch.equal(expected, got.cpu()), f"operator {i}"


def test_operators_are_the_cpus(npus):
    npus(1, operators)


def device_rules():
    x = torch.ones(3, device="npu:1")
    assert x.device == torch.device("npu:1")
    assert (x.to("npu:0") * 2).tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3, device="npu:0")
    with pytest.raises(RuntimeError, match="not implemented for Double"):
        torch.linalg.vector_norm(torch.ones(3, device="npu", dtype=torch.float64))
    with pytest.raises(RuntimeError, match="not implemented for Double"):
        torch.linalg.vector_norm(torch.ones(3, device="npu"), dtype=torch.float64)
    raw = npu_sim().tensor_over_raw_memory("npu", 100, False)
    assert raw.isnan().all() and raw.fill_(2).sum().item() == 200
    with pytest.raises(RuntimeError, match=r"expected storage of c10::make_storage_impl"):
        npu_sim().tensor_over_raw_memory("npu", 100, True)
    assert torch.empty(4, device="npu").isnan().all(), "fresh memory holds nothing of use"
    before = torch.accelerator.memory_allocated()
    z = torch.empty(1 << 20, device="npu")
    assert torch.accelerator.memory_allocated() - before == 4 << 20
    z.untyped_storage().resize_(0)
    z.set_()
    assert z.shape == (0,) and torch.accelerator.memory_allocated() == before
    pinned = torch.ones(5).pin_memory()
    assert pinned.is_pinned() and not torch.ones(5).is_pinned()
    y = pinned.npu(non_blocking=True)
    pinned.fill_(9)  # too early: the copy has not run, as it may not have on a device
    assert y.cpu()[0] == 9


def test_rules_of_the_device(npus):
    npus(1, device_rules)


def waits():
    """What the host waits for is recorded, and nothing else is."""
    take = npu_sim().take_waits
    take()  # earlier cases'
    x = torch.ones(5).npu()
    assert take() == ["copy from the host"]
    y = (x * 2 + 1).sum()
    pinned = torch.empty((), pin_memory=True)
    pinned.copy_(y, non_blocking=True)
    assert take() == []
    assert y.item() == 15 and pinned.item() == 15
    y.cpu()
    x.nonzero()
    torch.accelerator.synchronize()
    event = torch.Event("npu")
    event.record()
    event.synchronize()
    names = ["aten::_local_scalar_dense", "copy to the host", "aten::nonzero"]
    assert take() == [*names, "synchronize device", "synchronize event"]


def test_waits_of_the_host_are_counted(npus):
    npus(1, waits)


def order():
    sim = npu_sim()
    for fresh in (False, True):
        right = {sim.produce_and_consume("npu", True, fresh) for _ in range(TIMES)}
        wrong = [sim.produce_and_consume("npu", False, fresh) for _ in range(TIMES)]
        assert right == {4.0}
        assert all(w != w for w in wrong) if fresh else set(wrong) == {1.0}
    # Early runs the read first, and so cannot find that its end is not waited for.
    assert {sim.overwrite_while_read("npu", True) for _ in range(TIMES)} == {7.0}
    overwritten = {sim.overwrite_while_read("npu", False) for _ in range(TIMES)}
    assert overwritten == {7.0 if early() else 0.0}
    assert {sim.free_while_in_use("npu", True) for _ in range(TIMES)} == {7.0}
    assert all(v != v for v in (sim.free_while_in_use("npu", False) for _ in range(TIMES)))
    assert sim.event_query_before_after("npu")
    polled = torch.npu.Event()
    polled.record()
    start = time.monotonic()
    while not polled.query():
        assert time.monotonic() - start < 10
        time.sleep(0.001)


def test_a_missing_wait_is_found_every_time(npus):
    npus(1, order)


class Spy(torch.autograd.Function):
    seen: set = set()

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        Spy.seen.add((threading.get_ident(), torch.npu.current_stream().stream_id))
        return grad


def autograd_threads():
    stream = torch.npu.Stream()
    x = torch.ones(8, device="npu", requires_grad=True)
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        y = Spy.apply(x).sum()
    torch.npu.current_stream().wait_stream(stream)
    y.backward()
    ((thread, used),) = Spy.seen
    assert thread != threading.get_ident() and used == stream.stream_id
    assert x.grad.tolist() == [1.0] * 8


def test_backward_runs_on_a_thread_and_on_the_forwards_stream(npus):
    npus(1, autograd_threads)


class Net(nn.Module):
    """A small transformer encoder over 16 tokens."""

    def __init__(self):
        super().__init__()
        # The CPU has a fused attention of its own; without it both devices run the same kernels.
        torch.backends.cuda.enable_flash_sdp(False)
        self.embed = nn.Embedding(64, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens):
        """[B, T, 64]"""
        return self.head(self.block(self.embed(tokens)))


def trained(model, device, rank, steps=3):
    """Losses of a training on this device."""
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(0, 64, (4, 17), generator=generator).to(device)
        opt.zero_grad()
        logits = model(tokens[:, :-1]).flatten(0, 1).float()
        loss = cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        losses.append(loss.item())
    return losses


def train_alone(device, dtype):
    torch.manual_seed(1)
    return trained(Net().to(device, dtype), device, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_bit_equal_to_the_cpus(npus, dtype):
    (found,) = npus(1, train_alone, "npu", dtype)
    (expected,) = npus(1, train_alone, "cpu", dtype)
    assert found == expected and found[-1] < found[0]


def train_ddp(device):
    torch.manual_seed(1)
    model = DistributedDataParallel(Net().to(device), bucket_cap_mb=0.02)
    return trained(model, device, dist.get_rank())


def test_ddp_is_bit_equal_to_gloo(ranks, npus):
    assert npus(2, train_ddp, "npu") == ranks(2, train_ddp, "cpu")


def collectives():
    rank = dist.get_rank()
    one = torch.full((4,), float(rank + 1), device="npu")
    out = torch.empty(8, device="npu")
    dist.all_gather_into_tensor(out, one, async_op=True).wait()
    assert out.tolist() == [1.0] * 4 + [2.0] * 4
    half = torch.empty(4, device="npu")
    dist.reduce_scatter_tensor(half, torch.arange(8.0, device="npu"))
    assert half.tolist() == [2.0 * (4 * rank + i) for i in range(4)]
    for op, value in ((dist.ReduceOp.SUM, 3), (dist.ReduceOp.MAX, 2)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8):
            x = one.to(dtype, copy=True)
            dist.all_reduce(x, op)
            assert x.tolist() == [value] * 4
    for dtype in (torch.float64, torch.bool, torch.uint8):
        x = one.eq(2).to(dtype)
        dist.broadcast(x, 1)
        assert x.tolist() == [1] * 4
    group = dist.group.WORLD
    pair = [torch.ones(4, device="npu") + i for i in range(2)]
    halves = [torch.empty(2, device="npu") for _ in pair]
    group.reduce_scatter_single_coalesced(halves, pair).wait()
    assert [h.tolist() for h in halves] == [[2.0] * 2, [4.0] * 2]
    group.allreduce_coalesced(halves).wait()
    assert [h.tolist() for h in halves] == [[4.0] * 2, [8.0] * 2]
    both = [torch.empty(4, device="npu"), torch.empty(4, device="npu", dtype=torch.uint8)]
    mine = [halves[0] + rank, torch.full((2,), rank, device="npu", dtype=torch.uint8)]
    group.all_gather_single_coalesced(both, mine).wait()
    assert [t.tolist() for t in both] == [[4.0, 4.0, 5.0, 5.0], [0, 0, 1, 1]]
    # Both send first, then receive; the results are demanded in the other order.
    received = torch.empty(4, device="npu")
    for work in reversed([dist.isend(one, 1 - rank), dist.irecv(received, 1 - rank)]):
        work.wait()
    assert received.tolist() == [2.0 - rank] * 4
    back = torch.empty(8, device="npu")
    dist.all_to_all_single(back, torch.arange(8.0, device="npu") + 10 * rank)
    assert back.tolist() == [4.0 * rank + i + 10 * r for r in range(2) for i in range(4)]
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]


def test_collectives(npus):
    npus(2, collectives)


def refusals():
    one = torch.ones(4, device="npu")
    ops = dist.ReduceOp
    premul = dist._make_nccl_premul_sum(0.5)
    for op in (ops.AVG, ops.PRODUCT, ops.MIN, premul):
        for call in (
            lambda op=op: dist.all_reduce(one, op),
            lambda op=op: dist.reduce_scatter_tensor(one[:2], one, op),
            lambda op=op: dist.reduce(one, 0, op),
        ):
            with pytest.raises(RuntimeError, match=r"hccl: expected ReduceOp SUM \(0\) or MAX"):
                call()
    for dtype in (torch.float64, torch.bool, torch.uint8):
        x = torch.ones(4, device="npu").to(dtype)
        with pytest.raises(RuntimeError, match="hccl: expected a type that it can reduce, got"):
            dist.all_reduce(x)
        with pytest.raises(RuntimeError, match="hccl: expected a type that it can reduce, got"):
            dist.reduce_scatter_tensor(x[:2], x, ops.MAX)
    # torch.distributed itself passes complex tensors as pairs of reals where it can.
    group = dist.group.WORLD
    complex_ = torch.ones(4, device="npu", dtype=torch.complex64)
    with pytest.raises(RuntimeError, match="hccl: expected a type that it can move, got"):
        group.broadcast(complex_, 0)
    mixed = [torch.ones(4, device="npu"), torch.ones(4, device="npu").half()]
    for call in (
        lambda: group.allreduce_coalesced(mixed),
        lambda: group.reduce_scatter_single_coalesced([t[:2] for t in mixed], mixed),
    ):
        with pytest.raises(RuntimeError, match="hccl: expected one type and device in a coalesced"):
            call()
    with pytest.raises(RuntimeError, match="hccl: expected a contiguous tensor, got strides"):
        group.allreduce(torch.ones(4, 2, device="npu").t())
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(4))
    assert one.tolist() == [1.0] * 4


def test_what_not_every_hccl_does_alike_is_refused(npus):
    npus(2, refusals)


def waits_of_a_gather():
    rank, group, sim = dist.get_rank(), dist.group.WORLD, npu_sim()
    stale = 0
    for i in range(TIMES):
        x = torch.full((4,), float(rank + 1 + i), device="npu")
        y = torch.zeros(8, device="npu")
        torch.npu.synchronize()
        work = dist.all_gather_into_tensor(y, x, async_op=True)
        stale += y.tolist() == [0.0] * 8
        work.wait()
        assert y.tolist() == [1.0 + i] * 4 + [2.0 + i] * 4
    assert stale > TIMES // 2, "a peer that is there already may start a collective"
    whole = [3.0, 3.0, 4.0, 4.0]
    # The waits for the shard, for the collective and for the side stream; the last: if it is found.
    for *has, found in ((1, 1, 1, 0), (0, 1, 1, early()), (1, 0, 1, 1), (1, 1, 0, 1)):
        stale = 0
        for _ in range(TIMES):
            got = sim.gather_on_side_stream(group, "npu", 3.0 + rank, *map(bool, has))
            stale += got == [0.0] * 4
            assert got == whole or (found and got == [0.0] * 4), has
            dist.barrier()
        assert stale > TIMES // 2 or not found, "as above"


def test_a_missing_wait_around_a_collective_is_found(npus):
    npus(2, waits_of_a_gather)


def peers_that_wait_elsewhere():
    """Rank 1 enqueues its part and waits for rank 0 in the store; rank 0 needs that part first."""
    x = torch.full((4,), dist.get_rank() + 1.0, device="npu")
    work = dist.all_reduce(x, async_op=True)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        work.wait()
        assert x.tolist() == [3.0] * 4
        store.set("rank 0 is done", "yes")
    else:
        store.wait(["rank 0 is done"])
        work.wait()
        assert x.tolist() == [3.0] * 4


def test_a_collective_runs_for_its_peers(npus):
    npus(2, peers_that_wait_elsewhere)
