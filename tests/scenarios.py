"""Unusual ways to run a model, each written once for a plain model and for a sharded one.

A scenario builds a float64 model (sums then differ by rounding of 1e-16, so that 1e-9 finds any
real mistake), and `run(model, rank, step, scale)` does a rank's forwards and backwards of a step,
every loss times `scale`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Pair = collections.namedtuple("Pair", ["hidden", "norm"])


@dataclasses.dataclass
class Out:
    """What a unit returns in the dataclass scenario."""

    hidden: Tensor
    extra: dict[str, list[Tensor]]


class Layer(nn.Module):
    """tanh of a linear map of 5 features, times a gain that `mode` may leave out."""

    def __init__(self, mode: str = "plain") -> None:
        super().__init__()
        self.mode = mode
        self.linear = nn.Linear(5, 5)
        self.gain = nn.Parameter(torch.rand(5) + 0.5)
        self.norm = nn.LayerNorm(5) if mode == "norm" else nn.Identity()

    def forward(self, x: Tensor, *, use_gain: bool = True) -> Any:
        """Hidden features, packed as `mode` says."""
        if self.mode == "in place":
            x.mul_(1.5)  # changes the unit's input
        hidden = torch.tanh(self.linear(self.norm(x)))
        if use_gain:
            hidden = hidden * self.gain
        if self.mode == "dict":
            return {"hidden": hidden, "shape": hidden.shape}
        if self.mode == "tuple":
            return hidden, None, [hidden.sum()]
        if self.mode == "namedtuple":
            return Pair(hidden, hidden.norm())
        if self.mode == "dataclass":
            return Out(hidden, {"norms": [hidden.norm(), hidden.detach().sum()]})
        return hidden


def _raise(_: Tensor) -> None:
    raise KeyError("in backward")


class Net(nn.Module):
    """4 features to 2 through three layers; the hooks for scenarios are its attributes."""

    def __init__(self, mode: str = "plain", order: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.mode, self.order = mode, order
        self.inlet = nn.Linear(4, 5)
        self.layers = nn.ModuleList(Layer(mode) for _ in range(3))
        self.outlet = nn.Linear(5, 2)
        self.reentrant: bool | None = None  # kind of activation checkpointing; None: without
        self.places: tuple[int, ...] = (0, 1, 2, 3, 4)  # of `order`, where layers are checkpointed
        self.span = False  # whether one checkpoint spans all layers
        self.use_gain = self.use_bias = True
        self.fail = ""  # "forward" or "backward": where layer 1 raises
        self.ignore = False  # whether what layer 1 returns is left unused

    def forward(self, x: Tensor) -> Any:
        """The layers in `order`, which may name one twice."""
        x = self.inlet(x) if self.use_bias else x @ self.inlet.weight.t()
        if self.span:
            x = checkpoint(self.chain, x, use_reentrant=self.reentrant)
        else:
            x = self.chain(x)
        out = self.outlet(x)
        return {"logits": out} if self.mode == "dict" else out

    def chain(self, x: Tensor) -> Tensor:
        """The layers."""
        for place, i in enumerate(self.order):
            layer = self.layers[i]
            if self.reentrant is not None and place in self.places and not self.span:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
                continue
            out = layer(x, use_gain=self.use_gain or i != 1)
            if self.fail == "forward" and i == 1:
                raise KeyError("in forward")
            if self.ignore and i == 1:
                continue
            x = self.unpack(out)
            if self.fail == "backward" and i == 1:
                x.register_hook(_raise)
        return x

    def unpack(self, out: Any) -> Tensor:
        """Uses all of what a layer returns."""
        if self.mode == "dict":
            return out["hidden"]
        if self.mode == "in place":
            out += 1
            return out.mul_(0.5)
        if self.mode == "tuple":
            return out[0] + out[2][0]
        if self.mode == "namedtuple":
            return out.hidden + out.norm
        if self.mode == "dataclass":
            return out.hidden + out.extra["norms"][0] + out.extra["norms"][1]
        return out


def data(rank: int, step: int, micro: int = 0) -> Tensor:
    """[3, 4] float64, different for every rank, step and micro-batch."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank + 1)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Mean of squares of the output."""
    out = model(x)
    out = out["logits"] if isinstance(out, dict) else out
    return (out - 1).square().mean()


