"""Tiny models and inputs with every dimension different, so that a swapped axis cannot pass."""

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3_5TextConfig, Qwen3Config

from dflash_model import Drafter, DrafterConfig
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


def tiny_target(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random causal model of a family: qwen3, qwen3_5 (hybrid) or llama."""
    torch.manual_seed(seed)
    config = {
        "qwen3": lambda: Qwen3Config(**DENSE),
        "llama": lambda: LlamaConfig(**DENSE),
        "qwen3_5": lambda: Qwen3_5TextConfig(**HYBRID),
    }[family]()
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


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
        for parameter in drafter.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.15, generator=generator)
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
