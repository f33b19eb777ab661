"""Drafters on disk: the layout servers read, exact round trips, and refusals that name the fault."""

import json
from pathlib import Path

import dflash.model as reference
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_model import UserError, default_target_layer_ids, load_drafter, save_drafter
from dflash_model.config import FULL, SLIDING
from dflash_model.layout import from_published, to_published
from support.tiny import tiny_config, tiny_drafter


def test_round_trip_is_exact_and_z_lab_loads_it(tmp_path: Path) -> None:
    config = tiny_config((SLIDING, FULL))
    drafter = tiny_drafter(config, torch.bfloat16)
    save_drafter(drafter.state_dict(), config, tmp_path / "dflash")
    again = load_drafter(tmp_path / "dflash")
    assert again.config == config
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))
    assert len(load_file(tmp_path / "dflash" / "model.safetensors")) == 3 + 11 * 2
    theirs = reference.DFlashDraftModel.from_pretrained(tmp_path / "dflash", dtype=torch.bfloat16)
    assert theirs.target_layer_ids == [0, 2, 4]
    assert (theirs.block_size, theirs.mask_token_id) == (8, 130)
    assert theirs.layers[0].self_attn.sliding_window == 12
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[name]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dflash_config": {"mask_token_id": 130, "block_size": 8}}, "has no target_layer_ids"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_size": 32}, "has shape"),
        ({"num_hidden_layers": 3, "layer_types": [FULL] * 3}, r"has no tensor layers\.2"),
    ],
)
def test_wrong_configs_are_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    config = tiny_config()
    save_drafter(tiny_drafter(config).state_dict(), config, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        load_drafter(tmp_path)


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    config = tiny_config()
    save_drafter(tiny_drafter(config).state_dict(), config, tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "lm_head.weight": torch.zeros(1)}, path)
    with pytest.raises(UserError, match=r"unknown tensor lm_head\.weight"):
        load_drafter(tmp_path)


def test_default_taps_are_the_published_ones() -> None:
    published = {28: (1, 7, 13, 19, 25), 32: (1, 8, 15, 22, 29), 36: (1, 9, 17, 25, 33), 40: (1, 10, 19, 28, 37)}
    published |= {48: (1, 12, 23, 34, 45), 64: (1, 16, 31, 46, 61)}
    for layers, taps in published.items():
        assert default_target_layer_ids(layers, 5) == taps == tuple(reference.build_target_layer_ids(layers, 5))


def test_config_survives_its_own_json() -> None:
    config = tiny_config((SLIDING, FULL), is_causal=False)
    assert from_published(json.loads(json.dumps(to_published(config))), "here") == config
