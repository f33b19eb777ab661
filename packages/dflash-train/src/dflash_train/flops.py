"""Counted arithmetic of one drafter pack, for model FLOP utilisation."""

from dflash_model import DrafterConfig


def pack_flops(config: DrafterConfig, seq_len: int, num_anchors: int) -> float:
    """Floating-point operations of forward and backward on one pack, matrix products only.

    Multiply-adds count two; backward costs twice the forward, except for the frozen head (no weight gradient: once)
    and the embedding (none). Attention scores are left out: with block-sparse masks they depend on the documents.
    """
    slots = num_anchors * config.block_size
    heads = config.num_heads * config.head_dim
    kv = 2 * config.num_kv_heads * config.head_dim
    width = config.hidden_size
    context = seq_len * (config.context_size * width + config.num_layers * width * kv)
    block = slots * config.num_layers * width * (2 * heads + kv + 3 * config.intermediate_size)
    head = num_anchors * (config.block_size - 1) * width * config.vocab_size
    return 2.0 * (3 * (context + block) + 2 * head)
