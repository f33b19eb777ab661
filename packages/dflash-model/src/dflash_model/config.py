"""What a drafter is: sizes, tapped target layers, block size, attention layout.

``layout.py`` is its published JSON form.
"""

import math
from dataclasses import dataclass

from transformers.configuration_utils import PretrainedConfig

from dflash_model.errors import UserError

FULL = "full_attention"
SLIDING = "sliding_attention"


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Spread ``num_taps`` taps over the target, skipping its first and its last few layers.

    Ids are 0-based decoder layers whose *output* residual stream is read.

    Source: z-lab dflash 0.1.0, ``build_target_layer_ids``; Python's round (half to even) is part of it.
    """
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))


@dataclass(frozen=True, kw_only=True)
class DFlash2Config:
    """What DFlash2 adds to a drafter (``dflash2.py``).

    Attributes:
        conv_kernel_size: slots that a convolution along the block sums over, the slot itself included.
        conv_group_size: channels for which a slot changes the kernel alike.
        selector_rank: width of the selector's codebooks.
        selector_top_k: tokens the selector chooses among, the likeliest ones of each slot.
    """

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Everything that decides a drafter's parameters and attention.

    Attributes:
        hidden_size: drafter width D. Equals the target's, because its embedding and head are borrowed.
        target_layer_ids: tapped layers, 0-based, output of that layer; their concatenation has E entries.
        block_size: K, the anchor included: a block proposes K - 1 tokens.
        mask_token_id: vocabulary id whose frozen embedding stands in slots 1..K-1.
        layer_types: one of ``full_attention`` (bidirectional in the block) or ``sliding_attention``
            (causal in the block, ``sliding_window`` tokens back, the query itself included) per layer.
        is_causal: overrides the in-block rule of *all* layers; absent for DFlash.
        input_embedding_scale: factor on the target's embedding rows (Gemma's ``sqrt(hidden_size)``).
        output_multiplier: factor on the head's logits (Cohere, Granite).
        final_logit_softcapping: cap c of the logits, ``c * tanh(logits / c)`` (Gemma), after the factor.
        dflash2: sizes of the parts that DFlash2 adds; None for DFlash.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    is_causal: bool | None = None
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    dflash2: DFlash2Config | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be a drafter.

        Raises:
            UserError: one sentence with the key, its value and what is allowed.
        """
        for key in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, key) < 1:
                raise UserError(f"drafter.{key} is {getattr(self, key)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"drafter.num_heads ({self.num_heads}) must be a multiple of drafter.num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise UserError(f"drafter.head_dim is {self.head_dim}; rotary embeddings need an even number")
        if not 0 < self.rope_theta < math.inf:
            raise UserError(f"drafter.rope_theta is {self.rope_theta}; it must be a finite number above 0")
        if self.block_size < 2:
            raise UserError(
                f"drafter.block_size is {self.block_size}; a block is the anchor and at least one proposal: 2 or more"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(
                f"drafter.mask_token_id is {self.mask_token_id}; the target's vocabulary has ids 0 to"
                f" {self.vocab_size - 1}"
            )
        self._check_taps()
        self._check_layers()
        self._check_dflash2()

    def _check_taps(self) -> None:
        ids = self.target_layer_ids
        if not ids or len(set(ids)) != len(ids) or not all(0 <= i < self.num_target_layers for i in ids):
            raise UserError(
                f"drafter.target_layer_ids is {list(ids)}; it takes distinct layers from 0 to"
                f" {self.num_target_layers - 1}"
                " (0-based, the output of that layer of the target)"
            )

    def _check_layers(self) -> None:
        if len(self.layer_types) != self.num_layers or not set(self.layer_types) <= {FULL, SLIDING}:
            raise UserError(
                f"drafter.layer_types is {list(self.layer_types)}; it takes {self.num_layers} entries"
                " (drafter.num_layers),"
                f" each {FULL} or {SLIDING}"
            )
        if SLIDING in self.layer_types and (self.sliding_window is None or self.sliding_window < self.block_size):
            raise UserError(
                f"drafter.sliding_window is {self.sliding_window}; with {SLIDING} layers it must be at least"
                f" drafter.block_size ({self.block_size})"
            )

    def _check_dflash2(self) -> None:
        added = self.dflash2
        if added is None:
            return
        if not 1 <= added.conv_kernel_size <= self.block_size:
            raise UserError(
                f"drafter.conv_kernel_size is {added.conv_kernel_size}; it takes 1 to drafter.block_size"
                f" ({self.block_size})"
            )
        if added.conv_group_size < 1 or self.hidden_size % added.conv_group_size:
            raise UserError(
                f"drafter.conv_group_size is {added.conv_group_size}; it must divide the drafter's width"
                f" ({self.hidden_size})"
            )
        if added.selector_rank < 1:
            raise UserError(f"drafter.selector_rank is {added.selector_rank}; it must be at least 1")
        if not 2 <= added.selector_top_k <= self.vocab_size:
            raise UserError(
                f"drafter.selector_top_k is {added.selector_top_k}; it takes 2 to the size of the vocabulary"
                f" ({self.vocab_size})"
            )

    @property
    def kind(self) -> str:
        """``dflash`` or ``dflash2``."""
        return "dflash" if self.dflash2 is None else "dflash2"

    @property
    def context_size(self) -> int:
        """E: entries of one token's context features."""
        return len(self.target_layer_ids) * self.hidden_size

    def causal_in_block(self, layer_type: str) -> bool:
        """Whether slots of one block see only earlier slots in a layer of this type."""
        return layer_type == SLIDING if self.is_causal is None else self.is_causal

    def window(self, layer_type: str) -> int | None:
        """Visible tokens back from a query, itself included; None for all."""
        return self.sliding_window if layer_type == SLIDING else None

    def check_fits(self, target: PretrainedConfig, origin: str, target_origin: str) -> None:
        """Whether this drafter was made for a target of this shape.

        Raises:
            UserError: width, vocabulary or depth differ; names both sides.
        """
        for key, value in (
            ("hidden_size", target.hidden_size),
            ("vocab_size", target.vocab_size),
            ("num_target_layers", target.num_hidden_layers),
        ):
            if getattr(self, key) != value:
                raise UserError(
                    f"{origin} has {key} {getattr(self, key)}, {target_origin} has {value}; they do not belong together"
                )