class Scenario(NamedTuple):
    """How a model is built and run."""

    build: Callable[[], nn.Module]
    run: Callable[[nn.Module, int, int, float], None]
    units: list[str] | None = ["layers.0", "layers.1", "layers.2"]


def simple(model: nn.Module, rank: int, step: int, scale: float) -> None:
    """One forward, one backward."""
    (loss_of(model, data(rank, step)) * scale).backward()


def two_forwards(model: nn.Module, rank: int, step: int, scale: float) -> None:
    """Two forwards, then their backwards, the first one first."""
    losses = [loss_of(model, data(rank, step, micro)) * scale for micro in (0, 1)]
    for loss in losses:
        loss.backward()


def two_forwards_reversed(model: nn.Module, rank: int, step: int, scale: float) -> None:
    """Two forwards, then their backwards, the last one first."""
    losses = [loss_of(model, data(rank, step, micro)) * scale for micro in (0, 1)]
    for loss in reversed(losses):
        loss.backward()


def one_backward_of_two(model: nn.Module, rank: int, step: int, scale: float) -> None:
    """Two forwards into one loss."""
    total = loss_of(model, data(rank, step)) + 2 * loss_of(model, data(rank, step, 1))
    (total * scale).backward()


def retain_graph(model: nn.Module, rank: int, step: int, scale: float) -> None:
    """Two backwards through one graph."""
    loss = loss_of(model, data(rank, step)) * scale
    loss.backward(retain_graph=True)
    (3 * loss).backward()


def eval_between(model: nn.Module, rank: int, step: int, scale: float) -> None:
    """Forwards without gradients before, between and after; one with gradients that nobody uses."""
    model.eval()
    with torch.no_grad():
        loss_of(model, data(rank, step, 2))
    model.train()
    loss = loss_of(model, data(rank, step)) * scale
    with torch.no_grad():
        loss_of(model, data(rank, step, 3))
    loss.backward()
    loss_of(model, data(rank, step, 4))
    with torch.inference_mode():
        loss_of(model, data(rank, step, 5))


def gradient_of_input(model: nn.Module, rank: int, step: int, scale: float) -> None:
    """An input that needs its gradient; the gradient enters the next loss."""
    x = data(rank, step).requires_grad_()
    (loss_of(model, x) * scale).backward()
    (loss_of(model, x.detach() + x.grad / scale) * scale).backward()


def gradient_only(model: nn.Module, rank: int, step: int, scale: float) -> None:
    """A gradient of the input by itself, and one of a few parameters, before the full backward."""
    x = data(rank, step).requires_grad_()
    loss = loss_of(model, x) * scale
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert gradient.abs().sum() > 0
    loss.backward(inputs=[model.outlet.weight], retain_graph=True)
    loss.backward()


def changing_order(model: nn.Module, rank: int, step: int, scale: float) -> None:
    """Other layers, in another order, in every step, alike on all ranks."""
    model.order = ((0, 1, 2), (2, 0), (1, 2, 0, 1))[step]
    simple(model, rank, step, scale)


def ignored_output(model: nn.Module, rank: int, step: int, scale: float) -> None:
    """Layer 1 computes, but nothing depends on it."""
    model.ignore = True
    simple(model, rank, step, scale)


def checkpointed(
    reentrant: bool, mode: str = "plain", **attributes: Any
) -> Callable[[], nn.Module]:
    """Builder of a net whose layers are recomputed in backward."""

    def build() -> nn.Module:
        net = Net(mode)
        for name, value in {"reentrant": reentrant, **attributes}.items():
            setattr(net, name, value)
        return net

    return build


