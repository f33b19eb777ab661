"""Reading the hidden states of a target while it runs.

A tap is the *output* of a decoder layer: the raw residual stream after layer ``l`` (0-based), before any final norm.
That is ``hidden_states[l + 1]`` of transformers except for the last layer, where transformers stores the normed state.
"""

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The language model's part of a configuration, also inside a multimodal wrapper."""
    return config.get_text_config(decoder=True)


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The module that holds ``embed_tokens``, ``layers`` and ``norm``, also inside a multimodal wrapper."""
    return model.get_decoder()


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a causal language model."""
    layers = decoder_of(model).layers
    assert isinstance(layers, nn.ModuleList)
    return layers


class HiddenTaps:
    """Forward hooks that keep the outputs of the chosen layers of one forward at a time.

    Use as a context manager, or call ``remove``. Nothing else of the forward is kept, unlike
    ``output_hidden_states=True``, which keeps every layer.
    """

    def __init__(self, layers: nn.ModuleList, layer_ids: tuple[int, ...]) -> None:
        self._layer_ids = layer_ids
        self._outputs: dict[int, Tensor] = {}
        self._handles = [layers[index].register_forward_hook(self._keep(index)) for index in sorted(set(layer_ids))]

    def _keep(self, index: int):  # noqa: ANN202 - the hook's type is torch's business
        def hook(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._outputs[index] = output if isinstance(output, Tensor) else output[0]

        return hook

    def take(self) -> Tensor:
        """Concatenate the taps of the last forward in list order, ``[B, S, E]``, and forget them."""
        states = torch.cat([self._outputs[index] for index in self._layer_ids], dim=-1)  # one may be named twice
        self._outputs.clear()
        return states

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> "HiddenTaps":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


@torch.no_grad()
def context_features(model: PreTrainedModel, ids: Sequence[int], layer_ids: tuple[int, ...]) -> Tensor:
    """Context features ``[S, E]`` of one text, from one forward of its decoder, without cache and logits."""
    with HiddenTaps(decoder_layers(model), layer_ids) as taps:
        decoder_of(model)(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False)
        return taps.take()[0]
