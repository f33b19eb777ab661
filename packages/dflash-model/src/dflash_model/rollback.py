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

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


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
