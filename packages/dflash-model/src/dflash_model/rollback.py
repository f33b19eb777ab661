"""Taking rejected tokens back out of a target's cache.

Plain attention layers are cropped. A layer that keeps a running state (gated delta net, convolution, sliding window)
cannot forget tokens, so its state is copied before verification and put back; the caller then runs the accepted
tokens again. transformers' own ``crop`` after ``activate_past_recording`` restores the convolution state but not the
recurrent one (seen in 5.17 and 5.24), so it is not used.
"""

import copy
import inspect
from typing import Any

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


class RewindableCache:
    """A transformers cache that can return to the last ``mark``.

    Attributes:
        cache: the cache to hand to the model.
        argument: the name under which the model's forward takes it (``cache`` since transformers 5.2x,
            ``past_key_values`` before).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.cache = DynamicCache(config=model.config)
        parameters = inspect.signature(type(model).forward).parameters
        self.argument = "cache" if "cache" in parameters else "past_key_values"
        self._saved: dict[int, Any] = {}

    def mark(self) -> None:
        """Remember the state before a verification."""
        self._saved = {
            index: copy.deepcopy(layer)
            for index, layer in enumerate(self.cache.layers)
            if type(layer) is not DynamicLayer
        }

    def reject(self, num_verified: int, num_accepted: int) -> int:
        """Drop the tail of the last ``num_verified`` tokens.

        Returns:
            How many of the accepted tokens the caller must run again: 0 for a pure attention cache.
        """
        if num_accepted == num_verified:
            return 0
        replay = num_accepted if self._saved else 0
        for index, layer in enumerate(self.cache.layers):
            if index in self._saved:
                self.cache.layers[index] = self._saved[index]
            else:
                assert isinstance(layer, DynamicLayer)
                layer.crop(num_accepted - replay - num_verified)
        return replay
