"""Models whose construction does more than call layers: what must survive being put off.

Each is built by a function without arguments; `differences` tells how a sharded model differs from
the same one constructed as usual.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import zerocore


class Gpt(nn.Module):
    """Initialised by its layers, then by the model, then some weights again; with a tied head."""

    def __init__(self, vocabulary: int = 37, dim: int = 12, depth: int = 3) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, dim), nn.Embedding(9, dim)
        self.blocks = nn.ModuleList(GptBlock(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.embed.weight = self.head.weight
        self.apply(self._init_weights)
        for name, param in self.named_parameters():
            if name.endswith("down.weight"):
                nn.init.normal_(param, 0.0, 0.02 / math.sqrt(2 * depth))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, 0.0, 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class GptBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.register_buffer("mask", torch.tril(torch.ones(9, 9)).view(1, 9, 9))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mask[:, : x.shape[1], : x.shape[1]] @ x
        return x + self.down(torch.tanh(self.up(self.norm(mean))))


class Bare(nn.Module):
    """Parameters that are results of operators, some frozen, some of other dtypes and orders."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(17, 9) * 0.3 + torch.rand(9))
        self.frozen = nn.Parameter(torch.randn(12, 5), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(5, 7).t())
        self.strided = nn.Parameter(torch.randn(6, 8)[:, ::2])
        self.order = nn.Parameter(torch.randperm(50), requires_grad=False)
        self.kept = nn.Parameter(torch.rand(40) > 0.5, requires_grad=False)
        self.image = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.half = nn.Linear(30, 20, dtype=torch.bfloat16)
        self.rounded = nn.Linear(20, 20).double().to(torch.bfloat16)
        self.scaled.mark = "kept"


class Rotary(nn.Module):
    """Buffers that no state dict has, numbers read from tensors, a table built from them."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        inverse = 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inverse", inverse, persistent=False)
        angles = torch.outer(torch.arange(50).float(), inverse)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("shared", self.cos[3:9], persistent=False)  # a view of another one
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 40)]
        self.linear = nn.Linear(dim, dim)


class Layers(nn.Module):
    """Torch's own modules with unusual construction."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 4, add_bias_kv=True, kdim=12, vdim=10)
        self.self_attention = nn.MultiheadAttention(24, 4)
        self.lstm = nn.LSTM(11, 13, 2, bidirectional=True, proj_size=5)
        self.gru = nn.GRU(7, 9)
        self.embed = nn.Embedding(31, 8, padding_idx=3, max_norm=1.0)
        self.bag = nn.EmbeddingBag(10, 4)
        self.conv, self.norm = nn.ConvTranspose2d(3, 6, 3), nn.BatchNorm2d(6)
        self.bilinear, self.prelu = nn.Bilinear(3, 4, 5), nn.PReLU(7)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)  # deep copies


