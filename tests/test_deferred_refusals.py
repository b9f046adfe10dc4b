"""What a deferred model cannot do is refused by name; what its construction reads is right."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from constructions import Gpt, mlp
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import zerocore
from zerocore.deferred import construct, is_blank

BEFORE_SHARD = r"zerocore.*: expected zerocore.shard\(model, ...\) before"


def deferred(build=mlp, **options):
    return zerocore.deferred(build, 0, **({"min_bytes": 1} | options))


USES = {
    "forward": lambda m: m(torch.ones(1, 40)),
    "state_dict": lambda m: m.state_dict(),
    "state_dict of a part": lambda m: m[0].state_dict(),
    "load_state_dict": lambda m: m.load_state_dict({}),
    "load_state_dict with assign": lambda m: m.load_state_dict({}, assign=True),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda m: torch.save(m, io.BytesIO()),
    "half": lambda m: m.half(),
    "to a dtype": lambda m: m.to(torch.bfloat16),
    "apply": lambda m: m.apply(lambda x: nn.init.ones_(x.weight) if hasattr(x, "weight") else None),
    "in place": lambda m: m[0].weight.data.mul_(2),
    "print": lambda m: str(m[0].weight),
    "item": lambda m: m[0].weight[0, 0].item(),
    "numpy": lambda m: m[0].weight.detach().numpy(),
    "address": lambda m: m[0].weight.data_ptr(),
    "storage": lambda m: m[0].weight.untyped_storage()[0],
    "share_memory": lambda m: m.share_memory(),
}


@pytest.mark.parametrize("use", USES)
def test_uses_before_shard_are_refused(use):
    model = deferred()
    with pytest.raises(RuntimeError, match=BEFORE_SHARD):
        USES[use](model)
    assert all(map(is_blank, model.parameters()))


def test_steps_before_shard_are_refused():
    model = deferred()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones(param.shape)
    with pytest.raises(RuntimeError, match=BEFORE_SHARD):
        opt.step()


def test_looking_and_rearranging_is_allowed():
    model = deferred()
    model.requires_grad_(False)
    assert not model[0].weight.requires_grad
    assert str(model).startswith("Sequential")
    assert sum(p.numel() for p in model.parameters()) == 40 * 30 + 30 + 30 + 30 + 30 * 7 + 7
    model.to("cpu").float().train()
    model.append(nn.Linear(7, 2))
    assert is_blank(model[0].weight) and not is_blank(model[4].weight)


class Does(nn.Module):
    """Runs `action` on a large parameter while it is built."""

    def __init__(self, action):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(40, 30))
        self.result = action(self.weight)


REFUSED = {
    "bernoulli_": lambda w: w.data.bernoulli_(0.5),
    "resize_": lambda w: w.data.resize_(7),
    "data_ptr": lambda w: w.data_ptr(),
    "share_memory_": lambda w: w.data.share_memory_(),
    "pin_memory": lambda w: w.data.pin_memory(),
    "__dlpack__": lambda w: torch.utils.dlpack.from_dlpack(w.detach()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_in_build(name):
    with pytest.raises(NotImplementedError, match=rf"zerocore.deferred: expected.*{name}"):
        deferred(lambda: Does(REFUSED[name]))
    assert not _get_current_dispatch_mode_stack()


READS = {
    "item": lambda w: w[3, 4].item(),
    "tolist": lambda w: w.tolist(),
    "numpy": lambda w: w.detach().numpy().sum(),
    "print": lambda w: repr(w),
    "format": lambda w: f"{w.sum():.4f}",
    "bool": lambda w: bool((w > 0.5).any()),
    "multinomial": lambda w: torch.multinomial(w.data, 3).tolist(),
    "poisson": lambda w: torch.poisson(w.data).sum().item(),
    "spectral": lambda w: torch.linalg.norm(w.data, 2).item(),
    "unique": lambda w: torch.unique(w.data.round()).tolist(),
    "masked": lambda w: w.data[w.data > 0.5].sum().item(),
    "svd": lambda w: torch.linalg.svdvals(w.data).tolist(),
    "max": lambda w: w.data.max(0).indices.tolist(),
    "deepcopy": lambda w: copy.deepcopy(w).sum().item(),
    "out": lambda w: torch.sum(w.data, 0, out=torch.empty(30)).tolist(),
    "forward": lambda w: nn.functional.linear(torch.ones(2, 30), w).sum().item(),
    "dtype": lambda w: w.data.to(torch.float16).sum().item(),
    "meta": lambda w: w.data.to("meta").shape,
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("cache_bytes", [0, 2**20])
def test_reads_in_build_see_the_values(name, cache_bytes):
    torch.manual_seed(0)
    expected, state = Does(READS[name]).result, torch.get_rng_state()
    assert deferred(lambda: Does(READS[name]), cache_bytes=cache_bytes).result == expected
    assert torch.equal(state, torch.get_rng_state())


def test_pickling_in_build_is_refused():
    with pytest.raises(RuntimeError, match=BEFORE_SHARD):
        deferred(lambda: Does(lambda w: pickle.dumps(w.detach())))


def test_arrays_of_large_tensors_are_read_only():
    def write(weight):
        weight.detach().numpy()[0] = 1

    with pytest.raises(ValueError, match="read-only"):
        deferred(lambda: Does(write))


def test_errors_of_the_build_are_its_own():
    with pytest.raises(RuntimeError, match=r"The size of tensor|shape"):
        deferred(lambda: Does(lambda w: w.data.add_(torch.ones(7))))
    with pytest.raises(ZeroDivisionError):
        deferred(lambda: Does(lambda w: 1 // 0))
    assert not _get_current_dispatch_mode_stack()
    assert torch.ones(5).sum() == 5


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"build: expected a function.*got Linear"):
        zerocore.deferred(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="build: expected a function.*got int"):
        zerocore.deferred(3)
    with pytest.raises(ValueError, match="cache_bytes: expected an integer of at least 0, got -1"):
        zerocore.deferred(mlp, cache_bytes=-1)
    with pytest.raises(ValueError, match="min_bytes: expected an integer"):
        zerocore.deferred(mlp, min_bytes=1.5)
    with pytest.raises(
        ValueError, match=r"expected build\(\) to return a torch.nn.Module, got int"
    ):
        zerocore.deferred(lambda: 3)


def test_no_calls_inside_of_build(ranks):
    with pytest.raises(RuntimeError, match=r"zerocore.deferred: expected no call inside"):
        deferred(lambda: deferred(mlp))
    ranks(1, shard_inside)


def shard_inside():
    with pytest.raises(RuntimeError, match=r"zerocore.shard: expected no call inside"):
        deferred(lambda: zerocore.shard(mlp()))


def test_seed_none_takes_the_generator_as_it_is():
    torch.manual_seed(8)
    expected = mlp(), torch.get_rng_state()
    torch.manual_seed(8)
    model = zerocore.deferred(mlp, min_bytes=1)
    assert torch.equal(torch.get_rng_state(), expected[1])
    tape = construct.tape_of(model[0].weight)
    assert torch.equal(tape.value(model[0].weight), expected[0][0].weight)


def test_small_models_are_left_alone():
    model = zerocore.deferred(mlp, 0)
    torch.manual_seed(0)
    for found, expected in zip(model.parameters(), mlp().parameters(), strict=True):
        assert torch.equal(found, expected)
    model.state_dict()
    assert not construct._pending


def test_models_that_are_dropped_leave_nothing():
    model = deferred(Gpt)
    tape = weakref.ref(construct.tape_of(model.head.weight))
    weight = model.head.weight
    del model
    gc.collect()
    assert tape() is not None and is_blank(weight)  # moved elsewhere, it can still be sharded
    del weight
    gc.collect()
    assert tape() is None
    assert not construct._pending


def test_what_is_not_needed_is_forgotten():
    """Initial values that were overwritten are on no tape."""

    def build():
        model = nn.Linear(40, 30, bias=False)
        for _ in range(10):
            nn.init.normal_(model.weight)
        return model

    assert len(construct.tape_of(deferred(build).weight)) == 1


def test_other_devices_are_made_as_usual():
    model = deferred(lambda: nn.Sequential(nn.Linear(40, 30, device="meta"), nn.Linear(30, 20)))
    assert model[0].weight.device.type == "meta"
    assert is_blank(model[1].weight)


def test_threads_and_default_dtype_are_those_of_the_build():
    threads = torch.get_num_threads()

    def build():
        model = nn.Module()
        torch.set_num_threads(3)
        model.sum = nn.Parameter(torch.randn(300, 300).sum(0))
        torch.set_num_threads(threads)
        return model

    torch.manual_seed(0)
    expected = build().sum
    model = deferred(build)
    assert torch.equal(construct.tape_of(model.sum).value(model.sum), expected)
    assert torch.get_num_threads() == threads


def test_nothing_is_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deferred(Gpt)
