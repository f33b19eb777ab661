"""What SGLang and vLLM understand from an exported folder, by readers written after their loaders.

Source: SGLang ``srt/speculative/dflash_utils.py`` and ``srt/models/dflash.py``; vLLM ``models/qwen3_dflash.py`` and
``v1/worker/gpu/spec_decode/eagle/eagle3_utils.py``, mid-2026. Neither server runs here.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from dflash_model import DrafterConfig, save_drafter
from dflash_model.config import FULL, SLIDING
from support.tiny import DFLASH2, tiny_config, tiny_drafter

LAYOUTS = {"full": (FULL, FULL), "4+1": (SLIDING,) * 4 + (FULL,), "sliding": (SLIDING, SLIDING)}


def sglang_reads(raw: dict[str, Any]) -> dict[str, Any]:
    """Keys of dflash_config first, then the top level; hooks run before a layer, so ids grow by one."""
    inner = raw["dflash_config"]
    block = inner.get("block_size", raw.get("block_size", 16))
    rope = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta", 10000)}
    return {
        "capture_before_layer": [i + 1 for i in inner.get("target_layer_ids", raw.get("target_layer_ids"))],
        "mask": inner["mask_token_id"],
        "block": block,
        "draft_tokens": block,
        "causal": [kind == SLIDING for kind in raw["layer_types"]],
        "window_left": [raw["sliding_window"] - 1 if kind == SLIDING else None for kind in raw["layer_types"]],
        "theta": rope["rope_theta"],
        "rotary_dim": raw["head_dim"],
        "softcap": raw.get("final_logit_softcapping"),
    }


def vllm_reads(raw: dict[str, Any]) -> dict[str, Any]:
    """Through transformers' own Qwen3Config, which drops a window that is not switched on; block from the launch."""
    config = AutoConfig.for_model(**{**raw, "model_type": "qwen3"})
    inner = config.dflash_config
    assert not hasattr(config, "eagle_aux_hidden_state_layer_ids")  # it would win over target_layer_ids, as it is
    window = inner.get("swa_window_size") or config.sliding_window
    return {
        "capture_before_layer": [i + 1 for i in inner["target_layer_ids"]],
        "mask": inner.get("mask_token_id", getattr(config, "mask_token_id", None)),
        "causal": [kind == SLIDING for kind in config.layer_types],
        "window_left": [window - 1 if kind == SLIDING else None for kind in config.layer_types],
        "theta": config.rope_parameters["rope_theta"],
        "rotary_dim": int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)),
        "vocabulary": getattr(config, "draft_vocab_size", None) or config.vocab_size,
        "softcap": getattr(config, "final_logit_softcapping", None),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cap", [None, 30.0])
def test_both_servers_read_the_same_drafter(layout: str, cap: float | None, tmp_path: Path) -> None:
    config = tiny_config(LAYOUTS[layout], target_layer_ids=(1, 4), final_logit_softcapping=cap, rope_theta=1e7)
    save_drafter(tiny_drafter(config).state_dict(), config, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    expected = expectation(config)
    sglang, vllm = sglang_reads(raw), vllm_reads(raw)
    assert {name: sglang[name] for name in expected} == expected
    assert {name: vllm[name] for name in expected} == expected
    assert (sglang["block"], sglang["draft_tokens"], vllm["vocabulary"]) == (8, 8, 131)


def expectation(config: DrafterConfig) -> dict[str, Any]:
    return {
        "capture_before_layer": [2, 5],
        "mask": 130,
        "causal": [config.causal_in_block(kind) for kind in config.layer_types],
        "window_left": [11 if kind == SLIDING else None for kind in config.layer_types],
        "theta": 1e7,
        "rotary_dim": 24,
        "softcap": config.final_logit_softcapping,
    }


def test_servers_find_what_dflash2_adds(tmp_path: Path) -> None:
    """Both choose the model by its architecture, and look for sizes in dflash_config alone.

    Source: vLLM ``models/qwen3_dflash2.py``, SGLang ``srt/models/dflash.py``: the codebooks are parameters, not layers.
    """
    config = tiny_config((SLIDING, SLIDING), is_causal=False, dflash2=DFLASH2, final_logit_softcapping=30.0)
    save_drafter(tiny_drafter(config).state_dict(), config, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert (raw["architectures"], raw["is_causal"]) == (["DFlash2DraftModel"], False)
    inner = raw["dflash_config"]
    sizes = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "final_logit_softcapping")
    assert [inner[name] for name in sizes] == [3, 4, 20, 6, 30.0]
    shapes = {name: list(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    for layer in range(2):
        for part in ("attention_conv", "mlp_conv"):
            assert shapes.pop(f"layers.{layer}.{part}.base_kernel") == [2, 3, 64]
            assert shapes.pop(f"layers.{layer}.{part}.kernel_projection.weight") == [2 * 3 * 64 // 4, 64]
    assert shapes.pop("candidate_selector.predecessor_codebook") == [131, 20]
    assert shapes.pop("candidate_selector.successor_codebook") == [131, 20]
    assert shapes.pop("candidate_selector.hidden_projection.weight") == [20, 64]
    assert len(shapes) == 3 + 11 * 2


def test_tensor_names_are_those_of_the_loaders(tmp_path: Path) -> None:
    """VLLM's strict loader fails on any other name; SGLang would not notice a missing one."""
    config = tiny_config()
    save_drafter(tiny_drafter(config).state_dict(), config, tmp_path)
    layer = [
        "input_layernorm", "post_attention_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj",
        "self_attn.k_norm", "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.q_proj",
        "self_attn.v_proj",
    ]  # fmt: skip
    names = ["fc", "hidden_norm", "norm", *(f"layers.{index}.{name}" for index in range(2) for name in layer)]
    tensors = load_file(tmp_path / "model.safetensors")
    assert sorted(tensors) == sorted(f"{name}.weight" for name in names)
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.bfloat16"}
    assert tensors["fc.weight"].shape == (64, 3 * 64)
