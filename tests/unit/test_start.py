"""A drafter that starts as the target's last layers computes what these layers compute."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig, OlmoConfig, StableLmConfig

from dflash_data.target import find_target
from dflash_model import Drafter, DraftInputs, UserError
from dflash_model.taps import context_features, decoder_layers, decoder_of
from dflash_train.config import DrafterSection
from dflash_train.drafter_config import drafter_config
from dflash_train.start import BorrowedLayers, initial_tensors
from support.tiny import SIZES, spread, tiny_target


def started(folder: Path, **section: Any) -> Drafter:
    """A drafter as the job makes it."""
    keys = DrafterSection(mask_token_id=130, init_from_target=True, **section)
    target = find_target(str(folder), None)
    config = drafter_config(keys, target, None)
    drafter = Drafter(config)
    drafter.load_state_dict(dict(initial_tensors(keys, target, config, seed=0)))
    return drafter.eval()


def saved(family: str, folder: Path) -> Any:
    """A random target with norms that are not one."""
    target = tiny_target(family)
    with torch.no_grad():
        spread(target)
    target.save_pretrained(folder)
    return target


@torch.no_grad()
def test_one_layer_over_the_layer_below_is_the_targets_last(tmp_path: Path) -> None:
    """The context is what the last layer gets from earlier tokens, the block one token's own input to it."""
    target = saved("qwen3", tmp_path)
    ids = [5, 9, 100, 3, 77, 21, 8]
    drafter = started(tmp_path, num_layers=1, target_layer_ids=[4])
    states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
    positions = torch.arange(len(ids))[None]
    out = drafter(
        DraftInputs(
            embedding_BQD=states[5][:, -1:],
            context_BSE=context_features(target, ids, (4,))[None, :-1],
            context_position_BS=positions[:, :-1],
            block_position_BQ=positions[:, -1:],
            masks={},
        )
    )
    torch.testing.assert_close(out[0, 0], states[6][0, -1], rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_layers_keep_their_order(kind: str, tmp_path: Path) -> None:
    target = saved("qwen3", tmp_path)
    drafter = started(tmp_path, num_layers=3, target_layer_ids=[1, 3], kind=kind)
    for mine, theirs in zip(drafter.layers, decoder_layers(target)[3:], strict=True):
        assert torch.equal(mine.mlp.up_proj.weight, theirs.mlp.up_proj.weight)
        assert torch.equal(mine.self_attn.o_proj.weight, theirs.self_attn.o_proj.weight)
    features = torch.randn(4, 128)
    assert torch.equal(drafter.fc(features), features[:, 64:])


@torch.no_grad()
def test_queries_and_keys_are_about_as_large_as_the_targets(tmp_path: Path) -> None:
    """Llama does not norm them; for inputs of random direction the drafter's are as large in the mean, within 5 %."""
    target = saved("llama", tmp_path)
    drafter = started(tmp_path, num_layers=2, target_layer_ids=[1, 3])
    x = torch.randn(4000, 64)
    for mine, theirs in zip(drafter.layers, decoder_layers(target)[4:], strict=True):
        for part in ("q", "k"):
            goal = theirs.self_attn.get_submodule(f"{part}_proj")(theirs.input_layernorm(x)).square().mean().sqrt()
            rows = mine.self_attn.get_submodule(f"{part}_proj")(mine.input_layernorm(x)).view(len(x), -1, 16)
            found = mine.self_attn.get_submodule(f"{part}_norm")(rows).square().mean().sqrt()
            assert found == pytest.approx(float(goal), rel=0.05)


@torch.no_grad()
def test_a_hybrid_lends_its_mlps(tmp_path: Path) -> None:
    """Its attention has other shapes, and its norms multiply by one more than they store."""
    target = saved("qwen3_5", tmp_path)
    drafter = started(tmp_path, num_layers=2, target_layer_ids=[1, 3])
    assert BorrowedLayers(find_target(str(tmp_path), None), drafter.config).parts == ["mlp"]
    x = torch.randn(5, 64)
    for mine, theirs in zip(drafter.layers, decoder_layers(target)[6:], strict=True):
        expected = theirs.mlp(theirs.post_attention_layernorm(x))
        torch.testing.assert_close(mine.mlp(mine.post_attention_layernorm(x)), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(mine.input_layernorm.weight, torch.ones(64))
    torch.testing.assert_close(drafter.norm(x), decoder_of(target).norm(x), rtol=1e-5, atol=1e-5)
    drawn = dict(Drafter.initial_tensors(drafter.config, torch.Generator().manual_seed(0)))
    for name in ("fc.weight", "layers.1.self_attn.q_proj.weight"):
        assert torch.equal(drafter.get_parameter(name), drawn[name])


OTHERS = {
    "stablelm": StableLmConfig(**SIZES, intermediate_size=96),  # LayerNorm with a bias
    "olmo": OlmoConfig(**SIZES, intermediate_size=96),  # norms without weights
    "granite": GraniteConfig(**SIZES, intermediate_size=96, residual_multiplier=0.3),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_norms_and_sums_are_refused(kind: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(OTHERS[kind]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"layers of a {kind} are not built like a drafter's"):
        started(tmp_path, target_layer_ids=[1], num_layers=2)


@pytest.mark.parametrize(
    ("family", "section", "message"),
    [
        ("gemma3", {"num_layers": 2}, "layers of a gemma3_text are not built like a drafter's"),
        ("qwen3", {"num_layers": 7}, "the target has 6 layers, the drafter 7: set drafter.num_layers to at most 6"),
        ("qwen3", {"num_layers": 2, "num_heads": 8, "intermediate_size": 40}, "no layer of the target has the drafter"),
        (
            "qwen3",
            {"num_layers": 2, "num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "intermediate_size": 40},
            "no layer",
        ),
    ],
)
def test_what_cannot_be_borrowed(family: str, section: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_target(family).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message):
        started(tmp_path, target_layer_ids=[1], **section)
