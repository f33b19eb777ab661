"""The published ``config.json`` of a drafter, to and from ``DrafterConfig``.

z-lab's reference package, SGLang and vLLM read this layout; where they look for a key in different places, it is
written in all of them. What a configuration says and these readers would ignore or change is refused when reading:
a drafter that trains or drafts here must do the same there.

Source: z-lab dflash 0.1.0 ``model.py``; SGLang ``srt/speculative/dflash_utils.py``; vLLM ``models/qwen3_dflash.py``.
"""

import math
from dataclasses import asdict, fields
from typing import Any

from dflash_model.config import FULL, SLIDING, DFlash2Config, DrafterConfig
from dflash_model.errors import UserError

QWEN3_POSITIONS = 32768  # transformers' default for max_position_embeddings
ARCHITECTURES = {"dflash": ["DFlashDraftModel"], "dflash2": ["DFlash2DraftModel"]}
DFLASH2_KEYS = tuple(field.name for field in fields(DFlash2Config))
WHOLE, NUMBER, FLAG, TEXT, LISTS = "a whole number", "a finite number above 0", "true or false", "a text", "a list"
KINDS = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "vocab_size", "num_target_layers", "block_size", "mask_token_id",
                     "head_dim", "sliding_window", "max_window_layers", "max_position_embeddings",
                     *DFLASH2_KEYS), WHOLE),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "input_embedding_scale", "output_multiplier", "logit_scale",
                     "final_logit_softcapping"), NUMBER),
    **dict.fromkeys(("is_causal", "use_sliding_window"), FLAG),
    "hidden_act": TEXT,
    **dict.fromkeys(("layer_types", "target_layer_ids"), LISTS),
}  # fmt: skip
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "vocab_size", "num_target_layers", "target_layer_ids", "mask_token_id", "block_size")  # fmt: skip
# What z-lab's package looks up in dflash_config first, then at the top level; everything else only at the top level.
DRAFT_KEYS = ("target_layer_ids", "mask_token_id", "block_size", "input_embedding_scale", "output_multiplier",
              "final_logit_softcapping", *DFLASH2_KEYS)  # fmt: skip
