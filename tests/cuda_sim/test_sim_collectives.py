"""Collectives of ProcessGroupNCCL on two simulated GPUs."""

import os
import time

import cuda_sim
import pytest
import torch
import torch.distributed as dist
from ranks import Pool


def rank_and_peer():
    return dist.get_rank(), 1 - dist.get_rank()


def full(n, value, dtype=torch.float32):
    return torch.full((n,), value, dtype=dtype, device="cuda")


def all_reduce():
    rank, _ = rank_and_peer()
    floats = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    for dtype in (*floats, torch.int32, torch.int64, torch.uint8):
        x = full(1000, 3 + rank, dtype)
        dist.all_reduce(x)
        assert (x == 7).all().item(), dtype
    sums = {"SUM": 5.0, "AVG": 2.5, "MIN": 2.0, "MAX": 3.0, "PRODUCT": 6.0}
    for op, expected in sums.items():
        x = full(10, 2.0 + rank)
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
        assert (x == expected).all().item(), op
    x = full(10, 2.0 + rank)
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
    assert (x == 2.5).all().item()


def larger_than_the_shared_slots():
    rank, _ = rank_and_peer()
    n = 1_000_003
    x = torch.arange(float(n)).cuda() + rank
    dist.all_reduce(x)
    assert torch.equal(x.cpu(), 2 * torch.arange(float(n)) + 1)
    gathered = full(2 * n, -1.0)
    dist.all_gather_into_tensor(gathered, full(n, float(rank)))
    assert gathered[:n].eq(0).all().item()
    assert gathered[n:].eq(1).all().item()
    scattered = full(n, -1.0)
    halves = torch.cat([full(n, 1.0 + rank), full(n, 10.0 + rank)])
    dist.reduce_scatter_tensor(scattered, halves)
    assert scattered.eq(21.0 if rank else 3.0).all().item()


def in_place():
    rank, _ = rank_and_peer()
    buffer = full(8, -1.0)
    mine = buffer[rank * 4 : rank * 4 + 4]
    mine.fill_(rank + 1.0)
    dist.all_gather_into_tensor(buffer, mine)
    assert buffer.tolist() == [1.0] * 4 + [2.0] * 4
    dist.reduce_scatter_tensor(mine, buffer, op=dist.ReduceOp.AVG)
    assert mine.tolist() == [rank + 1.0] * 4


def rooted():
    rank, _ = rank_and_peer()
    x = full(4, float(rank))
    dist.broadcast(x, src=1)
    assert x.eq(1).all().item()
    x = full(4, 1.0 + rank)
    dist.reduce(x, dst=0)
    assert x.eq(3.0 if rank == 0 else 2.0).all().item()
    parts = [full(2, -1.0) for _ in range(2)] if rank == 1 else None
    dist.gather(full(2, float(rank)), parts, dst=1)
    assert rank == 0 or [p[0].item() for p in parts] == [0.0, 1.0]
    out = full(2, -1.0)
    dist.scatter(out, [full(2, 5.0), full(2, 6.0)] if rank == 0 else None, src=0)
    assert out[0].item() == 5.0 + rank
    out = full(2, -1.0)
    dist.all_to_all_single(out, torch.tensor([10.0 * rank, 10.0 * rank + 1]).cuda())
    assert out.tolist() == [float(rank), 10.0 + rank]
    dist.barrier()


def coalescing_manager():
    rank, _ = rank_and_peer()
    outs, ins = [full(4, -1.0) for _ in range(3)], [full(2, float(10 * i + rank)) for i in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out, x in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(out, x)
    manager.wait()
    assert [o.tolist() for o in outs] == [
        [10 * i, 10 * i, 10 * i + 1, 10 * i + 1] for i in range(3)
    ]


def batch_isend_irecv():
    rank, peer = rank_and_peer()
    for n in (3, 2_000_000):  # the second is larger than what the channels buffer
        received = full(n, -1.0)
        send = dist.P2POp(dist.isend, full(n, float(rank)), peer)
        for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, received, peer)]):
            work.wait()
        assert received.eq(peer).all().item()


