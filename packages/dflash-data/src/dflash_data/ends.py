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

from dflash_data.target import TargetModel
from dflash_data.weights import TargetFiles
from dflash_model.errors import UserError


@dataclass(frozen=True)
class FrozenEnds:
    """The target's embedding and head on a drafter rank.

    Attributes:
        embedding_VD: rows as stored; a scale is the drafter configuration's ``input_embedding_scale``.
        head_VD: the output matrix; the embedding's own tensor where the two are tied.
    """

    embedding_VD: Tensor
    head_VD: Tensor

    @classmethod
    def load(cls, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> "FrozenEnds":
        """Read both from the target's files.

        Raises:
            UserError: there is no head and the configuration does not tie it to the embedding.
        """
        files = TargetFiles.find(target.location)
        shape = (target.config.vocab_size, target.config.hidden_size)
        head_name = files.head_name()
        if head_name is None and not target.config.tie_word_embeddings:
            raise UserError(
                f"target.path is {target.folder}; it has no lm_head.weight and its config does not tie it to the"
                " embedding"
            )
        embedding_VD = torch.empty(shape, dtype=dtype, device=device)
        files.read_into({f"{files.prefix}embed_tokens.weight": embedding_VD})
        if head_name is None:
            return cls(embedding_VD, embedding_VD)
        head_VD = torch.empty(shape, dtype=dtype, device=device)
        files.read_into({head_name: head_VD})
        return cls(embedding_VD, head_VD)


def end_rules(target: TargetModel) -> dict[str, Any]:
    """The drafter configuration's entries for embedding scale, logit multiplier and logit cap.

    Raises:
        UserError: the target embeds tokens with a module that is more than a lookup and a scale.
    """
    config = target.config
    embed = target.build_meta(torch.float32).get_input_embeddings()
    scale = getattr(embed, "scalar_embed_scale", None)  # every scaled embedding of transformers has it
    if scale is None and type(embed) is not nn.Embedding:
        raise UserError(f"the target embeds tokens with {type(embed).__name__}; drafters for it are not supported")
    multiplier = float(getattr(config, "logit_scale", None) or 1.0) / float(
        getattr(config, "logits_scaling", None) or 1.0
    )
    return {
        "input_embedding_scale": 1.0 if scale is None else float(scale),
        "output_multiplier": multiplier,
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
    }


def resolve_mask_token_id(explicit: int | None, target: TargetModel, tokenizer_json: Path | None) -> int:
    """The id whose frozen embedding stands for "to be drafted".

    Order: the explicit id; the first embedding row above the tokenizer's last id; a special token named reserved,
    unused or mask. Never the padding or end token.

    Raises:
        UserError: none of these exists.
    """
    vocab = target.config.vocab_size
    if explicit is not None:
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
