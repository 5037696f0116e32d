"""The network of the pico family in torch: Llama, with or without a norm on Q and K (Qwen3), embeddings tied.

The same function as transformers' LlamaForCausalLM and Qwen3ForCausalLM, and its parameters carry their names, so that a
state_dict is a checkpoint. Written out here because training looks inside: at the output of layer 0, and at what a head attends to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .recipes import Shape


class RMSNorm(nn.Module):
    def __init__(self, n: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


def rotation(n: int, head: int, theta: float, device) -> tuple[Tensor, Tensor]:
    """cos and sin [n, head] of positions 0..n-1; pairs stand half a head apart."""
    angle = torch.arange(n, device=device)[:, None] * theta ** (-torch.arange(0, head, 2, device=device) / head)
    return torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.width, s.n_head * s.head, bias=False)
        self.k_proj = nn.Linear(s.width, s.n_head_kv * s.head, bias=False)
        self.v_proj = nn.Linear(s.width, s.n_head_kv * s.head, bias=False)
        self.o_proj = nn.Linear(s.n_head * s.head, s.width, bias=False)
        if s.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(s.head, s.eps), RMSNorm(s.head, s.eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(output [b, t, d], rotated Q [b, n_head, t, head], rotated K [b, n_head_kv, t, head])"""
        b, t, _ = x.shape
        q, k, v = (proj(x).view(b, t, -1, self.s.head) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.s.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = rotate(q.transpose(1, 2), *rope), rotate(k.transpose(1, 2), *rope), v.transpose(1, 2)
        n = self.s.n_head // self.s.n_head_kv
        y = F.scaled_dot_product_attention(q, k.repeat_interleave(n, 1), v.repeat_interleave(n, 1), is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1)), q, k


class MLP(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(s.width, s.ff, bias=False)
        self.up_proj = nn.Linear(s.width, s.ff, bias=False)
        self.down_proj = nn.Linear(s.ff, s.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(s.width, s.eps), Attention(s)
        self.post_attention_layernorm, self.mlp = RMSNorm(s.width, s.eps), MLP(s)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        y, q, k = self.self_attn(self.input_layernorm(x), rope)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), q, k


class Pico(nn.Module):
    """A model of shape `s`; `state_dict()` has the names of transformers' checkpoints, without the tied lm_head.weight."""

    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(s.n_vocab, s.width),
            "layers": nn.ModuleList(Layer(s) for _ in range(s.n_layer)),
            "norm": RMSNorm(s.width, s.eps),
        })  # fmt: skip
        for name, p in self.named_parameters():
            if p.ndim == 2:
                # what writes into the residual stream begins small
                scale = 1 / math.sqrt(2 * s.n_layer) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(p, std=0.02 if "embed" in name else scale / math.sqrt(p.shape[1]))

    def forward(self, tokens: Tensor, look: Sequence[int] = ()) -> tuple[Tensor, Tensor, dict[int, tuple[Tensor, Tensor]]]:
        """tokens [b, t] -> (states before lm_head [b, t, d], output of layer 0 [b, t, d], {layer: rotated Q and K} of `look`)"""
        rope = rotation(tokens.shape[1], self.s.head, self.s.theta, tokens.device)
        x, first, seen = self.model["embed_tokens"](tokens), None, {}
        for il, layer in enumerate(self.model["layers"]):
            x, q, k = layer(x, rope)
            first = x if il == 0 else first
            if il in look:
                seen[il] = q, k
        return self.model["norm"](x), first, seen

    def logits(self, states: Tensor) -> Tensor:
        """[..., n_vocab] float32"""
        return F.linear(states, self.model["embed_tokens"].weight).float()
