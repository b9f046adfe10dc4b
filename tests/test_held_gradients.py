"""Gradients that were cleared or replaced: whose they are, and what ranks know of it."""

import copy
import itertools

import pytest
import sharded
import torch
import torch.distributed as dist
from torch import nn

import zerocore

LEAVE = {
    "all cleared": lambda model: model.zero_grad(),
    "one cleared": lambda model: setattr(model.weight, "grad", None),
    "one replaced": lambda model: setattr(model.weight, "grad", model.weight.grad * 3),
}
HOLD = {"itself": lambda grad: grad, "an alias": lambda grad: grad.detach().view(-1)}


def backward_of_linear(model, number):
    model(torch.full((3, 24), float(number))).square().sum().backward()


def parts_equal(model, plain):
    """Whether this rank's parameters and gradients are those parts of a plain model's."""
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        own = slice(*zerocore.info(p)[-2:])
        for a, b in ((p, q), (p.grad, q.grad)):
            if (a is None) != (b is None):
                return False
            if a is not None and not torch.allclose(a.flatten(), b.flatten()[own], atol=1e-5):
                return False
    return True


def left_to_holders(stage):
    """What changed of gradients that were held, and what differs from a plain model's."""
    wrong = []
    for leave, hold in itertools.product(LEAVE, HOLD):
        for then in ("backward", "zerocore", "adamw"):
            torch.manual_seed(0)
            plain = nn.Linear(24, 36)
            model = zerocore.shard(copy.deepcopy(plain), stage)
            for one in (plain, model):
                backward_of_linear(one, 1)
                held = HOLD[hold](one.weight.grad)
                before = held.clone()
                LEAVE[leave](one)
                if then == "backward":
                    backward_of_linear(one, 2)
                else:
                    kind = then if one is model else "adamw"
                    sharded.optimizer_of(kind, one.parameters()).step()
                if not torch.equal(held, before):
                    wrong.append((leave, hold, then, "changed"))
            if not parts_equal(model, plain):
                wrong.append((leave, hold, then, "value"))
    return wrong


def held_while_hidden(stage):
    """Whether a gradient stays that was held when an unreduced one took its place in `p.grad`."""
    model = zerocore.shard(nn.Linear(24, 36), stage)
    backward_of_linear(model, 1)
    held = model.weight.grad
    with zerocore.no_sync(model):
        backward_of_linear(model, 2)
    model.zero_grad()
    before = held.clone()
    backward_of_linear(model, 3)
    return torch.equal(held, before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_whoever_holds_a_gradient_or_an_alias_keeps_it(ranks, stage):
    assert ranks(2, left_to_holders, stage) == [[], []]
    assert ranks(2, held_while_hidden, stage) == [True, True]


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.perhaps = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, perhaps):
        return self.always(x) + (self.perhaps(x) if perhaps else 0)


def cleared_behind_unreduced(stage, set_to_none, used):
    """Whether gradients are a plain model's after ranks that show different ones clear them."""
    torch.manual_seed(0)
    plain = Branches()
    model = zerocore.shard(copy.deepcopy(plain), stage, timeout=10)
    x = torch.ones(2, 8)
    model(x, True).sum().backward()
    with zerocore.no_sync(model):
        model(x, dist.get_rank() == 0).sum().backward()
    model.zero_grad(set_to_none=set_to_none)
    for one in (model, plain):
        one(3 * x, used).sum().backward()
    if not used and not set_to_none:
        for param in plain.perhaps.parameters():
            param.grad = torch.zeros_like(param)
    return parts_equal(model, plain)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_clear_what_they_show_of_the_same_gradients(ranks, stage, set_to_none, used):
    assert ranks(2, cleared_behind_unreduced, stage, set_to_none, used) == [True, True]


def transposed(optimizer):
    torch.manual_seed(0)
    plain = nn.Linear(24, 24)
    model = zerocore.shard(copy.deepcopy(plain), 0)
    for one, name in ((plain, "adamw"), (model, optimizer)):
        opt = sharded.optimizer_of(name, one.parameters())
        for number in (1, 2):
            backward_of_linear(one, number)
            one.weight.grad = one.weight.grad.t()
            opt.step()
    return parts_equal(model, plain)


@pytest.mark.parametrize("optimizer", ["zerocore", "adamw"])
def test_a_gradient_may_be_replaced_by_another_view_of_it(ranks, optimizer):
    assert ranks(2, transposed, optimizer) == [True, True]
