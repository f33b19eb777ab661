"""Which drafter a job trains: what its settings say, or the one it starts from; the rest follows the target."""

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from dflash_data.ends import end_rules, resolve_mask_token_id
from dflash_data.target import TargetModel
from dflash_model import DFlash2Config, DrafterConfig, UserError, check_drafter, default_target_layer_ids
from dflash_model.config import FULL, SLIDING
from dflash_model.layout import DFLASH2_KEYS
from dflash_train.config import DrafterSection

NUM_LAYERS, BLOCK_SIZE = 5, 16  # the published layout
T = TypeVar("T")


def drafter_config(section: DrafterSection, target: TargetModel, tokenizer: str | None) -> DrafterConfig:
    """The drafter that a section describes for a target.

    Raises:
        UserError: it does not fit the target.
    """
    if section.init_from is not None:
        return _initial_drafter(section, section.init_from, target)
    goal = target.config
    if section.hidden_size not in (None, goal.hidden_size):
        raise UserError(
            f"drafter.hidden_size is {section.hidden_size}; the target's embedding and head have width"
            f" {goal.hidden_size}, and the drafter uses them, so it must be {goal.hidden_size}"
        )
    num_layers = NUM_LAYERS if section.num_layers is None else section.num_layers
    sliding = section.num_sliding_layers or 0
    if not 0 <= sliding <= num_layers:
        raise UserError(f"drafter.num_sliding_layers is {sliding}; it takes 0 to drafter.num_layers ({num_layers})")
    if not sliding and section.sliding_window is not None:
        raise UserError(
            f"drafter.sliding_window is {section.sliding_window}; without drafter.num_sliding_layers no layer has one"
        )
    num_taps = _or(section.num_taps, num_layers)
    if num_taps < 1:
        raise UserError(f"drafter.num_taps is {num_taps}; it must be at least 1")
    rule = list(default_target_layer_ids(goal.num_hidden_layers, num_taps))
    if section.target_layer_ids is None and len(set(rule)) < num_taps:
        raise UserError(
            f"drafter.num_taps is {num_taps}; the target's {goal.num_hidden_layers} layers are too few for so many"
        )
    taps = _or(section.target_layer_ids, rule)
    own_head_dim = getattr(goal, "head_dim", None) or goal.hidden_size // goal.num_attention_heads
    added = _added_parts(section)
    tokenizer_folder = Path(tokenizer).expanduser() if tokenizer else target.folder
    return DrafterConfig(
        hidden_size=goal.hidden_size,
        intermediate_size=_intermediate_size(section, target),
        num_layers=num_layers,
        num_heads=_or(section.num_heads, goal.num_attention_heads),
        num_kv_heads=_or(section.num_kv_heads, goal.num_key_value_heads),
        head_dim=_or(section.head_dim, own_head_dim),
        vocab_size=goal.vocab_size,
        num_target_layers=goal.num_hidden_layers,
        target_layer_ids=tuple(taps),
        block_size=BLOCK_SIZE if section.block_size is None else section.block_size,
        mask_token_id=resolve_mask_token_id(
            section.mask_token_id, target, tokenizer_folder / "tokenizer.json" if tokenizer_folder else None
        ),
        layer_types=(SLIDING,) * sliding + (FULL,) * (num_layers - sliding),
        sliding_window=section.sliding_window if sliding else None,
        is_causal=None if added is None else False,  # published DFlash2 drafters see the whole block in all layers
        rope_theta=_rope_theta(target) if section.rope_theta is None else section.rope_theta,
        max_position_embeddings=goal.max_position_embeddings,
        dflash2=added,
        **end_rules(target),
    )


def _or(stated: T | None, default: T) -> T:
    """What a setting says; 0 and an empty list say something too."""
    return default if stated is None else stated


def _added_parts(section: DrafterSection) -> DFlash2Config | None:
    """What DFlash2 adds to a new drafter, or to a DFlash drafter that training starts from."""
    if section.kind not in (None, "dflash", "dflash2"):
        raise UserError(f"drafter.kind is {section.kind!r}; it takes dflash or dflash2")
    stated = {name: getattr(section, name) for name in DFLASH2_KEYS if getattr(section, name) is not None}
    if section.kind == "dflash2":
        return DFlash2Config(**stated)
    for name, value in stated.items():
        raise UserError(f"drafter.{name} is {value}; only a drafter of drafter.kind=dflash2 has it")
    return None


def _intermediate_size(section: DrafterSection, target: TargetModel) -> int:
    size = _or(section.intermediate_size, getattr(target.config, "intermediate_size", None))
    if size is None:
        raise UserError("drafter.intermediate_size is not set and the target (mixture of experts) has none; set it")
    return size


def _rope_theta(target: TargetModel) -> float:
    """The target's rotary base; of targets with one per layer type, that of the full-attention layers."""
    rope = getattr(target.config, "rope_parameters", None) or {}
    theta = rope.get(FULL, rope).get("rope_theta") or getattr(target.config, "rope_theta", None)
    if theta is None:
        raise UserError("drafter.rope_theta is not set and the target's config has none; set it")
    return float(theta)


def _initial_drafter(section: DrafterSection, folder: str, target: TargetModel) -> DrafterConfig:
    """The drafter that training starts from; no other setting may contradict it.

    Raises:
        UserError: there is none, it was made for another target, or a drafter.* setting says something else.
    """
    drafter = check_drafter(Path(folder).expanduser())
    drafter.check_fits(target.config, f"drafter.init_from ({folder})", "the target")
    for name, value in end_rules(target).items():
        if getattr(drafter, name) != value:
            raise UserError(
                f"drafter.init_from ({folder}) has {name} {getattr(drafter, name)}, the target has {value}; if the"
                f" drafter was trained with the target's, write {name} into its config.json"
            )
    if drafter.dflash2 is None:
        drafter = replace(drafter, dflash2=_added_parts(section))
    stated: dict[str, Any] = {
        name: getattr(section, name)
        for name in ("kind", "num_layers", "block_size", "mask_token_id", "intermediate_size", "num_heads",
                     "num_kv_heads", "head_dim", "rope_theta", "sliding_window", "hidden_size")
    }  # fmt: skip
    found = {name: getattr(drafter, name) for name in stated}
    stated |= {name: getattr(section, name) for name in DFLASH2_KEYS}
    found |= {name: getattr(drafter.dflash2, name) for name in DFLASH2_KEYS if drafter.dflash2}
    stated["num_sliding_layers"] = section.num_sliding_layers
    found["num_sliding_layers"] = drafter.layer_types.count(SLIDING)
    stated["num_taps"], found["num_taps"] = section.num_taps, len(drafter.target_layer_ids)
    stated["target_layer_ids"], found["target_layer_ids"] = section.target_layer_ids, list(drafter.target_layer_ids)
    for name, value in stated.items():
        if value is not None and value != found[name]:
            raise UserError(
                f"drafter.{name} is {value}; drafter.init_from ({folder}) has {found[name]}: leave the key out, or"
                " start from another drafter"
            )
    return drafter