def unused_on_rank_0(model: nn.Module, rank: int, step: int, scale: float) -> None:
    """Rank 0 leaves out the gain of layer 1."""
    model.use_gain = rank != 0
    simple(model, rank, step, scale)


def unused_on_all(model: nn.Module, rank: int, step: int, scale: float) -> None:
    """Nobody uses the gain of layer 1."""
    model.use_gain = False
    simple(model, rank, step, scale)


def unused_in_the_middle(model: nn.Module, rank: int, step: int, scale: float) -> None:
    """Nobody uses the inlet's bias, whose neighbours in the root unit are used."""
    model.use_bias = False
    simple(model, rank, step, scale)


def failing(model: nn.Module, rank: int, step: int, scale: float) -> None:
    """An exception in forward, one in backward, then a good pass."""
    before = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    for micro, place in enumerate(("forward", "backward")):
        model.fail = place
        try:
            (loss_of(model, data(rank, step, micro + 7)) * scale).backward()
        except KeyError as error:
            assert place in str(error)
        else:
            raise AssertionError(f"expected a KeyError in {place}")
    model.fail = ""
    for name, p in model.named_parameters():
        p.grad = before[name]  # what the half backward left
    simple(model, rank, step, scale)


class Keywords(nn.Module):
    """A model and units that take keywords only, and tensors inside of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 5)
        self.layers = nn.ModuleList(KeywordLayer() for _ in range(3))

    def forward(self, *, batch: dict[str, Tensor]) -> Tensor:
        """[B, 5]"""
        x = self.inlet(batch["x"])
        for layer in self.layers:
            x = layer(inputs={"hidden": [x]}, flag=True)
        return x


class KeywordLayer(nn.Module):
    """A layer of Keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, *, inputs: dict[str, list[Tensor]], flag: bool) -> Tensor:
        """[B, 5]"""
        return torch.tanh(self.linear(inputs["hidden"][0])) if flag else inputs["hidden"][0]


def keywords(model: nn.Module, rank: int, step: int, scale: float) -> None:
    """Calls the model with keywords only."""
    (model(batch={"x": data(rank, step)}).square().mean() * scale).backward()


class Lora(nn.Module):
    """Frozen layers with small trainable additions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LoraLayer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 4]"""
        for layer in self.layers:
            x = layer(x)
        return x


class LoraLayer(nn.Module):
    """A frozen linear map and a trainable one of rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 4]"""
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def unfreezing(model: nn.Module, rank: int, step: int, scale: float) -> None:
    """From step 1 on the base of layer 1 trains; from step 2 on layer 0's additions do not."""
    if step == 1:
        model.layers[1].base.requires_grad_(True)
    if step == 2:
        model.layers[0].down.requires_grad_(False)
    simple(model, rank, step, scale)


