"""What zerocore.AdamW.step does on the host grows with the units, not with their parameters."""

import sys

import pytest
import torch
from torch import nn

import zerocore

UNITS = 3


class Unit(nn.Module):
    """Linear layers in a row."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def opcodes(function):
    """How many instructions of Python a call executes: the same in every run."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def cost(layers, stage, shared):
    """Of a step like the last one; `shared`: each unit has parameters of two optimizers."""
    model = nn.Sequential(*(Unit(layers) for _ in range(UNITS)))
    model = zerocore.shard(model, stage, units=[Unit])
    mine = [p for p in model.parameters() if p.dim() == 2 or not shared]
    optimizer = zerocore.AdamW(mine, max_grad_norm=None if shared else 1.0)
    for _ in range(3):
        model(torch.ones(1, 8)).sum().backward()
        found = opcodes(optimizer.step)
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_cost_no_python(ranks, stage, shared):
    (few,), (many,) = ranks(1, cost, 2, stage, shared), ranks(1, cost, 20, stage, shared)
    assert few == many


def stepped_versions():
    """How far the version counter of each parameter of a unit goes in a step."""
    unit = zerocore.shard(Unit(4), 3)
    optimizer = zerocore.AdamW([p for p in unit.parameters() if p.dim() == 2])
    unit(torch.ones(1, 8)).sum().backward()
    params = list(unit.parameters())
    params[2].grad = None
    before = [p._version for p in params]
    optimizer.step()
    return [p._version - old for p, old in zip(params, before, strict=True)]


def test_graphs_are_told_of_what_was_stepped(ranks):
    """Of no others: those of other optimizers, or without a gradient."""
    assert ranks(2, stepped_versions) == [[1, 0, 0, 0, 1, 0, 1, 0]] * 2


def change_of_groups(how):
    """Which of four parameters moved in the step after the change of groups that were [0, 1]."""
    model = zerocore.shard(nn.ModuleList(nn.Linear(4, 1, bias=False) for _ in range(4)), 3)
    params = list(model.parameters())
    optimizer = zerocore.AdamW(params[:2], lr=0.5)

    def step():
        for p in params:
            p.grad = torch.ones_like(p)
        before = [p.detach().clone() for p in params]
        optimizer.step()
        return [not torch.equal(p, old) for p, old in zip(params, before, strict=True)]

    group = optimizer.param_groups[0]
    found = [step()]
    if how == "in place":
        group["params"][0] = params[3]
    elif how == "order":
        group["params"].reverse()
    elif how == "list":
        group["params"] = [params[1], params[2]]
    elif how == "shorter":
        group["params"].pop()
    else:
        optimizer.param_groups.append(group | {"params": [params[2]], "lr": 0.0})
        optimizer.param_groups[0] = group | {"params": [params[3]]}
    return [*found, step()]


@pytest.mark.parametrize(
    ("how", "moved"),
    [("in place", "13"), ("order", "01"), ("list", "12"), ("shorter", "0"), ("groups", "3")],
)
def test_changes_of_groups_are_noticed(ranks, how, moved):
    for first, second in ranks(1, change_of_groups, how):
        assert first == [True, True, False, False]
        assert second == [str(number) in moved for number in range(4)]