def send_and_recv():
    rank, peer = rank_and_peer()
    x = full(5, float(rank))
    if rank == 0:
        dist.send(x, peer)
    else:
        dist.recv(x, peer)
    assert x.eq(0).all().item()


def new_groups():
    rank, _ = rank_and_peer()
    group = dist.new_group([0, 1])
    alone = [dist.new_group([r]) for r in range(2)]
    x = full(3, 1.0 + rank)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=alone[rank])
    assert x.eq(3).all().item()


def counters():
    torch.cuda.synchronize()
    cuda_sim.reset_counters()
    dist.all_gather_into_tensor(full(20, 0.0), full(10, 1.0))
    expected = {"all_gather": {"calls": 1, "send_bytes": 40, "recv_bytes": 80}}
    assert cuda_sim.nccl_counters() == expected


def missing_work_wait_is_caught():
    rank, peer = rank_and_peer()
    out, x = full(4, -1.0), full(2, 5.0)
    torch.cuda.synchronize()
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    unwaited = out.cpu()
    # A peer that is already past this point would demand the collective, and it would run here too.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"missing wait: rank {rank} has read", "yes")
    store.wait([f"missing wait: rank {peer} has read"])
    work.wait()
    assert out.cpu().eq(5).all()
    assert unwaited.eq(5).all() == (not cuda_sim.is_lazy())


def a_peer_that_waits_on_the_host():
    # Rank 0 enqueues and then waits for rank 1 on the host only; rank 1 needs the collective first.
    # Enqueued work runs by itself on a GPU: no deadlock. (An eager call blocks, as is right too.)
    rank, _ = rank_and_peer()
    store = dist.distributed_c10d._get_default_store()
    x = full(4, 1.0)
    work = dist.all_reduce(x, async_op=True)
    if rank == 1:
        work.wait()
        assert x.eq(2).all().item()
        store.set("host wait: rank 1 is through", "yes")
    else:
        store.wait(["host wait: rank 1 is through"])
        work.wait()
    assert x.eq(2).all().item()


def communicators_in_opposite_order():
    rank, _ = rank_and_peer()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    tensors = [full(4, 1.0), full(4, 2.0)]
    for group in groups:  # create the communicators in the same order
        dist.all_reduce(full(1, 0.0), group=group)
    torch.cuda.synchronize()
    order = (0, 1) if rank == 0 else (1, 0)
    works = {i: dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order}
    for i in order:
        works[i].wait()
        assert tensors[i].eq(2.0 * (i + 1)).all().item()


def different_counts():
    dist.all_reduce(full(4 + dist.get_rank(), 1.0))
    torch.cuda.synchronize()


def one_rank_leaves():
    dist.all_reduce(full(4, 1.0))
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        os._exit(0)
    time.sleep(1)
    dist.all_reduce(full(4, 1.0))
    torch.cuda.synchronize()


CASES = [
    all_reduce,
    larger_than_the_shared_slots,
    in_place,
    rooted,
    coalescing_manager,
    batch_isend_irecv,
    send_and_recv,
    new_groups,
    counters,
    missing_work_wait_is_caught,
    a_peer_that_waits_on_the_host,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_collectives(both_gpus, case):
    both_gpus(2, case)


def test_communicators_demanded_in_opposite_order(gpus):
    gpus(2, communicators_in_opposite_order)  # eager calls block, as with CUDA_LAUNCH_BLOCKING=1


@pytest.mark.parametrize(
    ("case", "message"),
    [(different_counts, "ranks disagree"), (one_rank_leaves, "is gone")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_ranks_that_disagree_are_found(pool_options, capfd, case, message):
    pool = Pool(2, **pool_options)
    assert "died" in [outcome.kind for outcome in pool.outcomes(case)]
    pool.close(0.0)
    assert message in capfd.readouterr().err
