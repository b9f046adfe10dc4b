"""Small models that between them have every kind of parameter, and batches for them.

A job is a model with its data. Sizes are odd on purpose: shards then end in the middle of
parameters, and some parameters have fewer elements than there are ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Job(NamedTuple):
    """A model and what to train it on."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]  # (input, target); classes if integer
    units: list[str] | None  # names of the modules that are units; None: automatic


class Fails(torch.autograd.Function):
    """The identity, with a backward that raises ArithmeticError."""

    @staticmethod
    def forward(ctx, x):
        """Passes x on."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        """Fails."""
        raise ArithmeticError("in backward")


class Block(nn.Module):
    """A transformer block; `features` [B, T, dim] in and out."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim + 1), nn.Linear(2 * dim + 1, dim)

    def forward(self, features: Tensor) -> Tensor:
        """Attention and a two-layer network, each added to the features."""
        batch, time, dim = features.shape
        heads = self.qkv(self.norm1(features)).view(batch, time, 3, self.heads, dim // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        features = features + self.out(mixed.transpose(1, 2).reshape(batch, time, dim))
        return features + self.fc2(F.gelu(self.fc1(self.norm2(features))))


class Transformer(nn.Module):
    """Tokens [B, T] to logits [B, T, vocabulary]; the head is the embedding's own parameter."""

    def __init__(self, vocabulary: int = 37, dim: int = 12, time: int = 9, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(torch.randn(time, dim) * 0.1)  # a bare parameter of the root
        self.blocks = nn.ModuleList(Block(dim, 3) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every place."""
        features = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            features = block(features)
        return self.head(self.norm(features))


class Lstm(nn.Module):
    """[B, T, 5] to [B, T, 3] through a two-layer bidirectional LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 7, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        """All outputs, projected."""
        return self.head(self.lstm(x)[0])


class Cnn(nn.Module):
    """[B, 3, 8, 8] to [B, 1, 5]; batch statistics are those of the rank's own part."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 5, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(5)
        self.conv2 = nn.Conv2d(5, 7, 3, stride=2, bias=False)
        self.bn2 = nn.BatchNorm2d(7)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return self.head(x.mean((2, 3))).unsqueeze(1)


class Attention(nn.Module):
    """[B, T, 9] to [B, T, 9] through both parameter layouts of nn.MultiheadAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(9, 3, batch_first=True)
        self.narrow = nn.Linear(9, 5)
        self.second = nn.MultiheadAttention(
            9, 3, kdim=5, vdim=9, add_bias_kv=True, batch_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        """Self attention, then attention with keys of another size."""
        x = x + self.first(x, x, x)[0]
        return x + self.second(x, self.narrow(x), x, need_weights=False)[0]


class Odd(nn.Module):
    """[B, 1, 7] to [B, 1, 4] with parameters of every awkward shape and memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))  # 0-dim
        self.shift = nn.Parameter(torch.randn(1))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.pair = nn.Parameter(torch.randn(2))
        self.transposed = nn.Parameter(torch.randn(5, 7).t())  # dense, not row-major
        self.inner = nn.Linear(5, 6)
        self.strided = nn.Parameter(torch.randn(6, 8)[:, ::2])  # with gaps
        self.permuted = nn.Parameter(torch.randn(2, 4, 3).permute(1, 2, 0))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Uses every parameter."""
        x = torch.tanh(x @ self.transposed) * self.scale + self.shift + self.empty.sum()
        # Element by element: the rounding of a product may depend on the gaps, which no rank keeps.
        x = (self.inner(x).unsqueeze(-1) * self.strided).sum(-2)
        x = x + self.frozen + (self.permuted * self.pair).sum((1, 2))
        return torch.cat([x[..., :2] * self.pair, x[..., 2:]], -1)


class Mixed(nn.Module):
    """[B, 1, 7] to [B, 1, 3] with a second floating dtype, and integers and bools."""

    def __init__(self, second: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.other = nn.Linear(9, 5).to(second)
        self.gain = nn.Parameter(torch.randn((), dtype=second))
        self.order = nn.Parameter(torch.tensor([3, 0, 4, 1, 2]), requires_grad=False)
        self.keep = nn.Parameter(torch.tensor([True, True, False, True, True]), requires_grad=False)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Casts around the layers of the second dtype."""
        hidden = torch.tanh(self.first(x))
        hidden = self.other(hidden.to(self.gain.dtype)) * self.gain
        hidden = hidden.to(x.dtype)[..., self.order] * self.keep
        return self.last(torch.tanh(hidden))


def _tokens(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    text = torch.randint(37, (3, 10), generator=generator)
    return text[:, :-1], text[:, 1:]


def _images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.randn(6, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
    return images, torch.randint(5, (6, 1), generator=generator)


def _floats(*shape: int, targets: int) -> Callable:
    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(*shape, generator=generator)
        return x, torch.randn(*shape[:-1], targets, generator=generator)

    return batch


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
JOBS = {
    "transformer": Job(Transformer, _tokens, BLOCKS),
    "lstm": Job(Lstm, _floats(3, 6, 5, targets=3), ["lstm"]),
    "cnn": Job(
        lambda: Cnn().to(memory_format=torch.channels_last), _images, ["conv1", "bn1", "conv2"]
    ),
    "attention": Job(Attention, _floats(3, 4, 9, targets=9), ["first", "second"]),
    "odd": Job(Odd, _floats(5, 1, 7, targets=4), ["inner"]),
    "mixed64": Job(lambda: Mixed(torch.float64), _floats(5, 1, 7, targets=3), None),
    "mixed16": Job(lambda: Mixed(torch.bfloat16), _floats(5, 1, 7, targets=3), ["first"]),
}


def build(job: str, seed: int = 0) -> nn.Module:
    """The job's model with the weights of this seed."""
    torch.manual_seed(seed)
    return JOBS[job].build()


def batch(
    job: str, rank: int, step: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The part of global batch `step` that belongs to `rank`; floating tensors in `dtype`."""
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    x, target = JOBS[job].batch(generator)
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in (x, target))


def loss_of(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
    """Mean loss over the part: cross entropy for classes, squares for numbers."""
    x, target = part
    out = model(x)
    if target.is_floating_point():
        return ((out - target) ** 2).mean()
    return F.cross_entropy(out.flatten(0, -2), target.flatten())
