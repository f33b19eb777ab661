"""The target's embedding and head as a drafter sees them: the model's own."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import CohereConfig, GraniteConfig, HyperCLOVAXConfig, PhiConfig, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from dflash_data.ends import FrozenEnds, end_rules
from dflash_data.target import TargetModel, find_target
from dflash_model.drafter import draft_logits, embed_block
from dflash_model.errors import UserError
from dflash_model.taps import context_features, decoder_of, text_config
from support.tiny import FAMILIES, SIZES, tiny_config, tiny_target


def tied(family: str, tie: bool) -> PreTrainedModel:
    """A family's tiny model with its head tied or not, also where the configuration's default is the other way."""
    model = tiny_target(family)
    model.config.tie_word_embeddings = tie
    weight = model.get_input_embeddings().weight
    model.get_output_embeddings().weight = weight if tie else torch.nn.Parameter(weight.detach().flip(0).clone())
    return model


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "gemma3", "gemma4", "qwen3_5_vl"])
@torch.no_grad()
def test_frozen_ends_are_the_models_own(family: str, tie: bool, tmp_path: Path) -> None:
    """Embeddings and logits from a drafter's side equal the model's; a wrapper ties by its outer configuration."""
    model = tied(family, tie)
    model.save_pretrained(tmp_path)
    target = find_target(str(tmp_path), None)
    assert target.config.tie_word_embeddings == tie
    ends = FrozenEnds.load(target, dtype=torch.float32, device=torch.device("cpu"))
    assert (ends.head_VD is ends.embedding_VD) == tie
    config = tiny_config(**end_rules(target))
    ids = torch.arange(20)[None]
    assert torch.equal(embed_block(config, ids, ends.embedding_VD), model.get_input_embeddings()(ids))
    hidden = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    logits = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(draft_logits(config, hidden, ends.head_VD), logits, atol=1e-6, rtol=1e-6)


OTHERS: dict[str, PretrainedConfig] = {
    "granite": GraniteConfig(**SIZES, intermediate_size=96, embedding_multiplier=3.0, logits_scaling=4.0),
    "cohere": CohereConfig(**SIZES, intermediate_size=96, logit_scale=0.25),
    "hyperclovax": HyperCLOVAXConfig(**SIZES, intermediate_size=96, logits_scaling=4.0),
    "phi": PhiConfig(**SIZES, intermediate_size=96),
}


@pytest.mark.parametrize(
    ("family", "scale", "multiplier", "cap"),
    [
        ("llama", 1.0, 1.0, None),
        ("qwen3_5_vl", 1.0, 1.0, None),
        ("gemma3", 8.0, 1.0, None),  # sqrt(64)
        ("gemma4", 8.0, 1.0, 3.0),
        ("gemma4_moe", 8.0, 1.0, 3.0),
        ("granite", 3.0, 0.25, None),
        ("cohere", 1.0, 0.25, None),
    ],
)
def test_rules_between_embedding_and_logits(family: str, scale: float, multiplier: float, cap: float | None) -> None:
    config = OTHERS.get(family) or text_config(FAMILIES[family]())
    assert end_rules(TargetModel(config, None, family)) == {
        "input_embedding_scale": scale,
        "output_multiplier": multiplier,
        "final_logit_softcapping": cap,
    }


@pytest.mark.parametrize("family", ["hyperclovax", "phi"])
def test_a_model_that_does_something_else_is_refused(family: str) -> None:
    """HyperCLOVA X multiplies by what Granite divides by; Phi's head has a bias."""
    with pytest.raises(UserError, match=f"model_type is {family}; between its embedding and its logits it does more"):
        end_rules(TargetModel(OTHERS[family], None, family))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma4_dense", "qwen3_5", "qwen3_5_vl"])
@torch.no_grad()
def test_norm_and_head_of_the_last_layer_are_the_targets_logits(family: str, tmp_path: Path) -> None:
    """What the distribution losses teach: with the family's own kind of norm, behind its last layer."""
    model = tiny_target(family)
    model.save_pretrained(tmp_path)
    target = find_target(str(tmp_path), None)
    ends = FrozenEnds.load(target, dtype=torch.float32, device=torch.device("cpu"), norm=True)
    rules, ids = end_rules(target), [5, 9, 100, 3, 77]
    last = context_features(model, ids, (target.config.num_hidden_layers - 1,))
    assert ends.norm is not None
    logits = F.linear(ends.norm(last), ends.head_VD) * rules["output_multiplier"]
    cap = rules["final_logit_softcapping"]
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    torch.testing.assert_close(logits, model(torch.tensor([ids])).logits[0], rtol=1e-5, atol=1e-5)
