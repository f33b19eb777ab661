"""The DFlash drafter: a small decoder whose keys and values also come from the target's hidden states.

Context features are fused once, normalised once and shared by all layers; they are projected to keys and values by
every layer and never updated. Queries come only from block slots. The frozen embedding and head belong to the target
and are not part of this module. What a DFlash2 drafter has beside this is in ``dflash2.py``.

Legend: B batch, S context tokens, A blocks, K block size, Q = A*K block slots, D drafter width, E = taps * D,
N query heads, M key/value heads, H head size.
Source: DFlash paper section 4.1 and appendix A.3; parameter names are those of z-lab's published checkpoints.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_model.attention import Mask, attend
from dflash_model.cache import DraftCache
from dflash_model.config import DrafterConfig
from dflash_model.dflash2 import BlockConvolution, CandidateSelector, convolved, start_value

Rope = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` with fp32 statistics; the plain kind, also for targets whose norms are ``1 + w``."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return self.weight * F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype)


def rope_tables(position_BT: Tensor, head_dim: int, theta: float) -> Rope:
    """fp32 cosine and sine ``[B, 1, T, H]`` of a full rotary embedding in the half-split layout.

    Computed from the configuration at every forward: there is no buffer that loading could leave unset.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_BT.device) / head_dim
    angle = position_BT[:, None, :, None].float() * (1.0 / theta**exponent)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Apply rotary tables to ``[B, heads, T, H]``; bf16 inputs are rotated in fp32."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class DrafterAttention(nn.Module):
    """Attention of block slots over context and block."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        self.index, self.head_dim = index, config.head_dim
        self.flash = False  # set from outside: attend under a BlockMask with flash-attn-4
        width = config.hidden_size
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, width, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x_BQD: Tensor, context_BSD: Tensor, rope: Rope, mask: Mask, cache: DraftCache | None) -> Tensor:
        """Attend from the slots to ``[context | slots]``, whose keys and values come from the same weights."""
        slots = slice(context_BSD.shape[1], None)
        # Two products, one norm and rope. Of one product the concatenation would be kept for backward, 126 MB a layer
        # at 27B sizes: the compiler norms again, but does not concatenate again.
        k_BTF, v_BTF = (torch.cat((of(context_BSD), of(x_BQD)), dim=1) for of in (self.k_proj, self.v_proj))
        k_BMTH = rotate(self.k_norm(self._heads(k_BTF)).transpose(1, 2), rope)
        v_BMTH = self._heads(v_BTF).transpose(1, 2)
        if cache is not None:
            k_BMTH, v_BMTH = cache.extend(self.index, (k_BMTH, v_BMTH), context_BSD.shape[1])
        slot_rope = rope[0][:, :, slots], rope[1][:, :, slots]
        q_BNQH = rotate(self.q_norm(self._heads(self.q_proj(x_BQD))).transpose(1, 2), slot_rope)
        out_BNQH = attend(q_BNQH, k_BMTH, v_BMTH, mask, flash=self.flash)
        return self.o_proj(out_BNQH.transpose(1, 2).flatten(2))

    def _heads(self, x_BTF: Tensor) -> Tensor:
        return x_BTF.unflatten(-1, (-1, self.head_dim))


class DrafterMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BQD: Tensor) -> Tensor:
        """``down(silu(gate(x)) * up(x))``."""
        return self.down_proj(F.silu(self.gate_proj(x_BQD)) * self.up_proj(x_BQD))


class DrafterLayer(nn.Module):
    """One pre-norm layer. Context features bypass ``input_layernorm``: ``hidden_norm`` has normalised them."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DrafterAttention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DrafterMLP(config)
        added = config.dflash2
        self.attention_conv = BlockConvolution(config, added) if added else None
        self.mlp_conv = BlockConvolution(config, added) if added else None

    def forward(self, x_BQD: Tensor, context_BSD: Tensor, rope: Rope, mask: Mask, cache: DraftCache | None) -> Tensor:
        """The new slots; a cache gives the keys and values of earlier context, and takes those of this one."""

        def attention(x_BQD: Tensor) -> Tensor:
            return self.self_attn(x_BQD, context_BSD, rope, mask, cache)

        x_BQD = x_BQD + convolved(self.attention_conv, self.input_layernorm(x_BQD), attention)
        return x_BQD + convolved(self.mlp_conv, self.post_attention_layernorm(x_BQD), self.mlp)


