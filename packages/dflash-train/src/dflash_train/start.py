"""Start values of a drafter: drawn, of another drafter, or of the target's own last layers.

A drafter layer has the parts of a pre-norm decoder layer, and by default their sizes in the target too. Started as the
target's last layers it begins with what they know (docs/LOG.md has what that was worth).
"""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from dflash_data.target import TargetModel
from dflash_model import Drafter, DrafterConfig, UserError
from dflash_model.hub import stored_tensors
from dflash_model.taps import decoder_layers, decoder_of
from dflash_train.config import DrafterSection

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
NORMS = {"input_layernorm", "post_attention_layernorm"}


def initial_tensors(
    section: DrafterSection, target: TargetModel, drafter: DrafterConfig, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Full fp32 start values of every drafter parameter, one at a time.

    Raises:
        UserError: the target's layers cannot be borrowed, or a file cannot be read.
    """
    stored = set()
    if section.init_from is not None:
        for name, tensor in stored_tensors(Path(section.init_from).expanduser()):
            stored.add(name)
            yield name, tensor.float()
    # Of a drafter in a file, only what DFlash2 adds to it is left.
    drawn = Drafter.initial_tensors(drafter, torch.Generator().manual_seed(seed), known=stored)
    if not section.init_from_target:
        yield from drawn
        return
    borrowed = BorrowedLayers(target, drafter)
    for name, tensor in drawn:
        found = borrowed.tensor(name)
        yield name, tensor if found is None else found


class BorrowedLayers:
    """The target's last layers as those of a drafter.

    Attention is taken if heads and their size are the drafter's and all of a head is rotated, the MLP if its three
    matrices have the drafter's shapes; biases are left out. A drafter's keys and values of the context bypass the norm
    before attention, so the norm's weights go into the matrices behind it. Context features start as the last tapped
    layer's output. A target without norms of queries and keys gets drafter norms as large as queries and keys are for
    inputs without direction.

    Attributes:
        parts: ``attention``, ``mlp`` or both: what is taken.

    Raises:
        UserError: the target has too few layers, none that is like a drafter's, or nothing has its shapes.
    """

    def __init__(self, target: TargetModel, drafter: DrafterConfig) -> None:
        kind = target.config.model_type
        model = target.build_meta(torch.float32)
        layers = list(decoder_layers(model))
        self._first = len(layers) - drafter.num_layers
        if self._first < 0:
            raise UserError(
                f"drafter.init_from_target is true; the target has {len(layers)} layers, the drafter"
                f" {drafter.num_layers}: set drafter.num_layers to at most {len(layers)}"
            )
        self._layers, self._decoder = layers[self._first :], decoder_of(model)
        self._files, self._config = target.weights(), drafter
        with torch.device("meta"):
            self._shapes = {name: parameter.shape for name, parameter in Drafter(drafter).named_parameters()}
        silu = getattr(target.config, "hidden_act", None) in ("silu", "swish")
        plain = getattr(target.config, "residual_multiplier", 1.0) == 1.0
        if not (silu and plain and _is_scale(self._decoder, "norm") and all(map(_is_pre_norm, self._layers))):
            raise UserError(
                f"drafter.init_from_target is true; layers of a {kind} are not built like a drafter's (an RMS norm"
                " before attention, one before the MLP, SiLU, sums): leave it out"
            )
        attention = _has_heads(target, drafter) and self._fits("self_attn", ATTENTION)
        takes = {"attention": attention, "mlp": self._fits("mlp", MLP)}
        self.parts = [part for part, fits in takes.items() if fits]
        if not self.parts:
            raise UserError(
                "drafter.init_from_target is true; no layer of the target has the drafter's shapes: leave it out"
            )

    def tensor(self, name: str) -> Tensor | None:
        """A parameter of the drafter, fp32 on the CPU; None where its drawn values stay."""
        if name == "norm.weight":
            return self._gain("norm", self._config.hidden_size)
        if name == "fc.weight" and "attention" in self.parts:
            fused = torch.zeros(self._shapes[name])
            fused[:, -fused.shape[0] :] = torch.eye(fused.shape[0])
            return fused
        if not name.startswith("layers."):
            return None
        _, index, part, *rest = name.split(".")
        layer = f"layers.{self._first + int(index)}"
        if "attention" in self.parts and part == "self_attn":
            return self._attention(layer, rest[0], self._shapes[name])
        if "mlp" in self.parts and part == "mlp":
            return self._read(f"{layer}.mlp.{rest[0]}", self._shapes[name])
        if "mlp" in self.parts and part == "post_attention_layernorm":
            return self._gain(f"{layer}.{part}", self._config.hidden_size)
        return None

    def _attention(self, layer: str, part: str, shape: torch.Size) -> Tensor:
        place = f"{layer}.self_attn.{part}"
        if part == "o_proj":
            return self._read(place, shape)
        if part.endswith("_proj"):
            return self._read(place, shape) * self._gain(f"{layer}.input_layernorm", shape[1])
        if part in dict(self._decoder.get_submodule(f"{layer}.self_attn").named_children()):
            return self._gain(place, shape[0])
        matrix = part.replace("norm", "proj")
        rows = self._attention(layer, matrix, self._shapes[f"layers.0.self_attn.{matrix}.weight"])
        return torch.full(shape, math.sqrt(float(rows.square().sum(1).mean())))

    def _fits(self, part: str, names: tuple[str, ...]) -> bool:
        """Whether these matrices have the drafter's shapes in every layer."""
        return all(
            dict(layer.named_parameters()).get(f"{part}.{name}.weight", torch.empty(0)).shape
            == self._shapes[f"layers.0.{part}.{name}.weight"]
            for layer in self._layers
            for name in names
        )

    def _read(self, place: str, shape: torch.Size) -> Tensor:
        """The weight of a module of the target's decoder."""
        tensor = torch.empty(shape)
        self._files.read_into({f"{self._files.prefix}{place}.weight": tensor})
        return tensor

    @torch.no_grad()
    def _gain(self, place: str, size: int) -> Tensor:
        """What a norm multiplies by, whatever it adds to its stored weights: its output for a vector of ones."""
        norm = self._decoder.get_submodule(place).to_empty(device="cpu")
        norm.get_parameter("weight").copy_(self._read(place, torch.Size([size])))
        return norm(torch.ones(1, size))[0]


def _is_pre_norm(layer: nn.Module) -> bool:
    """Whether a decoder layer norms what goes into attention and into the MLP, and nothing else."""
    norms = {name for name, _ in layer.named_children() if "norm" in name}
    return norms == NORMS and all(_is_scale(layer, name) for name in norms)


def _is_scale(owner: nn.Module, name: str) -> bool:
    """Whether a norm is an RMS norm with one weight for each element: a LayerNorm would make nothing of equal ones."""
    norm = dict(owner.named_children()).get(name)
    if norm is None or [part for part, _ in norm.named_parameters()] != ["weight"]:
        return False
    return not isinstance(norm, nn.LayerNorm) and "LayerNorm" not in type(norm).__name__


def _has_heads(target: TargetModel, drafter: DrafterConfig) -> bool:
    """Whether the target's attention is the drafter's: as many heads of that size, scaled and rotated like them."""
    config = target.config
    rope = getattr(config, "rope_parameters", None) or {}
    partial = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = (config.num_attention_heads, config.num_key_value_heads, size)
    scaled = getattr(config, "attention_multiplier", None) is None
    return scaled and partial in (None, 1.0) and heads == (drafter.num_heads, drafter.num_kv_heads, drafter.head_dim)
