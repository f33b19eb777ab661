"""Tiny models and inputs with every dimension different, so that a swapped axis cannot pass."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3TextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.configuration_utils import PretrainedConfig

from dflash_model import DFlash2Config, Drafter, DrafterConfig
from dflash_model.config import FULL, SLIDING

HYBRID: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "full_attention_interval": 4,
}  # fmt: skip
DENSE: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
# Layers 3, 4 and 5 of gemma4 take keys and values from 1 and 2: one of each type lies among the taps.
GEMMA: dict[str, Any] = {
    **SIZES, "intermediate_size": 96, "head_dim": 24, "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}  # fmt: skip
GEMMA4: dict[str, Any] = {**GEMMA, "global_head_dim": 32, "final_logit_softcapping": 3.0}
GEMMA4_K_EQ_V: dict[str, Any] = {
    **GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip
MROPE: dict[str, Any] = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
}  # fmt: skip
DFLASH2 = DFlash2Config(conv_kernel_size=3, conv_group_size=4, selector_rank=20, selector_top_k=6)
PLAIN = ("qwen3", "llama", "qwen3_5")  # keep transformers' initial weights, which other tests' values come from


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**DENSE),
    "llama": lambda: LlamaConfig(**DENSE),
    "qwen2": lambda: Qwen2Config(**SIZES, intermediate_size=96, tie_word_embeddings=False),
    "gemma3": lambda: Gemma3TextConfig(**GEMMA, query_pre_attn_scalar=20),
    "gemma4": lambda: Gemma4TextConfig(
        **GEMMA4,
        hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=131,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    ),
    "gemma4_dense": lambda: Gemma4TextConfig(**GEMMA4_K_EQ_V),
    "gemma4_moe": lambda: Gemma4TextConfig(
        **GEMMA4_K_EQ_V, enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=40
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(**DENSE, **EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]),  # 1 is dense
    "qwen3_5": lambda: Qwen3_5TextConfig(**HYBRID),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(
        **{name: value for name, value in HYBRID.items() if name != "intermediate_size"},
        **EXPERTS,
        shared_expert_intermediate_size=48,
    ),
    # The multimodal wrapper. Its special tokens lie outside the vocabulary: no text can hold them.
    "qwen3_5_vl": lambda: Qwen3_5Config(
        text_config={**HYBRID, "rope_parameters": MROPE},
        vision_config=VISION,
        image_token_id=500,
        video_token_id=501,
        vision_start_token_id=502,
        vision_end_token_id=503,
    ),
}


def tiny_target(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model of a family, everything in it large enough to matter (see ``PLAIN`` for three exceptions)."""
    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if family == "qwen3_5_vl" else AutoModelForCausalLM
    model = auto.from_config(FAMILIES[family](), dtype=dtype).eval()
    if family not in PLAIN:
        spread(model)
    return model


@torch.no_grad()
def spread(model: PreTrainedModel) -> None:
    """Constants (norms, biases, layer scalars) are lowered by a half, with noise; matrices get four times their 0.02.

    Rolling any one tensor of the new families by a row then changes outputs by 2e-4 or more, mostly by over 1e-3, and
    fp32 rounding stays below 6e-6. (With norms around one, Gemma 4's sharp attention makes 4e-5 of it.)
    """
    tied_once = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    for tensor in tied_once.values():
        if tensor.dim() > 1:
            tensor.mul_(4)
        elif bool((tensor == tensor[0]).all()):
            tensor.add_(0.15 * torch.randn_like(tensor) - 0.5)


def tiny_config(layers: tuple[str, ...] = (FULL, FULL), **changes: Any) -> DrafterConfig:
    """A drafter configuration for the tiny targets."""
    values: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 80, "num_layers": len(layers), "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 24, "vocab_size": 131, "num_target_layers": 6, "target_layer_ids": (0, 2, 4), "block_size": 8,
        "mask_token_id": 130, "layer_types": layers, "sliding_window": 12 if SLIDING in layers else None,
        "rope_theta": 10000.0,
    }  # fmt: skip
    return DrafterConfig(**{**values, **changes})


def tiny_drafter(config: DrafterConfig, dtype: torch.dtype = torch.float32, seed: int = 1) -> Drafter:
    """A drafter with random weights large enough that every part of it matters, norms included."""
    drafter = Drafter(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            mean = 1.0 if parameter.dim() == 1 else 0.5 if name.endswith("base_kernel") else 0.0
            parameter.normal_(mean, 0.15, generator=generator)
    return drafter


def packed_row(rng: np.random.Generator, num_documents: int, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A random packed row: ids, loss mask with gaps, document numbers; a padded tail."""
    doc = np.full(seq_len, -1, dtype=np.int32)
    cuts = np.sort(rng.choice(np.arange(1, seq_len - 1), num_documents, replace=False))
    begin = 0
    for number, end in enumerate(cuts.tolist()):
        doc[begin:end] = number
        begin = end
    ids = rng.integers(1, 130, seq_len).astype(np.int32)
    return ids, (rng.random(seq_len) < 0.8) & (doc >= 0), doc
