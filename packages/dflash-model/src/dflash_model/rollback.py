"""Taking rejected tokens back out of a target's cache.

Plain attention layers are cropped. A sliding-window layer that has dropped old keys cannot be, so it is given a full
cache: the model masks by window anyway, and the memory is that of a full-attention layer. A layer that keeps a running
state (gated delta net, convolution) cannot forget tokens, so its state is copied before verification and put back;
the caller then runs the accepted tokens again. transformers' own ``crop`` after ``activate_past_recording`` restores
the convolution state but not the recurrent one (seen in 5.17 and 5.24), so it is not used.
"""

import copy
import inspect
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from dflash_model.errors import UserError

MOVING_ROPE = ("dynamic", "longrope")  # frequencies follow the longest position seen, and stay so in the model
SPREAD = 7919  # a prime
_checked: WeakSet[PreTrainedModel] = WeakSet()


def check_target(target: PreTrainedModel, length: int) -> None:
    """Whether a block of tokens gives what single tokens give, also after a rejection; tried once for each model.

    Args:
        target: the model.
        length: positions that a text and its last block can reach.

    Raises:
        UserError: transformers computes blocks after a cache differently for this model (Jamba, Bamba, RecurrentGemma
            and DeepSeek-V3.2 in 5.24), or its rotary frequencies would move.
    """
    config = target.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if rope.get("rope_type") in MOVING_ROPE and length > original:
        raise UserError(
            f"the target's rope_type is {rope['rope_type']}; its text can be drafted up to {original} positions, and"
            f" prompt, new tokens and the last block make {length}"
        )
    if target in _checked:
        return
    # Ids from all over the vocabulary, and the median over positions: on the untrained ids 3 to 16 SmolLM2's logits are
    # all rounding in bf16 (145 % between two right ways to compute them; 0.6 % here).
    tokens = torch.arange(1, 11, device=target.device)[None] * SPREAD % config.vocab_size
    cache = RewindableCache(target)
    single = [_step(target, cache, tokens[:, i : i + 1]) for i in range(10)]
    cache = RewindableCache(target)
    _step(target, cache, tokens[:, :3])
    cache.mark()
    _step(target, cache, torch.cat((tokens[:, 3:5], tokens[:, :3]), dim=1))  # two tokens right, three rejected
    again = 3 + 2 - cache.reject(5, 2)
    block = _step(target, cache, tokens[:, again:])
    expected = torch.cat(single[again:], dim=1)
    difference = float(((block - expected).norm(dim=-1) / expected.norm(dim=-1)).median())
    if not difference < torch.finfo(target.dtype).eps ** 0.5:
        raise UserError(
            f"the target's model_type is {config.model_type}; in transformers its logits of a block of tokens differ"
            f" from those of single tokens by {difference:.1%}, so drafting would change its text"
        )
    _checked.add(target)


def _step(target: PreTrainedModel, cache: "RewindableCache", ids_BS: Tensor) -> Tensor:
    """fp32 logits of tokens after a cache."""
    return target(input_ids=ids_BS, use_cache=True, return_dict=True, **{cache.argument: cache.cache}).logits.float()


class RewindableCache:
    """A transformers cache that can return to the last ``mark``.

    Attributes:
        cache: the cache to hand to the model.
        argument: the name under which the model's forward takes it (``cache`` since transformers 5.2x,
            ``past_key_values`` before).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.cache = DynamicCache(config=model.config)
        self.cache.layers = [
            DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in self.cache.layers
        ]
        parameters = inspect.signature(type(model).forward).parameters
        self.argument = "cache" if "cache" in parameters else "past_key_values"
        self._saved: dict[int, Any] = {}

    def mark(self) -> None:
        """Remember the running states before a verification."""
        self._saved = {
            index: copy.deepcopy(layer)
            for index, layer in enumerate(self.cache.layers)
            if type(layer) is not DynamicLayer and not _holds_nothing(layer)
        }

    def reject(self, num_run: int, num_kept: int) -> int:
        """Take back what ran since the mark, except its first ``num_kept`` tokens where that is possible.

        Args:
            num_run: tokens that ran since the mark.
            num_kept: how many of them stay in the text.

        Returns:
            How many tokens, from the mark on, must be run again: 0 for an attention cache, ``num_kept`` with states.
        """
        if num_kept == num_run:
            return 0
        again = num_kept if self._saved else 0
        for index, layer in enumerate(self.cache.layers):
            if index in self._saved:
                self.cache.layers[index] = self._saved[index]
            elif isinstance(layer, DynamicLayer):
                layer.crop(num_kept - again - num_run)
        return again


def _holds_nothing(layer: Any) -> bool:  # noqa: ANN401 - transformers' class for it has no stable name
    """Whether a layer is a placeholder: Gemma 4's last layers use the keys of earlier ones."""
    return vars(layer).get("keys", layer) is None
