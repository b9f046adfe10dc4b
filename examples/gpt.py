"""A small GPT over bytes: plain PyTorch, nothing in this file knows that it will be sharded."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # one token per byte value


class GPT(nn.Module):
    """Predicts the next byte: tokens int64 [batch, seq] -> logits [batch, seq, 256].

    Args:
        layers: number of blocks.
        dim: width of the residual stream; a multiple of `heads`, and dim / heads is even.
        heads: attention heads per block.
        seq: the longest sequence that the model will see.
    """

    def __init__(self, layers: int, dim: int, heads: int, seq: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.register_buffer("rotation", rotation_table(seq, dim // heads), persistent=False)
        self._initialise(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the byte that follows each position, in the dtype of the parameters."""
        rotation = self.rotation[:, : tokens.shape[1]]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))

    def _initialise(self, layers: int) -> None:
        """GPT-2's rule: small normal weights, smaller still where a block adds to the residual."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.blocks:
            for last in (block.attention_out, block.mlp_out):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))


class Block(nn.Module):
    """Pre-norm attention and MLP. This is the class that train_gpt.py names as a unit."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.attention_in = nn.Linear(dim, 3 * dim, bias=False)  # query, key and value in one
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp_in = nn.Linear(dim, 4 * dim, bias=False)
        self.mlp_out = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """X [batch, seq, dim] -> the same shape; rotation [2, seq, dim / heads] gives positions."""
        x = x + self._attention(self.attention_norm(x), rotation)
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))

    def _attention(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        split = self.attention_in(x).view(batch, seq, 3, self.heads, dim // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [batch, heads, seq, dim / heads]
        mixed = F.scaled_dot_product_attention(
            rotate(query, rotation), rotate(key, rotation), value, is_causal=True
        )
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, seq, dim))


def rotation_table(seq: int, head_dim: int) -> Tensor:
    """Cosines and sines of rotary position embedding: float32 [2, seq, head_dim]."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.outer(torch.arange(seq).float(), frequency).repeat(1, 2)
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turns pairs of features of x [..., seq, head_dim] by angles that grow with position."""
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    # The table is float32 and so is the product, whatever the precision of x.
    return (x * cosine + torch.cat([-second, first], dim=-1) * sine).type_as(x)