# Settings that some reader applies and this package does not, with the only value that changes nothing.
NEUTRAL: dict[str, object] = {
    "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0, "mrope_section": None,
    "sample_from_anchor": False, "causal": None, "use_swa": None, "swa_window_size": None, "is_neox_style": True,
    "attention_sink_bias": False, "eagle_aux_hidden_state_layer_ids": None, "hidden_act": "silu",
    "model_type": "qwen3",
}  # fmt: skip


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
        "architectures": ARCHITECTURES[config.kind],
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
            **(asdict(config.dflash2) if config.dflash2 else {}),  # vLLM and SGLang look nowhere else for these
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
        UserError: a key that must not be guessed (taps, mask id, sizes) is missing, a value is of the wrong kind, or it
            describes a drafter that the servers could not run or would run differently.
    """
    if "speculators_model_type" in raw or "transformer_layer_config" in raw:
        raise UserError(
            f"{origin} is in the speculators layout; only z-lab's is read (its tap ids are one smaller, its layer"
            " settings stand at the top level)"
        )
    inner = _section(raw.get("dflash_config"), origin)
    rope = {**_section(raw.get("rope_parameters"), origin), **_section(raw.get("rope_scaling"), origin)}
    merged = {**raw, **{key: inner[key] for key in DRAFT_KEYS if key in inner}}
    merged["rope_theta"] = rope.get("rope_theta", raw.get("rope_theta"))
    if merged.get("final_logit_softcapping") == 0:
        merged["final_logit_softcapping"] = None  # z-lab takes 0 as none
    _check_kinds(merged, origin)
    _check_same_everywhere({**raw, **inner, **rope}, merged, origin)
    layers, dflash2 = merged["num_hidden_layers"], _dflash2(merged, origin)
    try:
        return DrafterConfig(
            hidden_size=merged["hidden_size"],
            intermediate_size=merged["intermediate_size"],
            num_layers=layers,
            num_heads=merged["num_attention_heads"],
            num_kv_heads=merged["num_key_value_heads"],
            head_dim=merged.get("head_dim") or merged["hidden_size"] // max(merged["num_attention_heads"], 1),
            vocab_size=merged["vocab_size"],
            num_target_layers=merged["num_target_layers"],
            target_layer_ids=tuple(merged["target_layer_ids"]),
            block_size=merged["block_size"],
            mask_token_id=merged["mask_token_id"],
            layer_types=tuple(merged.get("layer_types") or (FULL,) * layers),
            sliding_window=merged.get("sliding_window") if SLIDING in (merged.get("layer_types") or ()) else None,
            is_causal=merged.get("is_causal"),
            rope_theta=float(merged["rope_theta"]),
            rms_norm_eps=float(merged.get("rms_norm_eps") or 1e-6),
            max_position_embeddings=merged.get("max_position_embeddings") or QWEN3_POSITIONS,
            input_embedding_scale=float(merged.get("input_embedding_scale") or 1.0),
            output_multiplier=float(merged.get("output_multiplier") or 1.0),
            final_logit_softcapping=merged.get("final_logit_softcapping"),
            dflash2=dflash2,
        )
    except UserError as error:  # the same rules as for drafter.* settings, under the file's name
        raise UserError(f"{origin}: {error}") from error


def _section(value: object, origin: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{origin}: a section is {value!r}; it must be an object")
    return value or {}


def _dflash2(merged: dict[str, Any], origin: str) -> DFlash2Config | None:
    """Readers choose the model by its architecture; where none is named, these keys make it a DFlash2 drafter."""
    stated = {key: merged[key] for key in DFLASH2_KEYS if merged.get(key) is not None}
    named = merged.get("architectures")
    if named not in (None, *ARCHITECTURES.values()):
        raise UserError(
            f"{origin}: architectures is {named!r}; drafters with it are not supported (only"
            f" {' or '.join(map(str, ARCHITECTURES.values()))})"
        )
    if named == ARCHITECTURES["dflash"] and stated:
        raise UserError(
            f"{origin}: architectures is {named!r}, and there is {', '.join(stated)}, which belongs to"
            f" {ARCHITECTURES['dflash2']}: readers would leave a part of the drafter out"
        )
    if not stated and named != ARCHITECTURES["dflash2"]:
        return None
    missing = [key for key in DFLASH2_KEYS if key not in stated]
    if missing:
        raise UserError(f"{origin} has no {', '.join(missing)}; a DFlash2 drafter's config must state it")
    return DFlash2Config(**stated)


def _check_kinds(merged: dict[str, Any], origin: str) -> None:
    """Presence and type of what is read; null counts as absent."""
    missing = [key for key in NEEDED if merged.get(key) is None]
    if missing:
        raise UserError(f"{origin} has no {', '.join(missing)}; a DFlash drafter's config must state it")
    if merged["rope_theta"] is None:
        raise UserError(f"{origin} has no rope_theta (neither top-level nor in rope_parameters)")
    for key, kind in KINDS.items():
        value = merged.get(key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        right = {
            WHOLE: type(value) is int,
            NUMBER: number and math.isfinite(value) and value > 0,  # type: ignore[arg-type, operator]
            FLAG: isinstance(value, bool),
            TEXT: isinstance(value, str),
            LISTS: isinstance(value, list) and all(isinstance(item, (str, int)) for item in value),
        }
        if value is not None and not right[kind]:
            raise UserError(f"{origin}: {key} is {value!r}; it must be {kind}")
    if not all(type(layer) is int for layer in merged["target_layer_ids"]):
        raise UserError(f"{origin}: target_layer_ids is {merged['target_layer_ids']}; it takes layer numbers")


def _check_same_everywhere(everything: dict[str, Any], merged: dict[str, Any], origin: str) -> None:
    """Refuse settings under which this package and some reader of the layout would run different drafters."""
    for key, neutral in NEUTRAL.items():
        value = everything.get(key)
        if value not in (None, neutral):
            raise UserError(f"{origin}: {key} is {value!r}; drafters with it are not supported (only {neutral!r})")
    for key in ("rope_type", "type"):  # the second in old files' rope_scaling
        if everything.get(key) not in (None, "default"):
            raise UserError(f"{origin}: {key} is {everything[key]!r}; the drafter's rotary embedding is the plain one")
    if everything.get("draft_vocab_size") not in (None, merged["vocab_size"]):
        raise UserError(
            f"{origin}: draft_vocab_size is {everything['draft_vocab_size']}; a reduced vocabulary cannot be used"
        )
    if everything.get("logit_scale") not in (None, merged.get("output_multiplier")):
        raise UserError(
            f"{origin}: logit_scale is {everything['logit_scale']}, output_multiplier"
            f" {merged.get('output_multiplier')}; vLLM reads the one, z-lab's package and SGLang the other: they must"
            " agree"
        )
    switched = merged.get("use_sliding_window") is True
    if SLIDING in (merged.get("layer_types") or ()) and not switched:
        raise UserError(
            f"{origin}: use_sliding_window is {merged.get('use_sliding_window')}; layer_types has sliding layers, and"
            " transformers drops their window unless it is true"
        )
    if switched and not merged.get("layer_types"):
        raise UserError(f"{origin}: use_sliding_window is true without layer_types; it must say which layers slide")