class Parametrized(nn.Module):
    """Weights that are functions of parameters."""

    def __init__(self) -> None:
        super().__init__()
        wrap = nn.utils.parametrizations
        self.weight_norm = wrap.weight_norm(nn.Linear(12, 10))
        self.spectral = wrap.spectral_norm(nn.Linear(10, 10))
        self.orthogonal = wrap.orthogonal(nn.Linear(10, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.orthogonal(torch.tanh(self.spectral(self.weight_norm(x))))


class Initialised(nn.Module):
    """Initialisers that look at values, parts of tensors, and one weight at another."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(20, 30), nn.Linear(20, 30)
        nn.init.trunc_normal_(self.near.weight, std=0.5, a=-0.6, b=0.6)
        nn.init.trunc_normal_(self.far.weight, std=0.5, a=0.6, b=0.9)
        self.orthogonal, self.sparse = nn.Linear(20, 30), nn.Linear(40, 30)
        nn.init.orthogonal_(self.orthogonal.weight)
        nn.init.sparse_(self.sparse.weight, 0.3)
        self.dirac = nn.Conv1d(6, 6, 3)
        nn.init.dirac_(self.dirac.weight)
        with torch.no_grad():
            self.near.weight[2:5] *= 3
            self.near.weight.data = self.near.weight / self.near.weight.norm()
            self.orthogonal.bias.copy_(self.near.weight[:, 1])
            torch._foreach_mul_([self.far.weight, self.far.bias, torch.ones(1)], 0.5)
        self.fresh = nn.Linear(5, 5)
        if self.near.weight.sum() > 0:  # both ways draw
            self.fresh.weight.data = torch.randn(5, 5) * self.near.weight.mean()
        else:
            self.fresh.weight.data = torch.rand(5, 5) * self.near.weight.std()
        self.drawn = nn.Parameter(torch.bernoulli(torch.rand(40)))
        self.deviations = nn.Parameter(torch.normal(torch.zeros(40), torch.rand(40)))


class Generators(nn.Module):
    """Draws from other generators than torch's default one, and under another default dtype."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(5)
        self.first = nn.Parameter(torch.randn(40, 30, generator=own))
        self.linear = nn.Linear(30, 40)
        self.linear.weight.data.copy_(torch.from_numpy(np.random.RandomState(0).randn(40, 30)))
        self.second = nn.Parameter(torch.empty(9, 9).normal_(generator=own))
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.forked = nn.Linear(9, 9)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        self.wide = nn.Linear(9, 9)
        self.quotients = nn.Parameter(torch.arange(1, 60) / 7)  # of integers: the default dtype
        torch.set_default_dtype(before)


class Leftovers(nn.Module):
    """Tensors that are neither parameters nor buffers, in all kinds of places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(30, 20)
        self.scale = torch.randn(50, 20)
        self.tables = [torch.arange(300.0).mul_(2), {"ones": torch.ones(99)}]
        self.before = self.linear.weight.data[3:5]
        offset = torch.randn(60)
        self.shift = lambda: offset
        self.values = torch.randn(4, 10).tolist()
        self.array = torch.randn(44).numpy()
        self.text = repr(torch.randn(20))
        self.second = nn.Linear(20, 20)
        self.second.weight = nn.Parameter(self.linear.weight[:, :20].clone())


class Probing(nn.Module):
    """Runs some of its modules while it is built, and copies them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.norm = nn.InstanceNorm2d(8, track_running_stats=True)
        with torch.no_grad():
            found = self.norm(self.features(torch.randn(2, 3, 9, 9)))
            self.head = nn.Linear(found.flatten(1).shape[1], 10)
            self.memory = nn.Parameter(nn.LSTM(20, 20)(torch.randn(5, 3, 20))[0])
        self.averages = nn.Module()
        self.averages.register_buffer("mean", torch.randn(30, 20))
        self.averages.register_buffer("first", self.averages.mean[:2])
        self.other = copy.deepcopy(self.averages)
        self.sparse = torch.eye(20).to_sparse_csr().to_dense()
        z = torch.randn(12, 12, dtype=torch.complex64)
        self.conjugate = nn.Parameter(z.conj().clone())
        self.parts = nn.Parameter(torch.stack([z.conj().imag, (z.mH @ z).real, -z.conj().imag]))
        self.inverse = nn.Parameter(torch.linalg.inv(z.mH))
        self.written = nn.Parameter(torch.zeros_like(z))
        self.written.data.copy_(z.conj())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.LayerNorm(30), nn.Linear(30, 7))


BUILDS = {
    "mlp": mlp,
    "gpt": Gpt,
    "bare": Bare,
    "rotary": Rotary,
    "layers": Layers,
    "parametrized": Parametrized,
    "initialised": Initialised,
    "generators": Generators,
    "leftovers": Leftovers,
    "probing": Probing,
}


def hugging_face(name: str) -> nn.Module:
    """A tiny Hugging Face model."""
    import transformers as hf

    small = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    text = small | dict(vocab_size=101)
    grouped = text | dict(num_key_value_heads=2)
    if name == "gpt2":
        config = hf.GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=101, n_positions=32)
        return hf.GPT2LMHeadModel(config)
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**grouped))
    if name == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**text))
    if name == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**grouped, num_local_experts=3))
    return hf.ViTModel(hf.ViTConfig(**small, image_size=32, patch_size=8))


HUGGING_FACE = ["gpt2", "llama", "bert", "mixtral", "vit"]


def same(a: object, b: object) -> bool:
    """Bits, dtype and shape of tensors and arrays, or equality."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(_bytes(a), _bytes(b))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return a == b


def _bytes(tensor: Tensor) -> Tensor:
    rows = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return rows.view(-1).view(torch.uint8)


def ties(model: nn.Module) -> list[tuple[str, ...]]:
    """Names of each tensor that has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    return [tuple(found) for found in names.values() if len(found) > 1]


def differences(expected: nn.Module, model: nn.Module) -> list[str]:
    """What of a sharded model is not as in one that was constructed as usual. A collective."""
    found = []
    state = zerocore.full_state_dict(model)
    if list(state) != list(expected.state_dict()):
        found.append("names of the state")
    full = {n: p for n, p in expected.named_parameters(remove_duplicate=False)}
    for name, tensor in expected.state_dict().items():
        dense = name not in full or torch.empty_like(full[name]).stride() == full[name].stride()
        if not same(tensor, state[name]):
            found.append(f"values of {name}")
        if dense and tensor.is_contiguous() != state[name].is_contiguous():
            found.append(f"strides of {name}")
    buffers = dict(model.named_buffers())
    for name, buffer in expected.named_buffers():
        if not same(buffer, buffers[name]) or buffer.stride() != buffers[name].stride():
            found.append(f"buffer {name}")
    params = dict(model.named_parameters(remove_duplicate=False))
    for name, param in full.items():
        if param.requires_grad != params[name].requires_grad or vars(param) != vars(params[name]):
            found.append(f"attributes of {name}")
    if ties(model) != ties(expected):
        found.append(f"ties {ties(model)}")
    for module, other in zip(expected.modules(), model.modules(), strict=True):
        found += _other_attributes(module, other)
    return found


def _other_attributes(expected: nn.Module, module: nn.Module) -> list[str]:
    found = []
    for key, value in vars(expected).items():
        if key.startswith("_") and key != "_flat_weights":
            continue
        leaves, spec = tree_flatten(value)
        others, other_spec = tree_flatten(vars(module)[key])
        ok = spec == other_spec
        for a, b in zip(leaves, others, strict=False):
            if isinstance(a, nn.Parameter):
                ok = ok and any(b is param for param in module.parameters())
            elif callable(a):
                ok = ok and (not callable(a) or key != "shift" or same(a(), b()))
            else:
                ok = ok and same(a, b)
        if not ok:
            found.append(f"{type(expected).__name__}.{key}")
    return found
