"""Keys and values of the context, kept between draft forwards."""

import torch
from torch import Tensor

KeyValue = tuple[Tensor, Tensor]


class DraftCache:
    """Context keys and values per layer, ``[B, M, S, H]`` each.

    Holds committed tokens only: the drafter never stores the keys of a block, so nothing has to be cropped after a
    rejection. (The published loop stores them and crops; the result is the same.)
    """

    def __init__(self) -> None:
        self._layers: dict[int, KeyValue] = {}

    def extend(self, layer: int, new: KeyValue, num_context: int) -> KeyValue:
        """A layer's keys and values with those of earlier context before them.

        Args:
            layer: its number.
            new: of new context tokens, and of the block behind them.
            num_context: how many of these are context, and kept.
        """
        past = self._layers.get(layer)
        key, value = new if past is None else (torch.cat((past[0], new[0]), dim=2), torch.cat((past[1], new[1]), dim=2))
        kept = slice(key.shape[2] - new[0].shape[2] + num_context)
        self._layers[layer] = key[:, :, kept], value[:, :, kept]
        return key, value

    @property
    def length(self) -> int:
        """S: context tokens seen so far."""
        return self._layers[0][0].shape[2] if self._layers else 0
