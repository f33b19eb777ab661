"""Drafters on disk: the layout servers read, exact round trips, and refusals that name the fault."""

import json
from pathlib import Path

import dflash.model as reference
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_model import DFlash2Config, UserError, default_target_layer_ids, load_drafter, save_drafter
from dflash_model.config import FULL, SLIDING
from dflash_model.hub import expected_shapes
from dflash_model.layout import from_published, to_published
from support.tiny import DFLASH2, tiny_config, tiny_drafter


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


ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dflash_config": {"mask_token_id": 130, "block_size": 8}}, "has no target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [0, 2, 4], "block_size": 8}}, "has no mask_token_id"),
        ({"dflash_config": {"target_layer_ids": 3, "mask_token_id": 130}}, "target_layer_ids is 3; it must be a list"),
        ({"dflash_config": {"target_layer_ids": [0, 6], "mask_token_id": 1}}, r"target_layer_ids is \[0, 6\]; it"),
        ({"num_target_layers": None}, "has no num_target_layers"),
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be a whole number"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_size": 32}, "has shape"),
        ({"num_hidden_layers": 3, "layer_types": [FULL] * 3}, r"has no tensor layers\.2"),
        ({"architectures": ["Qwen3ForCausalLM"]}, r"architectures is \['Qwen3ForCausalLM'\]; drafters with it"),
        ({"architectures": ["DFlash2DraftModel"]}, "has no conv_kernel_size, conv_group_size, selector_rank"),
        ({"architectures": None, "selector_rank": 8}, "has no conv_kernel_size, conv_group_size, selector_top_k; a"),
        ({"selector_rank": 8}, "and there is selector_rank, which belongs to"),
        ({"attention_bias": True}, "attention_bias is True; drafters with it"),
        ({"rope_parameters": {**ROPE, "rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        ({"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}, "mrope_section is"),
        ({"draft_vocab_size": 64}, "draft_vocab_size is 64; a reduced vocabulary"),
        ({"dflash_config": {"target_layer_ids": [0, 2, 4], "mask_token_id": 1, "sample_from_anchor": True}},
         "sample_from_anchor is True"),
        ({"layer_types": [SLIDING, FULL], "sliding_window": 12}, "use_sliding_window is False"),
        ({"speculators_model_type": "dflash"}, "is in the speculators layout"),
        ({"layer_types": None, "use_sliding_window": True, "sliding_window": 12}, "is true without layer_types"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type is 'linear'"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, r"eagle_aux_hidden_state_layer_ids is \[1, 3\]"),
        ({"logit_scale": 0.25}, "logit_scale is 0.25, output_multiplier None; vLLM reads"),
        ({"is_neox_style": False}, "is_neox_style is False"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"is_causal": "false"}, "is_causal is 'false'; it must be true or false"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta is nan; it must be a finite number above 0"),
        ({"rope_parameters": [1]}, r"a section is \[1\]"),
        ({"dflash_config": "x"}, "a section is 'x'"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
        ({"head_dim": 24.0}, "head_dim is 24.0; it must be a whole number"),
        ({"output_multiplier": 0}, "output_multiplier is 0; it must be a finite number above 0"),
        ({"layer_types": 3}, "layer_types is 3; it must be a list"),
        ({"num_attention_heads": 0, "head_dim": None}, r"num_heads is 0; it must be at least 1"),
        ({"dflash_config": {"target_layer_ids": [0, 2, 4], "mask_token_id": 1, "swa_window_size": 9}},
         "swa_window_size is 9"),
    ],
)  # fmt: skip
def test_configs_that_servers_would_read_otherwise_are_refused(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    config = tiny_config()
    save_drafter(tiny_drafter(config).state_dict(), config, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message) as caught:
        load_drafter(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selector_rank": None}, "has no selector_rank; a DFlash2 drafter's config must state it"),
        ({"selector_top_k": "16"}, "selector_top_k is '16'; it must be a whole number"),
        ({"conv_group_size": 24}, r"drafter\.conv_group_size is 24; it must divide the drafter's width \(64\)"),
        ({"conv_kernel_size": 2}, r"attention_conv\.base_kernel has shape"),
    ],
)
def test_dflash2_configs_say_all_of_it(change: dict[str, object], message: str, tmp_path: Path) -> None:
    config = tiny_config(dflash2=DFLASH2)
    save_drafter(tiny_drafter(config).state_dict(), config, tmp_path)
    written = to_published(config)
    written["dflash_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(UserError, match=message) as caught:
        load_drafter(tmp_path)
    assert str(caught.value).count(str(tmp_path)) == 1


def test_the_published_dflash2_config_is_read() -> None:
    """Keys and values as they stand on the hub: sizes of the block in dflash_config alone, all layers sliding."""
    published = {
        "architectures": ["DFlash2DraftModel"], "attention_bias": False, "attention_dropout": 0.0, "is_causal": False,
        "dflash_config": {
            "block_size": 8, "conv_group_size": 16, "conv_kernel_size": 2, "mask_token_id": 248070,
            "selector_rank": 256, "selector_top_k": 16, "target_layer_ids": [5, 19, 33, 47, 61],
        },
        "dtype": "bfloat16", "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 17408,
        "layer_types": ["sliding_attention"] * 5, "max_position_embeddings": 262144, "max_window_layers": 5,
        "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 5, "num_key_value_heads": 8,
        "num_target_layers": 64, "rms_norm_eps": 1e-6, "sliding_window": 2048, "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}, "use_sliding_window": True,
        "vocab_size": 248320,
    }  # fmt: skip
    config = from_published(published, "here")
    assert config.dflash2 == DFlash2Config(conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16)
    assert not config.causal_in_block(SLIDING)
    assert sum(shape.numel() for shape in expected_shapes(config).values()) == pytest.approx(1.924e9, rel=1e-3)
    written = to_published(config)
    assert {name: written[name] for name in published if name != "dflash_config"} == {
        name: value for name, value in published.items() if name != "dflash_config"
    }
    assert written["dflash_config"] == published["dflash_config"]


def test_dflash2_survives_the_disk_and_z_lab_loads_it(tmp_path: Path) -> None:
    """The codebooks have no ``.weight`` in files, whatever module holds them."""
    config = tiny_config((SLIDING, FULL), is_causal=False, dflash2=DFLASH2)
    drafter = tiny_drafter(config, torch.bfloat16)
    save_drafter(drafter.state_dict(), config, tmp_path / "dflash")
    again = load_drafter(tmp_path / "dflash")
    assert again.config == config
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))
    added = load_file(tmp_path / "dflash" / "model.safetensors").keys() - expected_shapes(tiny_config()).keys()
    selector = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    convolutions = [f"layers.{i}.{part}_conv" for i in (0, 1) for part in ("attention", "mlp")]
    names = {f"{name}.{part}" for name in convolutions for part in ("base_kernel", "kernel_projection.weight")}
    assert added == names | {f"candidate_selector.{name}" for name in selector}
    theirs = reference.DFlash2DraftModel.from_pretrained(tmp_path / "dflash", dtype=torch.bfloat16)
    assert (theirs.candidate_selector.top_k, theirs.layers[1].mlp_conv.kernel_size) == (6, 3)
    for name, tensor in theirs.state_dict().items():
        mine = drafter.state_dict()[name.removesuffix(".weight") if "_codebook" in name else name]
        assert torch.equal(tensor, mine), name


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[1]", "holds a list"), (None, "there is no")])
def test_broken_configs_are_refused(text: str | None, message: str, tmp_path: Path) -> None:
    config = tiny_config()
    save_drafter(tiny_drafter(config).state_dict(), config, tmp_path)
    (tmp_path / "config.json").unlink() if text is None else (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        load_drafter(tmp_path)


def test_tensors_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    config = tiny_config()
    save_drafter(tiny_drafter(config).state_dict(), config, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "fc.weight": tensors["fc.weight"].to(torch.int8)}, path)
    with pytest.raises(UserError, match=r"fc\.weight is stored as I8; a drafter's tensors are one of BF16"):
        load_drafter(tmp_path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(UserError, match="cannot be read"):
        load_drafter(tmp_path)


def test_sharded_drafters_load(tmp_path: Path) -> None:
    """Two files and an index, as transformers writes large models."""
    config = tiny_config()
    save_drafter(tiny_drafter(config).state_dict(), config, tmp_path)
    whole = load_drafter(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names, index = sorted(tensors), {}
    for number, part in enumerate((names[:9], names[9:])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"model-{number}.safetensors")
        index |= dict.fromkeys(part, f"model-{number}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    again = load_drafter(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"there is no model-1\.safetensors"):
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


def test_only_the_drafters_own_keys_are_taken_from_dflash_config(tmp_path: Path) -> None:
    """As z-lab's package does: a window or a width there changes nothing."""
    written = to_published(tiny_config())
    written["dflash_config"] |= {"layer_types": [SLIDING] * 2, "sliding_window": 9, "hidden_size": 32, "block_size": 4}
    config = from_published(written, "here")
    assert (config.layer_types, config.hidden_size, config.block_size) == ((FULL, FULL), 64, 4)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": None}, {"rope_theta": None}, {"architectures": None}, {"layer_types": None},
        {"rope_scaling": None}, {"max_position_embeddings": None}, {"sliding_window": 4096},
        {"final_logit_softcapping": 0}, {"logit_scale": None}, {"head_dim": None, "hidden_size": 96},
    ],
)  # fmt: skip
def test_what_other_exporters_leave_out_or_write_is_read(change: dict[str, object]) -> None:
    config = from_published({**to_published(tiny_config()), **change}, "here")
    assert config.layer_types == (FULL, FULL)
    assert (config.rope_theta, config.sliding_window, config.final_logit_softcapping) == (10000.0, None, None)


def test_a_new_drafter_replaces_a_sharded_one(tmp_path: Path) -> None:
    """An index that an earlier drafter left would otherwise decide what is loaded."""
    config = tiny_config()
    (tmp_path / "old.safetensors").write_bytes(b"")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "old.safetensors"}}))
    drafter = tiny_drafter(config, torch.bfloat16)
    save_drafter(drafter.state_dict(), config, tmp_path)
    assert torch.equal(load_drafter(tmp_path).fc.weight, drafter.fc.weight)
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    config = tiny_config()
    save_drafter(tiny_drafter(config).state_dict(), config, tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").rename(tmp_path / "model.safetensors")
    names = load_file(tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../model.safetensors")}
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="must be a file of the same folder"):
        load_drafter(tmp_path / "a")


def test_keys_of_capped_and_scaled_targets_are_written_where_servers_look() -> None:
    config = tiny_config(input_embedding_scale=8.0, output_multiplier=0.5, final_logit_softcapping=30.0)
    written = to_published(config)
    for place in (written, written["dflash_config"]):
        assert place["input_embedding_scale"] == 8.0
        assert place["output_multiplier"] == 0.5
        assert place["final_logit_softcapping"] == 30.0
    assert written["logit_scale"] == 0.5
    assert from_published(json.loads(json.dumps(written)), "here") == config
    plain = to_published(tiny_config())
    assert not {"input_embedding_scale", "output_multiplier", "final_logit_softcapping", "logit_scale"} & plain.keys()