class Tied(nn.Module):
    """An embedding whose weight is the head, and a layer that two places share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        shared = Layer()
        self.layers = nn.ModuleList([shared, Layer(), shared])
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, 11]"""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tied(model: nn.Module, rank: int, step: int, scale: float) -> None:
    """Tokens of this rank and step."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(11, (4,), generator=generator)
    (model(tokens).square().mean() * scale).backward()


PARTS = [f"layers.{i}.{part}" for i in range(3) for part in ("norm", "linear")]
SCENARIOS = {
    "simple": Scenario(Net, simple),
    "unit called twice": Scenario(lambda: Net(order=(0, 1, 0, 2, 1)), simple),
    "unit called twice in a row": Scenario(lambda: Net(order=(0, 1, 1)), simple),
    "unit called twice, checkpointed": Scenario(checkpointed(False, order=(0, 1, 0)), simple),
    "unit called twice, once checkpointed": Scenario(
        checkpointed(False, order=(0, 1, 0), places=(0,)), simple
    ),
    "unit called twice, reentrant": Scenario(checkpointed(True, order=(0, 1, 0)), simple),
    "unit called twice, once reentrant": Scenario(
        checkpointed(True, order=(0, 1, 0), places=(0,)), simple
    ),
    "root reentrant and not": Scenario(
        checkpointed(True, order=(0, 1, 2, 0), places=(0,)), simple, ["inlet"]
    ),
    "reentrant and at once again": Scenario(
        checkpointed(True, order=(0, 0, 1, 2), places=(0,)), simple, ["inlet", "layers.1"]
    ),
    "checkpoint over parts": Scenario(checkpointed(False, "norm"), simple, PARTS),
    "checkpoint over parts, reentrant": Scenario(checkpointed(True, "norm"), simple, PARTS),
    "checkpoint over parts and whole, reentrant": Scenario(
        checkpointed(True, "norm"), simple, ["layers.1", "layers.1.norm", "layers.2.norm"]
    ),
    "checkpoint over all units": Scenario(checkpointed(False, span=True), simple),
    "checkpoint over all units, reentrant": Scenario(checkpointed(True, span=True), simple),
    "checkpoint over nested units": Scenario(
        checkpointed(False), simple, ["layers.0", "layers.0.linear", "layers.1.linear"]
    ),
    "checkpoint over nested units, reentrant": Scenario(
        checkpointed(True), simple, ["layers.0", "layers.0.linear", "layers.1.linear"]
    ),
    "merged units": Scenario(Net, simple, None),
    "merged units in another order": Scenario(lambda: Net(order=(2, 0, 1)), simple, None),
    "merged units called twice": Scenario(lambda: Net(order=(2, 0, 2)), simple, None),
    "merged units, checkpointed": Scenario(checkpointed(False, order=(1, 0, 2)), simple, None),
    "merged units, reentrant": Scenario(checkpointed(True, order=(1, 0, 2)), simple, None),
    "two forwards": Scenario(Net, two_forwards),
    "two forwards reversed": Scenario(Net, two_forwards_reversed),
    "one backward of two": Scenario(Net, one_backward_of_two),
    "retain graph": Scenario(Net, retain_graph),
    "eval between": Scenario(Net, eval_between),
    "gradient of input": Scenario(Net, gradient_of_input),
    "gradient only": Scenario(Net, gradient_only),
    "changing order": Scenario(Net, changing_order),
    "ignored output": Scenario(Net, ignored_output),
    "in place": Scenario(lambda: Net("in place"), simple),
    "checkpoint": Scenario(checkpointed(False), simple),
    "checkpoint reentrant": Scenario(checkpointed(True), simple),
    "checkpoint, two forwards": Scenario(checkpointed(False), two_forwards),
    "dict": Scenario(lambda: Net("dict"), simple),
    "tuple": Scenario(lambda: Net("tuple"), simple),
    "namedtuple": Scenario(lambda: Net("namedtuple"), simple),
    "dataclass": Scenario(lambda: Net("dataclass"), simple),
    "keywords": Scenario(Keywords, keywords),
    "lora": Scenario(Lora, simple),
    "unfreezing": Scenario(Lora, unfreezing),
    "unused on one rank": Scenario(Net, unused_on_rank_0),
    "unused on all ranks": Scenario(Net, unused_on_all),
    "unused in the middle": Scenario(Net, unused_in_the_middle),
    "unit unused on all ranks": Scenario(lambda: Net(order=(0, 2)), simple),
    "exceptions": Scenario(Net, failing),
    "nested units": Scenario(Net, simple, ["layers.0", "layers.0.linear", "layers.1.linear"]),
    "tied": Scenario(Tied, tied, ["layers.0", "layers.1"]),
}


def build(name: str) -> nn.Module:
    """The scenario's model, always with the same weights."""
    torch.manual_seed(3)
    return SCENARIOS[name].build().double()


def optimizer_of(model: nn.Module, kind: type = torch.optim.AdamW) -> torch.optim.Optimizer:
    """With decay, so that a parameter that should rest is seen to move; eps keeps noise small."""
    return kind(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3)
