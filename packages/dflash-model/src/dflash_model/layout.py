"""The published ``config.json`` of a drafter, to and from ``DrafterConfig``.

z-lab's reference package, SGLang and vLLM read this layout; where they look for a key in different places, it is
written in all of them. What a configuration says and these readers would ignore or change is refused when reading:
a drafter that trains or drafts here must do the same there.

Source: z-lab dflash 0.1.0 ``model.py``; SGLang ``srt/speculative/dflash_utils.py``; vLLM ``models/qwen3_dflash.py``.
"""

from typing import Any

from dflash_model.config import FULL, SLIDING, DrafterConfig
from dflash_model.errors import UserError

INTEGERS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "num_target_layers", "mask_token_id", "block_size",
)  # fmt: skip


def to_published(config: DrafterConfig) -> dict[str, Any]:
    """The ``config.json`` that z-lab's package, SGLang and vLLM load."""
    sliding = SLIDING in config.layer_types
    # z-lab's package looks into dflash_config first, then at the top level; servers differ. Both are written.
    ends = {
        "input_embedding_scale": config.input_embedding_scale,
        "output_multiplier": config.output_multiplier,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    ends = {key: value for key, value in ends.items() if value not in (1.0, None)}
    out: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        # Both spellings: SGLang reads rope_theta where rope_parameters is missing, vLLM the other way round.
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        # transformers' Qwen3Config drops the window unless all four of these agree.
        "layer_types": list(config.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window if sliding else None,
        "max_window_layers": config.num_layers,
        **ends,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "block_size": config.block_size,
            **ends,
        },
    }
    if config.output_multiplier != 1.0:
        out["logit_scale"] = config.output_multiplier  # vLLM's name for it
    if config.is_causal is not None:
        out["is_causal"] = config.is_causal
    return out


def from_published(raw: dict[str, Any], origin: str) -> DrafterConfig:
    """Read a z-lab-layout ``config.json``; keys in ``dflash_config`` win over the top level.

    Args:
        raw: the parsed file.
        origin: what to call it in errors.

    Raises:
        UserError: a key that must not be guessed (taps, mask id, sizes) is missing or no number, or a value describes
            a drafter that the servers could not run or would run differently.
    """
    if "speculators_model_type" in raw or "transformer_layer_config" in raw:
        raise UserError(
            f"{origin} is in the speculators layout; only z-lab's is read (its tap ids are one smaller, its layer"
            " settings stand at the top level)"
        )
    merged = {**raw, **(raw.get("dflash_config") or {})}
    _check_keys(merged, origin)
    _check_same_everywhere(merged, origin)
    rope = merged.get("rope_parameters") or {}
    theta = rope.get("rope_theta", merged.get("rope_theta"))
    if theta is None:
        raise UserError(f"{origin} has no rope_theta (neither top-level nor in rope_parameters)")
    try:
        return DrafterConfig(
            hidden_size=merged["hidden_size"],
            intermediate_size=merged["intermediate_size"],
            num_layers=merged["num_hidden_layers"],
            num_heads=merged["num_attention_heads"],
            num_kv_heads=merged["num_key_value_heads"],
            head_dim=merged.get("head_dim") or merged["hidden_size"] // merged["num_attention_heads"],
            vocab_size=merged["vocab_size"],
            num_target_layers=merged["num_target_layers"],
            target_layer_ids=tuple(merged["target_layer_ids"]),
            block_size=merged["block_size"],
            mask_token_id=merged["mask_token_id"],
            layer_types=tuple(merged.get("layer_types") or (FULL,) * merged["num_hidden_layers"]),
            sliding_window=merged.get("sliding_window"),
            is_causal=merged.get("is_causal"),
            rope_theta=float(theta),
            rms_norm_eps=merged.get("rms_norm_eps", 1e-6),
            max_position_embeddings=merged.get("max_position_embeddings", 32768),
            input_embedding_scale=float(merged.get("input_embedding_scale", 1.0)),
            output_multiplier=float(merged.get("output_multiplier", 1.0)),
            final_logit_softcapping=merged.get("final_logit_softcapping") or None,  # z-lab takes 0 as none
        )
    except UserError as error:  # the same rules as for drafter.* settings, under the file's name
        raise UserError(f"{origin}: {error}") from error


def _check_keys(merged: dict[str, Any], origin: str) -> None:
    missing = [key for key in (*INTEGERS, "target_layer_ids") if merged.get(key) is None]
    if missing:
        raise UserError(f"{origin} has no {', '.join(missing)}; a DFlash drafter's config must state it")
    for key in INTEGERS:
        if type(merged[key]) is not int:
            raise UserError(f"{origin}: {key} is {merged[key]!r}; it must be a whole number")
    taps = merged["target_layer_ids"]
    if not isinstance(taps, list) or not all(type(i) is int for i in taps):
        raise UserError(f"{origin}: target_layer_ids is {taps!r}; it must be a list of layer numbers")


def _check_same_everywhere(merged: dict[str, Any], origin: str) -> None:
    """Refuse settings under which this package and the servers would run different drafters."""
    rope = {**(merged.get("rope_scaling") or {}), **(merged.get("rope_parameters") or {})}
    sliding = SLIDING in (merged.get("layer_types") or ())
    rules: list[tuple[str, object, bool, str]] = [
        ("architectures", merged.get("architectures"),
         merged.get("architectures") in (None, ["DFlashDraftModel"]), "only DFlashDraftModel is supported"),
        ("hidden_act", merged.get("hidden_act"),
         merged.get("hidden_act", "silu") == "silu", "DFlash drafters use 'silu'"),
        ("attention_bias", merged.get("attention_bias"),
         not merged.get("attention_bias"), "DFlash drafters have no biases"),
        ("rope_type", rope.get("rope_type", rope.get("type")),
         rope.get("rope_type", rope.get("type", "default")) == "default", "the drafter's rotary embedding is the"
         " plain one ('default')"),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", merged.get("partial_rotary_factor")),
         rope.get("partial_rotary_factor", merged.get("partial_rotary_factor")) in (None, 1.0, 1),
         "servers rotate the whole head"),
        ("mrope_section", rope.get("mrope_section"),
         not rope.get("mrope_section"), "the drafter's positions are one-dimensional"),
        ("draft_vocab_size", merged.get("draft_vocab_size"),
         merged.get("draft_vocab_size") in (None, merged["vocab_size"]), "a reduced vocabulary cannot be used"),
        ("sample_from_anchor", merged.get("sample_from_anchor"),
         not merged.get("sample_from_anchor"), "slots of such a drafter predict one token later"),
        ("dflash_config.causal", merged.get("causal"),
         merged.get("causal") is None, "use is_causal"),
        ("use_sliding_window", merged.get("use_sliding_window"),
         not sliding or merged.get("use_sliding_window") is True, "layer_types has sliding layers, and transformers"
         " drops their window unless it is true"),
    ]  # fmt: skip
    for key, value, allowed, why in rules:
        if not allowed:
            raise UserError(f"{origin}: {key} is {value!r}; {why}")
