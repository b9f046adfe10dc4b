"""Optimizer state by name: saved at one stage and number of ranks, loaded at any other.

Gradients are small integers whose mean over any number of ranks is exact, so that training goes on
with the same bits wherever it is continued.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from reference import assert_same, clones
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import zerocore


def coefficients(name, like, step, rank, size):
    """Integers of which the mean over the ranks is the same for every `size`."""
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    total = torch.randint(-9, 10, like.shape, generator=generator)
    mine = total - (size - 1) if rank == 0 else torch.ones_like(total)
    return (mine * size).to(like.dtype)


class Part(nn.Module):
    """A unit: the sum of all parameters that are used, times `coefficients`."""

    def __init__(self, unused=(), **shapes):
        super().__init__()
        self.unused = unused
        for name, value in shapes.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, step, rank, size):
        total = 0.0
        for name, param in self.named_parameters():
            if name not in self.unused:
                total = total + (param * coefficients(name, param, step, rank, size)).sum()
        return total


class Net(nn.Module):
    """Every awkward shape and memory order, a tied, a frozen and an unused parameter."""

    def __init__(self):
        super().__init__()
        random = torch.Generator().manual_seed(5)

        def made(*shape):
            return torch.randn(shape, generator=random)

        conv = made(4, 3, 3, 3).to(memory_format=torch.channels_last)
        self.first = Part(scale=made(), one=made(1), none=made(0, 3), turned=made(5, 7).t())
        self.second = Part(("idle",), conv=conv, idle=made(3), frozen=made(4), order=made(2, 5, 3))
        self.second.frozen.requires_grad_(False)
        self.last = Part(also=made(3), bias=made(17))
        self.tied = self.last.also

    def forward(self, step, rank=0, size=1):
        parts = [part(step, rank, size) for part in (self.first, self.second, self.last)]
        return sum(parts).float()


def groups_of(model, backwards=False):
    """Two groups with other rates; in another order of groups and names if `backwards`."""
    named = list(model.parameters())
    groups = [
        {"params": [p for p in named if p.dim() >= 2], "lr": 0.25},
        {"params": [p for p in named if p.dim() < 2]},
    ]
    if not backwards:
        return groups
    return [{**group, "params": group["params"][::-1]} for group in groups[::-1]]


TORCH = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
}
ALL = {**TORCH, "zerocore": lambda p: zerocore.AdamW(p, lr=0.1, weight_decay=0.5)}


def train(model, opt, steps):
    """Steps on this rank, or on a plain model."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in steps:
        opt.zero_grad()
        model(step, rank, size).backward()
        opt.step()


def sharded(stage, mesh=None, nested=False):
    """A sharded Net; nested: a part of it in a call of its own, at another stage."""
    model = Net()
    if mesh is not None:
        mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    if nested:
        zerocore.shard(model.second, 1)
    return zerocore.shard(model, stage, mesh=mesh, units=["first", "second", "last"])


def plain(kind, steps):
    """A plain model after some steps, and its optimizer: of torch also where ours is meant."""
    model = Net()
    opt = TORCH["adamw" if kind == "zerocore" else kind](groups_of(model))
    train(model, opt, steps)
    return model, opt


def train_all(stage, steps, saved=None, rank0_only=False, kinds=tuple(ALL), **options):
    """Trains with each optimizer, from a saved state if there is one; the states after it."""
    states = {}
    for kind in kinds:
        model = sharded(stage, **options)
        opt = ALL[kind](groups_of(model, backwards=saved is not None))
        if saved is not None:
            weights, state = copy.deepcopy(saved[kind])
            model.load_state_dict(weights)
            zerocore.load_optimizer_state_dict(model, opt, state)
            for values in state["state"].values():  # nothing keeps the memory of what was loaded
                for value in values.values():
                    value.fill_(77)
        train(model, opt, steps)
        weights = clones(zerocore.full_state_dict(model))
        state = zerocore.optimizer_state_dict(model, opt, rank0_only=rank0_only)
        states[kind] = weights, state
    return states


