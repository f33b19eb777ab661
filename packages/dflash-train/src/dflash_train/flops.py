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
    added, own = config.dflash2, 0
    if added is not None:  # the kernels of a layer's two convolutions, and the selector
        own = config.num_layers * 2 * width * 2 * added.conv_kernel_size * (width // added.conv_group_size)
        own += added.selector_rank * (width + added.selector_top_k)
    context = seq_len * (config.context_size * width + config.num_layers * width * kv)
    block = slots * (config.num_layers * width * (2 * heads + kv + 3 * config.intermediate_size) + own)
    head = num_anchors * (config.block_size - 1) * width * config.vocab_size
    return 2.0 * (3 * (context + block) + 2 * head)
