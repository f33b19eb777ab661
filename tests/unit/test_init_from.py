"""Training starts from a published drafter, or says why it cannot."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, Qwen3Config

from dflash_data.target import TargetModel
from dflash_model import DFlash2Config, Drafter, DraftInputs, UserError, load_drafter, save_drafter
from dflash_model.config import FULL, SLIDING
from dflash_model.layout import to_published
from dflash_train.config import DrafterSection
from dflash_train.drafter_config import drafter_config
from dflash_train.start import initial_tensors
from support.tiny import DENSE, tiny_config, tiny_drafter

DFLASH2 = DFlash2Config(conv_kernel_size=3, conv_group_size=8, selector_rank=10, selector_top_k=5)


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
    ("section", "message"),
    [
        ({"kind": "dflash"}, r"drafter\.kind is dflash; drafter\.init_from .* has dflash2: leave the key out"),
        ({"selector_rank": 256}, r"drafter\.selector_rank is 256; drafter\.init_from .* has 10"),
        ({"kind": "dflash2", "conv_kernel_size": 2}, r"drafter\.conv_kernel_size is 2; .* has 3"),
    ],
)
def test_a_dflash2_drafter_stays_what_it_is(section: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, dflash2=DFLASH2)
    assert drafter_config(DrafterSection(init_from=folder), target(), None).dflash2 == DFLASH2
    agreeing = DrafterSection(init_from=folder, kind="dflash2", conv_kernel_size=3, selector_top_k=5)
    assert drafter_config(agreeing, target(), None).dflash2 == DFLASH2
    with pytest.raises(UserError, match=message):
        drafter_config(DrafterSection(init_from=folder, **section), target(), None)


def test_a_dflash_drafter_becomes_a_dflash2_one(tmp_path: Path) -> None:
    """It keeps its layers, taps and who sees whom; what is new has the sizes of the settings and changes nothing."""
    folder = saved(tmp_path)
    assert drafter_config(DrafterSection(init_from=folder), target(), None).dflash2 is None
    section = DrafterSection(init_from=folder, kind="dflash2", selector_rank=10)
    config = drafter_config(section, target(), None)
    assert config.dflash2 == DFlash2Config(selector_rank=10)
    assert replace(config, dflash2=None) == drafter_config(DrafterSection(init_from=folder), target(), None)
    tensors = dict(initial_tensors(section, target(), config, seed=0))
    mine, theirs = Drafter(config), load_drafter(folder, dtype=torch.float32)
    mine.load_state_dict(tensors)
    generator = torch.Generator().manual_seed(0)
    inputs = DraftInputs(
        torch.randn(1, 8, 64, generator=generator), torch.randn(1, 5, config.context_size, generator=generator),
        torch.arange(5)[None], torch.arange(5, 9).repeat(2)[None], {},
    )  # fmt: skip
    with torch.no_grad():
        assert torch.equal(mine(inputs), theirs(inputs))
    assert not tensors["candidate_selector.successor_codebook"].any()
    assert tensors["candidate_selector.predecessor_codebook"].any()


def test_new_dflash2_drafters_are_laid_out_like_published_ones() -> None:
    """Sliding layers see their whole block, which servers are told."""
    section = DrafterSection(
        kind="dflash2", mask_token_id=5, num_layers=2, target_layer_ids=[1, 2], num_sliding_layers=2, sliding_window=40
    )
    config = drafter_config(section, target(), None)
    assert asdict(config)["dflash2"] == {
        "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
    }  # fmt: skip
    assert not config.causal_in_block(SLIDING)
    assert to_published(config)["is_causal"] is False


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"kind": "dspark"}, r"drafter\.kind is 'dspark'; it takes dflash or dflash2"),
        ({"conv_group_size": 8}, r"drafter\.conv_group_size is 8; only a drafter of drafter\.kind=dflash2 has it"),
        ({"kind": "dflash", "selector_rank": 8}, r"drafter\.selector_rank is 8; only a drafter of"),
        ({"kind": "dflash2", "conv_group_size": 7}, r"drafter\.conv_group_size is 7; it must divide .* \(64\)"),
    ],
)
@pytest.mark.parametrize("started", [False, True])
def test_wrong_kinds_and_sizes_are_refused(
    started: bool, section: dict[str, Any], message: str, tmp_path: Path
) -> None:
    begin: dict[str, Any] = {"init_from": saved(tmp_path)} if started else {"mask_token_id": 5, "target_layer_ids": [1]}
    with pytest.raises(UserError, match=message):
        drafter_config(DrafterSection(**begin, **section), target(), None)


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
