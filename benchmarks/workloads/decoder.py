"""The reference workload: a decoder with RMSNorm, causal attention and SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a decoder.

    Attributes:
        dim: width, a multiple of ``num_heads``.
        num_blocks: how many blocks.
        num_heads: attention heads.
        vocabulary: rows of the embedding and of the (untied) head.
        hidden_dim: width inside the SwiGLU.
        num_kv_heads: heads of keys and values, of which each serves as many query heads; 0: as
            many as query heads.
    """

    dim: int
    num_blocks: int
    num_heads: int
    vocabulary: int
    hidden_dim: int
    num_kv_heads: int = 0


class Block(nn.Module):
    """Pre-norm causal attention, then a SwiGLU; ``(batch, length, dim)`` to the same."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        dim, hidden = sizes.dim, sizes.hidden_dim
        self.num_heads = sizes.num_heads
        self.num_kv_heads = sizes.num_kv_heads or sizes.num_heads
        kv_dim = self.num_kv_heads * (dim // self.num_heads)
        self.attention_norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, dim + 2 * kv_dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, sum(heads), -1)
        q, k, v = qkv.transpose(1, 2).split(heads, dim=1)
        if self.num_kv_heads != self.num_heads:
            shared_by = self.num_heads // self.num_kv_heads
            k, v = k.repeat_interleave(shared_by, 1), v.repeat_interleave(shared_by, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, dim))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """Embedding, blocks, norm, head: tokens ``(batch, length)`` to logits."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.num_blocks))
        self.norm = nn.RMSNorm(sizes.dim)
        self.head = nn.Linear(sizes.dim, sizes.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
