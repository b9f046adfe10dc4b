"""Allocator, streams, events, pinned memory and operators of one process on simulated GPUs."""

import cuda_sim
import pytest
import torch
from torch.nn import functional as F


def copies_and_allocator():
    x = torch.randn(100_003)
    before = torch.cuda.memory_allocated()
    y = x.cuda()
    assert torch.equal(y.cpu(), x)
    assert torch.cuda.memory_allocated() - before >= x.nbytes
    del y
    assert torch.cuda.memory_allocated() == before
    torch.cuda.empty_cache()
    device = cuda_sim.counters()["devices"]["0"]
    assert device["allocated"] == torch.cuda.memory_reserved()
    assert device["peak"] >= x.nbytes


def two_devices():
    x = torch.arange(12.0).reshape(3, 4)
    y = x.to("cuda:0").to("cuda:1").t()
    assert y.device.index == 1
    assert torch.equal(y.to("cuda:0").cpu(), x.t())


def events():
    stream = torch.cuda.Stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        start.record()
        x = torch.ones(1000, device="cuda") * 2
        end.record()
    assert end.query() == (not cuda_sim.is_lazy())
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    assert x.sum().item() == 2000


def polling_makes_progress():
    x = torch.ones(10, device="cuda") + 1
    event = torch.cuda.Event()
    event.record()
    while not event.query():
        pass
    assert x.cpu().sum() == 20


def side_stream_result(wait, value):
    stream = torch.cuda.Stream()
    source = torch.full((1000,), value, device="cuda")
    result = torch.empty(1000).pin_memory()
    torch.cuda.synchronize()
    produced = source * 2  # on the default stream
    if wait:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result.copy_(produced + 1, non_blocking=True)
    produced.record_stream(stream)
    stream.synchronize()
    right = torch.equal(result, torch.full((1000,), 2 * value + 1))
    torch.cuda.synchronize()
    return right


def missing_wait_stream_is_caught():
    assert all(side_stream_result(True, v) for v in (1.0, 2.0))
    assert side_stream_result(False, 3.0) == (not cuda_sim.is_lazy())


def reuse_result(record):
    stream = torch.cuda.Stream()
    result = torch.empty(1000).pin_memory()
    x = torch.full((1000,), 7.0, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result.copy_(x, non_blocking=True)
    if record:
        x.record_stream(stream)
    del x
    y = torch.full((1000,), 9.0, device="cuda")  # takes x's memory if the allocator thinks it free
    torch.cuda.current_stream().synchronize()
    stream.synchronize()
    assert y[0].item() == 9
    return result[0].item()


def missing_record_stream_is_caught():
    assert reuse_result(True) == 7.0
    assert reuse_result(False) == (9.0 if cuda_sim.is_lazy() else 7.0)


def pinned_memory_is_asynchronous():
    pinned = torch.zeros(1000).pin_memory()
    assert pinned.is_pinned()
    x = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    pinned.copy_(x, non_blocking=True)
    assert pinned[0].item() == (0.0 if cuda_sim.is_lazy() else 1.0)
    torch.cuda.synchronize()
    assert pinned[0].item() == 1.0


def pageable_source_may_change_after_the_copy():
    host = torch.ones(1000)
    device = torch.empty(1000, device="cuda")
    device.copy_(host, non_blocking=True)
    host.zero_()
    assert device.sum().item() == 1000


def self_attention(t):
    return F.scaled_dot_product_attention(t[None], t[None], t[None])


def operators():
    torch.manual_seed(0)
    x = torch.randn(6, 5)
    y = x.cuda()
    for f in (
        lambda t: t.softmax(-1),
        lambda t: t @ t.t(),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: t.sort(dim=1),
        lambda t: torch.cat([t, t + 1]).std(),
        lambda t: t.clone().t().add_(t.t()),
        lambda t: t.to(torch.bfloat16).double(),
        lambda t: F.layer_norm(t, (5,)),
        lambda t: torch.add(t, 1, out=torch.empty(0, device=t.device)),
        lambda t: torch._foreach_add([t, t * 2], 3),
        lambda t: t.index_select(0, torch.tensor([1, 3], device=t.device)),
        self_attention,
    ):
        expected, got = f(x), f(y)
        if torch.is_tensor(expected):
            expected, got = [expected], [got]
        for e, g in zip(expected, got, strict=True):
            assert g.is_cuda
            assert g.dtype == e.dtype
            assert torch.equal(g.cpu(), e)


def mixed_devices_are_an_error():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="cuda") + torch.ones(3)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 32)
        self.layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.out = torch.nn.Linear(32, 50)

    def forward(self, tokens):
        logits = self.out(self.layer(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def train(device, fused):
    torch.manual_seed(0)
    net = Net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    tokens = torch.randint(0, 50, (4, 16)).to(device)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = net(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def training():
    for fused in (False, True):
        pairs = zip(train("cpu", fused), train("cuda", fused), strict=True)
        assert max(abs(a - b) for a, b in pairs) < 1e-6


CASES = [
    copies_and_allocator,
    two_devices,
    events,
    polling_makes_progress,
    missing_wait_stream_is_caught,
    missing_record_stream_is_caught,
    pinned_memory_is_asynchronous,
    pageable_source_may_change_after_the_copy,
    operators,
    mixed_devices_are_an_error,
    training,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_runtime(both_gpus, case):
    both_gpus(1, case)
