"""The model that every system of a comparison trains, and the tokens it trains on."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, SEQ, LAYERS, HEADS = 4096, 64, 8, 6


class Block(nn.Module):
    """Pre-norm attention and MLP: what the systems gather and reduce together."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention_in, self.attention_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp_in, self.mlp_out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Activations [batch, seq, dim] to the same shape."""
        batch, seq, dim = x.shape
        qkv = self.attention_in(self.attention_norm(x))
        q, k, v = qkv.view(batch, seq, 3, HEADS, dim // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, seq, dim))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Tokens and their targets, int64 [batch, seq], to the mean loss in fp32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, dim), nn.Embedding(SEQ, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Tokens:
    """Batches of one rank: each rank has its own, and every system the same."""

    def __init__(self, rank: int, batch: int) -> None:
        self._batch = batch
        self._generator = torch.Generator().manual_seed(1000 + rank)

    def draw(self) -> tuple[Tensor, Tensor]:
        """The next batch and its targets."""
        tokens = torch.randint(VOCABULARY, (self._batch, SEQ), generator=self._generator)
        return tokens, torch.roll(tokens, -1, 1)
