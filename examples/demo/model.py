"""A small decoder-only language model over bytes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256
HEAD_DIM = 32


class Block(nn.Module):
    """Pre-norm causal attention with rotary positions, then a SwiGLU.

    Args:
        dim: width, a multiple of ``HEAD_DIM``. It has ``10 * dim**2`` parameters and two norms.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim)
        self.gate_up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, length, dim). ``cos``, ``sin``: (length, HEAD_DIM / 2), float32."""
        x = x + self._attention(self.attention_norm(x), cos, sin)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def _attention(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, dim // HEAD_DIM, HEAD_DIM)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        # CPUs without bfloat16 instructions are several times faster at float32 attention.
        dtype = v.dtype if v.is_cuda else torch.float32
        q, k, v = rotate(q, cos, sin).to(dtype), rotate(k, cos, sin).to(dtype), v.to(dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(y.transpose(1, 2).reshape(batch, length, dim).to(x.dtype))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions (arXiv 2104.09864): turn pairs of ``x``'s last axis by their position."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Decoder(nn.Module):
    """Embedding, blocks, norm, head.

    Args:
        dim: width, a multiple of ``HEAD_DIM``.
        num_blocks: how many blocks.
        length: most tokens that one forward can see.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, dim: int, num_blocks: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        frequencies = 1000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.arange(length)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialize(num_blocks)

    def _initialize(self, num_blocks: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                into_residual = name.endswith(("attention_out.weight", "down.weight"))
                scale = (2 * num_blocks) ** -0.5 if into_residual else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, (batch, length, VOCABULARY), of the byte after each of ``tokens``."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))
