"""The two ends of a target that a drafter borrows: its frozen embedding and head, and what stands between.

Some families scale their embeddings (Gemma), multiply their logits (Cohere, Granite) or cap them (Gemma). A drafter's
configuration repeats these numbers, because servers and z-lab's package read them there.

Legend: V vocabulary, D target width.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from dflash_data.target import TargetModel
from dflash_data.weights import TargetWeights, rebuild_buffers
from dflash_model.errors import UserError
from dflash_model.taps import decoder_of

PROBE = 8  # tokens that the rules between embedding and logits are tried with


@dataclass(frozen=True)
class FrozenEnds:
    """The target's embedding and head on a drafter rank.

    Attributes:
        embedding_VD: rows as stored; a scale is the drafter configuration's ``input_embedding_scale``.
        head_VD: the output matrix; the embedding's own tensor where the two are tied.
        norm: the target's norm before its head, where its distribution is taught.
    """

    embedding_VD: Tensor
    head_VD: Tensor
    norm: nn.Module | None = None

    @classmethod
    def load(cls, target: TargetModel, *, dtype: torch.dtype, device: torch.device, norm: bool = False) -> "FrozenEnds":
        """Read them from the target's files.

        Raises:
            UserError: there is no head and the configuration does not tie it to the embedding, or no final norm.
        """
        files = target.weights()
        shape = (target.config.vocab_size, target.config.hidden_size)
        tied = target.config.tie_word_embeddings  # then a stored head, if any, is not what transformers uses
        head_name = None if tied else files.head_name()
        if head_name is None and not tied:
            raise UserError(
                f"target.path is {target.folder}; it has no lm_head.weight and its config does not tie it to the"
                " embedding"
            )
        embedding_VD = torch.empty(shape, dtype=dtype, device=device)
        files.read_into({f"{files.prefix}embed_tokens.weight": embedding_VD})
        if head_name is None:
            return cls(embedding_VD, embedding_VD, _final_norm(target, files, dtype, device) if norm else None)
        head_VD = torch.empty(shape, dtype=dtype, device=device)
        files.read_into({head_name: head_VD})
        return cls(embedding_VD, head_VD, _final_norm(target, files, dtype, device) if norm else None)


def find_final_norm(target: TargetModel, dtype: torch.dtype) -> nn.Module:
    """The target's own module, whatever kind of norm it is, on meta.

    Raises:
        UserError: its decoder has none of that name.
    """
    norm = dict(decoder_of(target.build_meta(dtype)).named_children()).get("norm")
    if norm is None or not dict(norm.named_parameters()):
        raise UserError(
            f"the target's model_type is {target.config.model_type}; its decoder has no final norm with weights, so its"
            " distribution cannot be taught: use loss.kind=ce"
        )
    return norm


def _final_norm(target: TargetModel, files: TargetWeights, dtype: torch.dtype, device: torch.device) -> nn.Module:
    norm = find_final_norm(target, dtype).to_empty(device=device)
    files.read_into({f"{files.prefix}norm.{name}": parameter.data for name, parameter in norm.named_parameters()})
    return norm.requires_grad_(False)


def end_rules(target: TargetModel) -> dict[str, Any]:
    """The drafter configuration's entries for embedding scale, logit multiplier and logit cap.

    They are read where transformers keeps them, and then tried: a family may use one of these names in another way
    (Granite divides by ``logits_scaling``, HyperCLOVA X multiplies), or do something more.

    Raises:
        UserError: the target's own forward without its layers is something else.
    """
    config = target.config
    model = target.build_meta(torch.float32, num_layers=0)
    decoder_of(model).norm = nn.Identity()
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embed, nn.Embedding) or not isinstance(head, nn.Linear):
        raise UserError(
            f"the target's model_type is {config.model_type}; it embeds tokens with a {type(embed).__name__} and makes"
            f" logits with a {type(head).__name__}; only lookups and matrices are supported"
        )
    scale = vars(embed).get("scalar_embed_scale", 1.0) * (getattr(config, "embedding_multiplier", None) or 1.0)
    multiplier = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    # Logits around 10: far enough from 0 that a cap shows, far enough from a cap that a factor does.
    logits = _logits_without_layers(model, embed, head, 10 / (scale * multiplier * config.hidden_size**0.5))
    expected = F.linear(embed.weight * scale, head.weight) * multiplier
    expected = expected if cap is None else torch.tanh(expected / cap) * cap
    if not torch.allclose(logits, expected, rtol=1e-3, atol=1e-3):
        raise UserError(
            f"the target's model_type is {config.model_type}; between its embedding and its logits it does more than"
            " scale and cap; drafters for it are not supported"
        )
    return {
        "input_embedding_scale": float(scale),
        "output_multiplier": float(multiplier),
        "final_logit_softcapping": cap,
    }


@torch.no_grad()
def _logits_without_layers(model: PreTrainedModel, embed: nn.Embedding, head: nn.Linear, head_std: float) -> Tensor:
    """Logits of the first few tokens, which get random embedding rows and random rows of the head."""
    for module in model.modules():  # a real vocabulary would take gigabytes
        if isinstance(module, nn.Embedding) and module.num_embeddings >= model.config.vocab_size:
            module.weight, module.padding_idx = nn.Parameter(module.weight[:PROBE]), None
    for name, parameter in head.named_parameters():
        setattr(head, name, nn.Parameter(parameter[:PROBE]))
    model.to_empty(device="cpu")
    rebuild_buffers(model)
    generator = torch.Generator().manual_seed(0)
    embed.weight.normal_(generator=generator)
    for parameter in head.parameters():  # a bias, which FrozenEnds does not have, would show
        parameter.normal_(std=head_std, generator=generator)
    return model(input_ids=torch.arange(min(PROBE, model.config.vocab_size))[None], use_cache=False).logits[0]


def resolve_mask_token_id(explicit: int | None, target: TargetModel, tokenizer_json: Path | None) -> int:
    """The id whose frozen embedding stands for "to be drafted".

    Order: the explicit id; the first embedding row above the tokenizer's last id; a special token named reserved,
    unused or mask. Never the padding or end token.

    Raises:
        UserError: none of these exists, or the explicit one ends the target's texts.
    """
    vocab, ends = target.config.vocab_size, getattr(target.config, "eos_token_id", None)
    if explicit is not None:
        if explicit in (ends if isinstance(ends, list) else [ends]):
            raise UserError(
                f"drafter.mask_token_id is {explicit}, the target's end token; choose one that text never uses"
            )
        return explicit
    if tokenizer_json is not None and tokenizer_json.is_file():
        raw = json.loads(tokenizer_json.read_text())
        added = {token["id"]: token["content"] for token in raw.get("added_tokens", [])}
        last = max([*raw["model"]["vocab"].values(), *added]) if isinstance(raw["model"]["vocab"], dict) else vocab
        if last + 1 < vocab:
            return last + 1
        for token_id, content in sorted(added.items()):
            if any(word in content.lower() for word in ("reserved", "unused", "mask")):
                return token_id
    raise UserError(
        "drafter.mask_token_id is not set and the target has no spare embedding row and no reserved token; set it to a"
        f" token that text never uses (0 to {vocab - 1}, not the padding or end token)"
    )
