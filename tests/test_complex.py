"""Complex parameters that are trained, beside real ones."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore


class Rotate(nn.Module):
    """[B, 5] to magnitudes [B, 3] through complex weights of two precisions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(5, 7)
        self.weight = nn.Parameter(torch.randn(7, 3, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x):
        """Magnitudes."""
        turned = self.inlet(x).to(torch.complex64) @ self.weight
        return (turned.to(torch.complex128) + self.bias).abs()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "zerocore": lambda p: zerocore.AdamW(p, lr=0.01),
}


def batch(rank, number):
    """[4, 5] float32."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank))


def train(stage, name):
    """Norms before clipping, parameters, averages, and the optimizer's state after four steps."""
    model = zerocore.shard(Rotate(), stage, units=["inlet"])
    opt = OPTIMIZERS[name](model.parameters())
    ema = zerocore.EMA(model, decay=0.5)
    norms = []
    for number in range(4):
        opt.zero_grad()
        model(batch(dist.get_rank(), number)).square().mean().backward()
        norms.append(zerocore.clip_grad_norm_(model, 1.0))
        opt.step()
        ema.update()
    state = zerocore.optimizer_state_dict(model, opt)
    zerocore.load_optimizer_state_dict(model, opt, state)
    return norms, dict(zerocore.full_state_dict(model)), ema.state_dict(), state["state"]["weight"]


def plain(name, size):
    """The same in one process."""
    model = Rotate()
    opt = OPTIMIZERS[name](model.parameters())
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    norms = []
    for number in range(4):
        opt.zero_grad()
        for rank in range(size):
            (model(batch(rank, number)).square().mean() / size).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        opt.step()
        average = {n: 0.5 * average[n] + 0.5 * p.detach() for n, p in model.named_parameters()}
    return norms, dict(model.state_dict()), average, opt.state[model.weight]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2])
def test_complex_parameters_train(ranks, size, name):
    expected = plain(name if name != "zerocore" else "adamw", size)
    for stage in (0, 1, 2, 3):
        for found in ranks(size, train, stage, name):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