@dataclass(frozen=True)
class DraftInputs:
    """What one forward pass sees.

    Attributes:
        embedding_BQD: the target's frozen embedding of ``[anchor, MASK, MASK, ...]`` per block.
        context_BSE: tapped hidden states, concatenated in the order of ``target_layer_ids``.
        context_position_BS: position of each context token in its document.
        block_position_BQ: position of each slot in its document.
        masks: visibility by layer type; a missing or None entry means that everything is visible.
    """

    embedding_BQD: Tensor
    context_BSE: Tensor
    context_position_BS: Tensor
    block_position_BQ: Tensor
    masks: dict[str, Mask]


def embed_block(config: DrafterConfig, ids: Tensor, embedding_VD: Tensor) -> Tensor:
    """The target's frozen rows for block tokens, scaled as the target scales them; ``[..., D]``."""
    rows = F.embedding(ids, embedding_VD)
    return rows if config.input_embedding_scale == 1.0 else rows * config.input_embedding_scale


def draft_logits(config: DrafterConfig, hidden: Tensor, head_VD: Tensor) -> Tensor:
    """Logits ``[..., V]`` of drafter outputs through the target's frozen head, in the head's type.

    Factor and cap keep the order, but in bf16 a cap makes neighbours equal: take the largest from the head itself.
    """
    return _scaled_and_capped(config, F.linear(hidden.to(head_VD.dtype), head_VD))


def draft_candidates(config: DrafterConfig, hidden: Tensor, head_VD: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens ``[..., J]`` of drafter outputs, in no order, and their logits in fp32."""
    logits, candidate = F.linear(hidden.to(head_VD.dtype), head_VD).topk(top_k, sorted=False)
    return candidate, _scaled_and_capped(config, logits.float())


def _scaled_and_capped(config: DrafterConfig, logits: Tensor) -> Tensor:
    if config.output_multiplier != 1.0:
        logits = logits * config.output_multiplier
    if config.final_logit_softcapping is not None:
        logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
    return logits


class Drafter(nn.Module):
    """The trainable part of DFlash or DFlash2. Knows no ranks and no devices: sharding, compiling come from outside."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.context_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.candidate_selector = CandidateSelector(config, config.dflash2) if config.dflash2 else None

    @staticmethod
    def initial_tensors(
        config: DrafterConfig, generator: torch.Generator, known: Collection[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Start values of every parameter but the known ones in order, fp32, one at a time.

        Matrices are N(0, 0.02), those that write into the residual stream scaled down by depth; norms are one; what
        DFlash2 adds changes nothing yet. Values are drawn where the generator is and depend on it alone, not on how the
        drafter is sharded.
        """
        with torch.device("meta"):
            shapes = [(name, parameter.shape) for name, parameter in Drafter(config).named_parameters()]
        for name, shape in shapes:
            if name in known:
                continue
            fixed = torch.ones(shape) if len(shape) == 1 else start_value(name, shape)
            if fixed is not None:
                yield name, fixed
                continue
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / (2 * config.num_layers) ** 0.5 if residual else 0.02
            yield name, torch.empty(shape, device=generator.device).normal_(0.0, std, generator=generator)

    def forward(self, inputs: DraftInputs, cache: DraftCache | None = None) -> Tensor:
        """Hidden states ``[B, Q, D]`` of the block slots, ready for the target's head.

        With a cache, ``context_BSE`` holds only the tokens that the cache has not seen; their keys and values are
        appended. Block keys and values are never cached.
        """
        config = self.config
        context_BSD = self.hidden_norm(self.fc(inputs.context_BSE))
        position_BT = torch.cat((inputs.context_position_BS, inputs.block_position_BQ), dim=1)
        rope = rope_tables(position_BT, config.head_dim, config.rope_theta)
        x_BQD = inputs.embedding_BQD
        for layer, layer_type in zip(self.layers, config.layer_types, strict=True):
            x_BQD = layer(x_BQD, context_BSD, rope, inputs.masks.get(layer_type), cache)
        return self.norm(x_BQD)
