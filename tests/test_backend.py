"""Which device and which communication backend are chosen, on machines of all kinds."""

import pytest
import torch
import torch.distributed as dist

import zerocore
from zerocore import world
from zerocore.backend import choose


@pytest.fixture
def machine(monkeypatch):
    """`machine("cuda", 1)`: torch finds that type of accelerator, of which 1 is current."""

    def set_up(kind, current=0):
        def current_accelerator(check_available=False):
            assert check_available, "torch may be compiled for an accelerator that is not there"
            return None if kind is None else torch.device(kind)

        monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)

    return set_up


@pytest.fixture
def default_group(monkeypatch):
    """`default_group("cuda:nccl")`: there is a default process group with these backends."""

    def set_up(config):
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_backend_config", lambda: config)

    return set_up


@pytest.mark.parametrize(("kind", "name"), [("cuda", "nccl"), ("xpu", None), ("mps", None)])
def test_the_machines_accelerator_is_used(machine, kind, name):
    machine(kind, 3)
    chosen = zerocore.backend()
    if name is None:
        assert chosen[:2] == (torch.device("cpu"), "gloo")
        assert (
            chosen.reason == f"the accelerator of this machine is of type {kind}, not npu or cuda"
        )
    else:
        assert chosen[:2] == (torch.device(kind, 3), name)
        assert chosen.reason == f"torch finds an accelerator of type {kind} on this machine"


def test_without_an_accelerator_it_is_the_cpu(machine):
    machine(None)
    chosen = zerocore.backend()
    assert chosen == zerocore.Backend(
        torch.device("cpu"), "gloo", "torch finds no accelerator on this machine"
    )
    assert choose([], None) == chosen
    assert choose([torch.device("cpu"), torch.device("meta")], None) == chosen


def test_an_accelerator_needs_a_group_that_was_made_for_it(machine, default_group):
    machine("cuda", 1)
    default_group("cpu:gloo,cuda:gloo")
    chosen = zerocore.backend()
    assert chosen[:2] == (torch.device("cpu"), "gloo")
    assert "has gloo for cuda, where init_process_group('nccl') would" in chosen.reason
    assert choose([torch.device("cpu")], None) == chosen
    # What is there already, or asked for, is used all the same.
    assert choose([torch.device("cuda", 1)], None).name == "nccl"
    assert choose([torch.device("meta")], "cuda").device == torch.device("cuda", 1)
    assert zerocore.backend("cuda").name == "nccl"
    default_group("cpu:gloo")
    assert "has nothing for cuda" in zerocore.backend().reason
    default_group("cuda:hccl")
    assert "has hccl for cuda" in zerocore.backend().reason


@pytest.mark.parametrize("config", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_a_group_that_was_made_for_the_accelerator(machine, default_group, config):
    machine("cuda", 1)
    default_group(config)
    chosen = zerocore.backend()
    assert chosen[:2] == (torch.device("cuda", 1), "nccl")
    assert chosen.reason == "the default process group has nccl for cuda"
    assert choose([torch.device("cpu")], "cpu")[:2] == (torch.device("cpu"), "gloo")


def test_backends_of_a_real_default_group(tmp_path):
    assert world.default_backends() is None
    for config, expected in (("gloo", ("gloo", "gloo")), ("cpu:gloo", ("gloo", None))):
        dist.init_process_group(config, f"file://{tmp_path}/{config}", world_size=1, rank=0)
        try:
            found = world.default_backends()
            assert (found["cpu"], found.get("cuda")) == expected
            assert zerocore.backend().name == "gloo"
        finally:
            dist.destroy_process_group()


def test_parameters_decide_before_the_mesh(machine):
    machine("cuda", 1)
    chosen = choose([torch.device("cuda", 1), torch.device("meta")], "cpu")
    assert chosen == (torch.device("cuda", 1), "nccl", "the parameters are on cuda:1")
    chosen = choose([torch.device("cpu")], "cuda")
    assert chosen == (torch.device("cuda", 1), "nccl", "the mesh is of device type cuda")


def test_a_device_is_this_ranks_current_one(machine):
    machine("cuda", 1)
    message = (
        r"device: expected cuda:1, the current device of this rank, got cuda:0; call "
        r"torch\.cuda\.set_device\(local_rank\) first"
    )
    with pytest.raises(ValueError, match=message):
        choose([torch.device("cuda", 0)], None)
    with pytest.raises(ValueError, match=message):
        zerocore.backend("cuda:0")


def test_parameters_on_several_devices_are_refused(machine):
    machine("cuda", 1)
    for others in (["cuda:1", "cuda:0"], ["cuda:1", "cpu", "meta"]):
        with pytest.raises(ValueError, match=r"expected parameters on one device, got .*cuda:1"):
            choose(map(torch.device, others), "cuda")


@pytest.mark.parametrize(
    ("kind", "usable"), [("cuda", "cuda or cpu"), ("xpu", "cpu"), (None, "cpu")]
)
def test_devices_that_cannot_be_used_are_refused(machine, kind, usable):
    machine(kind)
    for call in (
        lambda: zerocore.backend("xpu"),
        lambda: choose([torch.device("xpu", 0)], None),
        lambda: choose([], "xpu"),
    ):
        with pytest.raises(ValueError, match=f"expected {usable} on this machine, got xpu"):
            call()
    assert zerocore.backend("cpu").name == "gloo"