def assert_same_state(found, expected, same=assert_same):
    """Equal names, keys, dtypes, shapes, strides and bits, but for what never stepped."""
    assert found["state"].keys() - {"second.idle"} == expected["state"].keys() - {"second.idle"}
    for name in found["state"].keys() - {"second.idle"}:
        same(found["state"][name], expected["state"][name])
        for key, value in found["state"][name].items():
            assert value.stride() == expected["state"][name][key].stride(), (name, key)


def assert_as_plain(kind, weights, state, steps):
    """What plain training gives; zerocore.AdamW rounds otherwise than torch's."""
    model, opt = plain(kind, steps)
    same = torch.testing.assert_close if kind == "zerocore" else assert_same
    same(weights, dict(model.state_dict()))
    assert_same_state(state, get_optimizer_state_dict(model, opt, options=FULL), same)


def options_by_name(state):
    """The learning rate of each parameter."""
    return {name: group["lr"] for group in state["param_groups"] for name in group["params"]}


FIRST, SECOND, THIRD = range(3), range(3, 5), range(5, 7)
FULL = StateDictOptions(full_state_dict=True, strict=False)


@pytest.fixture(scope="module")
def saved(ranks):
    """The states after the first steps, at stage 3 on two ranks."""
    one, other = ranks(2, train_all, 3, FIRST)
    for kind, (weights, state) in one.items():
        assert_same(other[kind][0], weights)
        assert_same_state(other[kind][1], state)
    return one


@pytest.fixture(scope="module")
def uninterrupted(ranks):
    """What zerocore.AdamW comes to in one go."""
    return ranks(2, train_all, 3, [*FIRST, *SECOND], kinds=["zerocore"])[0]["zerocore"]


def test_format_is_that_of_torch(saved):
    for kind in ALL:
        weights, state = saved[kind]
        assert_as_plain(kind, weights, state, FIRST)
        rates = options_by_name(state)
        assert rates["first.turned"] == 0.25 and rates["tied"] == 0.1 and len(rates) == 10
        if kind != "adagrad":  # which makes its state when it is made
            assert "second.idle" not in state["state"]


@pytest.mark.parametrize(
    "size, options",
    [
        (3, {"stage": 1}),
        (2, {"stage": 0}),
        (2, {"stage": 3, "nested": True}),
        (4, {"stage": 2, "mesh": (2, 2)}),
    ],
    ids=str,
)
def test_training_goes_on_elsewhere(ranks, saved, uninterrupted, size, options):
    for states in ranks(size, train_all, steps=SECOND, saved=saved, **options):
        for kind in TORCH:
            assert_as_plain(kind, *states[kind], [*FIRST, *SECOND])
        assert_same(states["zerocore"][0], uninterrupted[0])
        assert_same_state(states["zerocore"][1], uninterrupted[1])


def test_through_a_plain_model_and_back(ranks, saved):
    on_the_way = {}
    for kind in ALL:
        model, opt = plain(kind, [])
        # torch takes no full state without any tensor.
        how = FULL if saved[kind][1]["state"] else StateDictOptions(strict=False)
        set_optimizer_state_dict(model, opt, copy.deepcopy(saved[kind][1]), options=how)
        model.load_state_dict(saved[kind][0])
        assert {group["lr"] for group in opt.param_groups} == {0.25, 0.1}
        train(model, opt, SECOND)
        state = get_optimizer_state_dict(model, opt, options=FULL)
        on_the_way[kind] = clones(model.state_dict()), state
    first, second = ranks(2, train_all, 3, THIRD, saved=on_the_way, rank0_only=True)
    assert all(state == {} for _, state in second.values())
    for kind in ALL:
        assert_as_plain(kind, *first[kind], [*FIRST, *SECOND, *THIRD])


