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
    """

    dim: int
    num_blocks: int
    num_heads: int
    vocabulary: int
    hidden_dim: int


class Block(nn.Module):
    """Pre-norm causal attention, then a SwiGLU; ``(batch, length, dim)`` to the same."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        dim, hidden = sizes.dim, sizes.hidden_dim
        self.num_heads = sizes.num_heads
        self.attention_norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = qkv.view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
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
