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

    def extend(self, layer: int, new: KeyValue) -> KeyValue:
        """Append a layer's keys and values of new context tokens; returns all of them."""
        past = self._layers.get(layer)
        if past is not None:
            new = (torch.cat((past[0], new[0]), dim=2), torch.cat((past[1], new[1]), dim=2))
        self._layers[layer] = new
        return new

    @property
    def length(self) -> int:
        """S: context tokens seen so far."""
        return self._layers[0][0].shape[2] if self._layers else 0