def narrow_numbers():
    """bf16 parameters, whose optimizer keeps fp32 numbers; a model of a 0-dim parameter only."""
    results = []
    for build in (lambda: Net().bfloat16(), lambda: Part(scale=torch.tensor(3.0))):
        model = zerocore.shard(build(), 3)
        opt = TORCH["nadam"](model.parameters())
        train(model, opt, FIRST)
        state = zerocore.optimizer_state_dict(model, opt)
        weights = clones(zerocore.full_state_dict(model))
        train(model, opt, SECOND)
        expected = clones(zerocore.full_state_dict(model))
        model.load_state_dict(weights)
        opt = TORCH["nadam"](model.parameters())
        zerocore.load_optimizer_state_dict(model, opt, state)
        shapes = [v["exp_avg"].shape == p.shape for p, v in opt.state.items()]
        train(model, opt, SECOND)
        results.append((expected, clones(zerocore.full_state_dict(model)), shapes))
    return results


def test_numbers_keep_their_dtype_and_shape(ranks):
    for results in ranks(2, narrow_numbers):
        for expected, found, shapes in results:
            assert_same(found, expected)
            assert shapes and all(shapes)


def partly_plain():
    """A model of which only a part is sharded: the state before and after loading it."""
    results = []
    for state in (None, "of the first"):
        model = nn.ModuleDict({"ours": sharded(3), "plain": nn.Linear(3, 2)})
        opt = zerocore.AdamW(model.named_parameters(), lr=0.1)
        if state is None:
            model["plain"].weight.grad = torch.full((2, 3), 4.0)
            model["ours"](0, dist.get_rank(), dist.get_world_size()).backward()
            opt.step()
        else:
            zerocore.load_optimizer_state_dict(model, opt, results[0])
        results.append(zerocore.optimizer_state_dict(model, opt))
    return results


def test_parameters_that_are_not_sharded_are_taken_as_they_are(ranks):
    for before, after in ranks(2, partly_plain):
        assert before["state"]["plain.weight"]["exp_avg"].shape == (2, 3)
        assert_same_state(after, before)


def without(state, name):
    for group in state["param_groups"]:
        group["params"] = [n for n in group["params"] if n != name]


def moved(state):
    first, second = state["param_groups"]
    second["params"].append(first["params"].pop())


def nothing(state):
    """Leaves the state alone."""


BAD_STATES = {
    "no dict": (lambda s: None, "optimizer_state_dict"),
    "no groups": (lambda s: s.pop("param_groups"), "param_groups"),
    "number": (lambda s: s["state"].update({0: {}}), "save with zerocore.optimizer_state_dict"),
    "missing": (lambda s: without(s, "last.bias"), "last.bias"),
    "unknown": (lambda s: s["param_groups"][0]["params"].append("strange"), "strange"),
    "unknown state": (lambda s: s["state"].update(strange={}), "strange"),
    "shape": (lambda s: s["state"]["last.bias"].update(exp_avg=torch.ones(9, 1)), "(17,)"),
    "fewer groups": (lambda s: s["param_groups"].pop(), "2 param groups, as the optimizer has"),
    "grouping": (moved, "otherwise"),
    "list": (nothing, "got list"),
    "text": (nothing, "got str"),
    "group without parameters": (
        lambda s: s["param_groups"][0].pop("params"),
        "param groups with a list 'params'",
    ),
    "number as a group": (lambda s: s.update(param_groups=[3]), "got 3"),
    "tensor as state": (
        lambda s: s["state"].update({"last.bias": torch.ones(3)}),
        "the state of 'last.bias', got Tensor",
    ),
    "without step": (lambda s: s["state"]["last.bias"].pop("step"), "without step"),
    "one number as moment": (
        lambda s: s["state"]["first.turned"].update(exp_avg=torch.tensor(1.0)),
        "'exp_avg' of 'first.turned'",
    ),
    "meta": (
        lambda s: s["state"]["last.bias"].update(exp_avg=torch.ones(3, device="meta")),
        "got a meta one",
    ),
    "amsgrad": (lambda s: s["param_groups"][0].update(amsgrad=True), "no amsgrad"),
    "another lr": (lambda s: s["param_groups"][0].update(lr=0.7), "'lr' of 'param group 0'"),
    "another step": (
        lambda s: s["state"]["last.bias"].update(step=torch.tensor(9.0)),
        "'step' of 'last.bias'",
    ),
}


