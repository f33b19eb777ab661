"""Where two texts of one target part, and how close the target's own choice was there.

In fp32 drafted and plain greedy text are equal. In bf16 a block of tokens and single tokens go through matrix products
of other shapes, which round differently, so texts part where two tokens are nearly equal. A small margin at the first
difference says that this happened; a large one says that something is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Divergence:
    """The first difference of two texts.

    Attributes:
        position: index of the token, the prompt not counted.
        tokens: the token of either text there; None where the text had ended.
        margin: difference of the target's logits of the two tokens, in one forward over the common text; None where
            one text had ended.
        largest: the largest absolute logit at that position, for scale: bf16 resolves about 1/256 of it.
    """

    position: int
    tokens: tuple[int | None, int | None]
    margin: float | None
    largest: float


@torch.inference_mode()
def first_divergence(
    target: PreTrainedModel, prompt: Sequence[int], plain: Sequence[int], drafted: Sequence[int]
) -> Divergence | None:
    """Compare two texts after one prompt; None if they are equal."""
    if list(plain) == list(drafted):
        return None
    shorter = min(len(plain), len(drafted))
    position = next((i for i in range(shorter) if plain[i] != drafted[i]), shorter)
    ids = torch.tensor([[*prompt, *plain[:position]]], device=target.device)
    logits_V = target(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    largest = float(logits_V.abs().max())
    if position == shorter:
        ended = (
            plain[position] if len(plain) > shorter else None,
            drafted[position] if len(drafted) > shorter else None,
        )
        return Divergence(position, ended, None, largest)
    pair = (plain[position], drafted[position])
    return Divergence(position, pair, float((logits_V[pair[0]] - logits_V[pair[1]]).abs()), largest)
