"""Attention with projections that are layers.

``nn.MultiheadAttention`` keeps its input projection as a bare parameter and reads the weight of its
output projection past its ``forward``: wrapping that layer would be bypassed in silence. So where a
projection is to be converted, the module is first rewritten with four ``nn.Linear`` that are called.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpbnn.convert.wrapper import move_hooks

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class SplitAttention(nn.Module):
    """``nn.MultiheadAttention`` (batch first) with q_proj, k_proj, v_proj and out_proj as layers.

    Same call, same answer to rounding, same weights bit for bit.

    Example:
        >>> attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> x = torch.randn(3, 5, 8)
        >>> split = SplitAttention(attention).eval()
        >>> torch.allclose(split(x, x, x)[0], attention(x, x, x)[0], atol=1e-6)
        True
    """

    # nn.TransformerEncoderLayer looks here, and takes its fused path only if there is a bias.
    in_proj_bias = None

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim = attention.embed_dim
        self.num_heads = attention.num_heads
        self.head_dim = attention.head_dim
        self.dropout = attention.dropout
        self.batch_first = attention.batch_first
        self._qkv_same_embed_dim = attention._qkv_same_embed_dim
        if attention._qkv_same_embed_dim:
            weights = attention.in_proj_weight.chunk(3)
        else:
            names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            weights = [getattr(attention, name) for name in names]
        packed = attention.in_proj_bias
        biases = [None] * 3 if packed is None else packed.chunk(3)
        self.q_proj, self.k_proj, self.v_proj = (
            linear_of(weight, bias) for weight, bias in zip(weights, biases, strict=True)
        )
        self.out_proj = linear_of(attention.out_proj.weight, attention.out_proj.bias)
        self.train(attention.training)
        move_hooks(attention, self)

    def restore(self) -> nn.MultiheadAttention:
        """Back to ``nn.MultiheadAttention``, with the projections as they are now."""
        inputs = (self.q_proj, self.k_proj, self.v_proj)
        attention = nn.MultiheadAttention(
            self.embed_dim,
            self.num_heads,
            dropout=self.dropout,
            bias=self.q_proj.bias is not None,
            kdim=self.k_proj.in_features,
            vdim=self.v_proj.in_features,
            batch_first=self.batch_first,
            device=self.q_proj.weight.device,
            dtype=self.q_proj.weight.dtype,
        )
        with torch.no_grad():
            if self._qkv_same_embed_dim:
                attention.in_proj_weight.copy_(torch.cat([layer.weight for layer in inputs]))
            else:
                for name, layer in zip("qkv", inputs, strict=True):
                    getattr(attention, f"{name}_proj_weight").copy_(layer.weight)
            if attention.in_proj_bias is not None:
                attention.in_proj_bias.copy_(torch.cat([layer.bias for layer in inputs]))
                attention.out_proj.bias.copy_(self.out_proj.bias)
            attention.out_proj.weight.copy_(self.out_proj.weight)
        packed = [p for layer in inputs for p in layer.parameters()]
        # Packed ones learn if one of their parts does.
        for name, parameter in attention.named_parameters():
            parts = list(self.out_proj.parameters()) if name.startswith("out_proj") else packed
            parameter.requires_grad_(any(part.requires_grad for part in parts))
        move_hooks(self, attention)
        return attention.train(self.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)
            for layer, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        one = query.dim() == 2  # one sequence, without a batch
        if one:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        if attn_mask is None and is_causal:  # in this order a compiler need not know is_causal
            raise ValueError(
                "is_causal=True is a hint about attn_mask, which was not given. Fix: give it."
            )
        mask = _merged_mask(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.mT / self.head_dim**0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout)
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        mixed = mixed.transpose(1, 2).flatten(2)
        output = self.out_proj(mixed.squeeze(0) if one else mixed)
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights.squeeze(0) if one else weights
        return output, weights


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A layer with copies of these, frozen where they are."""
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return layer


def _merged_mask(mask: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
    """One additive mask (B, heads or 1, queries, keys) of torch's two, boolean or additive."""

    def additive(m: Tensor) -> Tensor:
        if m.dtype == torch.bool:
            return torch.zeros_like(m, dtype=like.dtype).masked_fill(m, float("-inf"))
        return m.to(like.dtype)

    merged = None
    if mask is not None:
        merged = additive(mask)
        # (B * heads, queries, keys), and the rows are B examples for J members
        if merged.dim() == 3:
            rows, heads = like.shape[:2]
            merged = merged.unflatten(0, (-1, heads))
            if merged.shape[0] > rows:
                raise ValueError(
                    f"attn_mask of shape {tuple(mask.shape)} is for {merged.shape[0]} examples with "
                    f"{heads} heads; the query has {rows}. Fix: one mask for each example and head."
                )
            if merged.shape[0] != rows:  # in the order of expand_batch
                merged = merged[torch.arange(rows, device=merged.device) % merged.shape[0]]
    if padding is not None:
        padded = additive(padding)[:, None, None, :]
        merged = padded if merged is None else merged + padded
    return merged
