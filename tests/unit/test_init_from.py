"""Training starts from a published drafter, or says why it cannot."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, Qwen3Config

from dflash_data.target import TargetModel
from dflash_model import UserError, save_drafter
from dflash_model.config import FULL, SLIDING
from dflash_model.layout import to_published
from dflash_train.config import DrafterSection
from dflash_train.drafter_config import drafter_config
from support.tiny import DENSE, tiny_config, tiny_drafter


def saved(folder: Path, **changes: Any) -> str:
    config = tiny_config((SLIDING, SLIDING, FULL), block_size=4, target_layer_ids=(0, 1, 2, 4), **changes)
    save_drafter(tiny_drafter(config).state_dict(), config, folder)
    return str(folder)


def target(**changes: Any) -> TargetModel:
    return TargetModel(Qwen3Config(**{**DENSE, **changes}), None, "tiny")


def test_its_own_shape_holds(tmp_path: Path) -> None:
    """Layers, taps, window and block of the file, none of the settings' defaults."""
    config = drafter_config(DrafterSection(init_from=saved(tmp_path)), target(), None)
    assert (config.num_layers, config.block_size, config.target_layer_ids) == (3, 4, (0, 1, 2, 4))
    assert (config.layer_types, config.sliding_window) == ((SLIDING, SLIDING, FULL), 12)
    agreeing = DrafterSection(init_from=str(tmp_path), num_layers=3, block_size=4, num_sliding_layers=2, num_taps=4)
    assert drafter_config(agreeing, target(), None) == config


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"block_size": 8}, r"drafter\.block_size is 8; drafter\.init_from .* has 4"),
        ({"num_layers": 5}, r"drafter\.num_layers is 5; drafter\.init_from .* has 3"),
        ({"target_layer_ids": [1, 2]}, r"drafter\.target_layer_ids is \[1, 2\]; .* has \[0, 1, 2, 4\]"),
        ({"num_sliding_layers": 0}, r"drafter\.num_sliding_layers is 0; .* has 2"),
        ({"mask_token_id": 5}, r"drafter\.mask_token_id is 5; .* has 130"),
    ],
)
def test_settings_that_contradict_it_are_refused(section: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        drafter_config(DrafterSection(init_from=saved(tmp_path), **section), target(), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 7}, "has num_target_layers 6, the target has 7"),
        ({"hidden_size": 128}, "has hidden_size 64, the target has 128"),
        ({"vocab_size": 140}, "has vocab_size 131, the target has 140"),
    ],
)
def test_a_drafter_for_another_target_is_refused(changes: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        drafter_config(DrafterSection(init_from=saved(tmp_path)), target(**changes), None)


def test_a_capped_target_wants_its_cap_in_the_file(tmp_path: Path) -> None:
    goal = TargetModel(Gemma3TextConfig(**DENSE, final_logit_softcapping=25.0), None, "gemma")
    with pytest.raises(UserError, match=r"has input_embedding_scale 1\.0, the target has 8\.0; if the drafter was"):
        drafter_config(DrafterSection(init_from=saved(tmp_path / "a")), goal, None)
    fitting = saved(tmp_path / "b", input_embedding_scale=8.0, final_logit_softcapping=25.0)
    assert drafter_config(DrafterSection(init_from=fitting), goal, None).final_logit_softcapping == 25.0


def test_a_new_drafter_takes_the_targets_ends_and_rotary_base() -> None:
    """Gemma states one rotary base for each layer type: the drafter takes that of the full layers."""
    goal = TargetModel(Gemma3TextConfig(**DENSE, final_logit_softcapping=25.0), None, "gemma")
    config = drafter_config(DrafterSection(mask_token_id=5, target_layer_ids=[1, 2]), goal, None)
    assert (config.input_embedding_scale, config.final_logit_softcapping) == (8.0, 25.0)
    assert config.rope_theta == 1e6
    plain = drafter_config(DrafterSection(mask_token_id=5, target_layer_ids=[1, 2]), target(), None)
    assert (plain.input_embedding_scale, plain.output_multiplier, plain.final_logit_softcapping) == (1.0, 1.0, None)


def test_the_targets_partial_rotary_is_not_inherited() -> None:
    """The drafter rotates whole heads, whatever the target does, and writes it so."""
    goal = target(rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25})
    config = drafter_config(DrafterSection(mask_token_id=5, target_layer_ids=[1, 2]), goal, None)
    assert config.rope_theta == 1e7
    assert to_published(config)["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e7}


@pytest.mark.parametrize("end", [7, [5, 7]])
def test_the_end_token_is_no_mask(end: int | list[int]) -> None:
    with pytest.raises(UserError, match=r"drafter\.mask_token_id is 7, the target's end token"):
        drafter_config(DrafterSection(mask_token_id=7, target_layer_ids=[1]), target(eos_token_id=end), None)