ONE_RANK_ONLY = ("another lr", "another step")  # wrong because the other ranks have another
NO_DICTS = {"no dict": None, "list": [1], "text": "path"}


def refused(rank_of_fault):
    """Errors of bad states on one rank or all (None), and of bad optimizers, by case."""
    model = sharded(3)
    opt = zerocore.AdamW(groups_of(model), lr=0.1)
    train(model, opt, FIRST)
    before = zerocore.optimizer_state_dict(model, opt)
    here = rank_of_fault in (None, dist.get_rank())
    errors = {}

    def attempt(case, call):
        try:
            call()
            errors[case] = None
        except ValueError as error:
            errors[case] = str(error)

    for case, (spoil, _) in BAD_STATES.items():
        if rank_of_fault is None and case in ONE_RANK_ONLY:
            continue
        state = copy.deepcopy(before)
        if here:
            spoil(state)
        if here and case in NO_DICTS:
            state = NO_DICTS[case]
        attempt(case, lambda s=state: zerocore.load_optimizer_state_dict(model, opt, s))
    assert_same_state(zerocore.optimizer_state_dict(model, opt), before)
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(3))] if here else [model.last.bias])
    attempt("stranger", lambda: zerocore.optimizer_state_dict(model, stranger))
    if here:
        opt.state[model.last.bias]["exp_avg"] = torch.ones(3, 3)
    attempt("whole", lambda: zerocore.optimizer_state_dict(model, opt))
    if here:
        del opt.state[model.last.bias]
    attempt("other state", lambda: zerocore.optimizer_state_dict(model, opt))
    attempt("plain", lambda: zerocore.optimizer_state_dict(Net(), opt))
    attempt("load plain", lambda: zerocore.load_optimizer_state_dict(Net(), opt, before))
    return errors


@pytest.mark.parametrize("rank_of_fault", [None, 1])
def test_errors_on_every_rank(ranks, rank_of_fault):
    words = {case: word for case, (_, word) in BAD_STATES.items()}
    if rank_of_fault is None:
        for case in ONE_RANK_ONLY:
            del words[case]
    words |= {"stranger": "not in the model", "whole": "(3, 3)", "plain": "zerocore.shard"}
    words |= {"load plain": "zerocore.shard", "other state": "last.bias"}
    if rank_of_fault is None:
        del words["other state"]  # all ranks are without that state, which is right
    for errors in ranks(2, refused, rank_of_fault):
        for case, word in words.items():
            assert errors[case] is not None and word in errors[case], (case, errors[case])
        assert (errors["other state"] is None) == (rank_of_fault is None), errors


def another_ranks(stage, restored):
    """The error of a step after rank 0's optimizer.state_dict() was loaded on every rank."""
    model, second = (zerocore.shard(nn.Linear(8, 8, bias=False), stage) for _ in range(2))
    opt, other = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, second))
    model(torch.ones(1, 8)).sum().backward()
    opt.step()
    if restored:  # an optimizer that has not stepped since
        state = zerocore.optimizer_state_dict(model, opt)
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        zerocore.load_optimizer_state_dict(model, opt, state)
    packed = [opt.state_dict()]
    own = copy.deepcopy(packed[0])
    dist.broadcast_object_list(packed, 0)
    second(torch.ones(1, 8)).sum().backward()
    other.load_state_dict(packed[0])
    try:
        other.step()
        error = None
    except RuntimeError as caught:
        error = str(caught)
    other.load_state_dict(own)
    other.step()
    assert not any("zerocore_shard" in group for group in other.param_groups)
    return error


@pytest.mark.parametrize("restored", [False, True])
def test_another_ranks_state_is_refused(ranks, restored):
    for stage in (0, 1, 3):
        first, second = ranks(2, another_ranks, stage, restored)
        assert first is None
        if stage == 0:
            assert second is None
        else:
            assert "got that of shard 0 of 2 (this is shard 1 of 2)" in second
            assert "zerocore.optimizer_state_dict" in second
