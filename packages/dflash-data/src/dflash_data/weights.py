"""Target weights straight from safetensors, shard by shard.

Every rank reads only the slices that it keeps, from memory-mapped files: no host copy of the model, no communication.
A target that is only described gets random weights in their place, drawn where they are kept.
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from dflash_data.float8 import Float8Linear, quantize_rows
from dflash_model.errors import UserError
from dflash_model.hub import FLOATS

FLOAT8_STORED, FLOAT8_BLOCK = "F8_E4M3", 128
ANCHOR_KEY = "embed_tokens.weight"
EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class TargetFiles:
    """Where each tensor of a checkpoint lies.

    Attributes:
        folder: the checkpoint.
        file_of: file by tensor name.
        prefix: what stands before ``embed_tokens.weight`` and ``layers.…``: ``model.``, ``model.language_model.`` …
    """

    folder: Path
    file_of: dict[str, Path]
    prefix: str

    @classmethod
    def find(cls, folder: Path) -> "TargetFiles":
        """Index a folder.

        Raises:
            UserError: no safetensors, or no language model in them.
        """
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if single.is_file():  # before an index, and before any other file that lies there, as in transformers
            with _opened(single) as file:
                file_of = dict.fromkeys(file.keys(), single)
        elif index.is_file():
            file_of = _indexed(folder, index)
        else:
            raise UserError(f"target.path is {folder}; it has neither model.safetensors nor an index of such files")
        prefixes = [name.removesuffix(ANCHOR_KEY) for name in file_of if name.endswith(ANCHOR_KEY)]
        layers = Counter(name.partition("layers.")[0] for name in file_of)
        if not prefixes:
            raise UserError(
                f"target.path is {folder}; no tensor ends in {ANCHOR_KEY}; the file holds"
                f" {', '.join(sorted(file_of)[:5])} …"
            )
        return cls(folder, file_of, max(prefixes, key=layers.__getitem__))  # others embed for MTP or for speech

    def head_name(self) -> str | None:
        """The output head's tensor, or None where it is not stored; other heads (of MTP) have longer names."""
        return min((name for name in self.file_of if name.endswith("lm_head.weight")), key=len, default=None)

    def read_into(self, tensors: dict[str, Tensor]) -> None:
        """Fill tensors, sharded or not, by the name that the model gives them.

        Raises:
            UserError: a tensor is missing, has another shape, or is not stored as a float.
        """
        stored = {stored: part for name, tensor in tensors.items() for stored, part in self._as_stored(name, tensor)}
        names_in: dict[Path, list[str]] = {}
        for name in stored:
            names_in.setdefault(self._file(name), []).append(name)
        for path, names in sorted(names_in.items()):
            with _opened(path) as file:
                for name in names:
                    if file.get_slice(name).get_dtype() == FLOAT8_STORED:
                        self._dequantize(file.get_slice(name), name, stored[name])
                    else:
                        _copy_slice(file.get_slice(name), name, stored[name])

    def _as_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A tensor under its name, or, where the files hold experts one by one, views of this rank's experts.

        transformers joins the experts of a layer in one tensor ``[experts, rows, columns]``, gate above up; published
        checkpoints have it in that form (Gemma 4, Qwen3.5) or as ``experts.{e}.gate_proj.weight`` and so on (Qwen3).
        """
        experts, _, joined = name.rpartition(".")
        if name in self.file_of or not experts.endswith(".experts") or joined not in EXPERT_PARTS:
            yield name, tensor
            return
        parts = EXPERT_PARTS[joined]
        local, rows = own_rows(tensor)
        for expert, matrix in enumerate(local, start=rows.start or 0):
            for part, view in zip(parts, matrix.chunk(len(parts)), strict=True):
                yield f"{experts}.{expert}.{part}.weight", view

    def _dequantize(self, stored, name: str, tensor: Tensor) -> None:  # noqa: ANN001 - safetensors' slice type
        """Read this rank's rows of a matrix whose square blocks have a scale each, as DeepSeek and Qwen publish them.

        Raises:
            UserError: there are no such scales, or shapes do not fit.
        """
        scales_name = name + "_scale_inv"
        with _opened(self._file(scales_name)) as file:
            scales = file.get_tensor(scales_name)
        shape = stored.get_shape()
        if list(tensor.shape) != shape or list(scales.shape) != [-(-size // FLOAT8_BLOCK) for size in shape]:
            raise UserError(
                f"the target's {name} has shape {shape} in float8 and its {scales_name} {list(scales.shape)}; its"
                f" config describes {list(tensor.shape)}, with one scale for {FLOAT8_BLOCK} x {FLOAT8_BLOCK} elements"
            )
        local, rows = own_rows(tensor)
        if local.numel():
            values = stored[rows].to(torch.float32)
            first = rows.start or 0
            row_block = torch.arange(first, first + len(values)) // FLOAT8_BLOCK
            column_block = torch.arange(shape[1]) // FLOAT8_BLOCK
            local.copy_(values * scales.float()[row_block][:, column_block])

    def _file(self, name: str) -> Path:
        if name not in self.file_of:
            raise UserError(
                f"target.path is {self.folder}; it has no tensor {name} (it holds {len(self.file_of)}, such as"
                f" {', '.join(sorted(self.file_of)[:3])})"
            )
        return self.file_of[name]


class RandomWeights:
    """Weights of a target that has no files: to try a job out, and to measure its speed.

    Matrices are N(0, 0.02), vectors are ones. A tensor's values depend on its name and on the kind of device alone, not
    on who holds which rows.

    Attributes:
        prefix: as files would have it.
    """

    prefix = "model."

    def head_name(self) -> str:
        """There is a head, unless the configuration ties it."""
        return "lm_head.weight"

    def read_into(self, tensors: dict[str, Tensor]) -> None:
        """Fill tensors, sharded or not, by name."""
        for name, tensor in tensors.items():
            local, rows = own_rows(tensor)
            if tensor.dim() < 2:
                local.fill_(1)
                continue
            generator = torch.Generator(local.device).manual_seed(zlib.crc32(name.encode()))
            whole = torch.empty(tensor.shape, device=local.device).normal_(0.0, 0.02, generator=generator)
            local.copy_(whole[rows])


TargetWeights = TargetFiles | RandomWeights


def _opened(path: Path) -> Any:  # noqa: ANN401 - safetensors' handle, a context manager
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"target.path: {path} cannot be read: {error}") from error


def _indexed(folder: Path, index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"target.path: {index} is no index of safetensors files: {error!r}") from error
    for file in set(weight_map.values()):
        if Path(file).name != file or not (folder / file).is_file():
            raise UserError(f"target.path: {index} names {file}; there is no such file in the folder")
    return {name: folder / file for name, file in weight_map.items()}


def _copy_slice(stored, name: str, tensor: Tensor) -> None:  # noqa: ANN001 - safetensors' slice type is not public
    if stored.get_dtype() not in FLOATS:
        raise UserError(
            f"the target's {name} is stored as {stored.get_dtype()}; quantized targets are not supported, only"
            f" {', '.join(FLOATS)}"
        )
    if list(tensor.shape) != stored.get_shape():
        raise UserError(
            f"the target's {name} has shape {stored.get_shape()}; its config describes {list(tensor.shape)}"
        )
    local, rows = own_rows(tensor)
    if local.numel():
        local.copy_(stored[rows])


def own_rows(tensor: Tensor) -> tuple[Tensor, slice]:
    """The part of a tensor that this rank holds, and which rows of the whole it is: all of them unless sharded."""
    if not isinstance(tensor, DTensor):
        return tensor, slice(None)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), slice(offset[0], offset[0] + shape[0])


def rebuild_buffers(module: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint holds (rotary tables, embedding scales) after ``to_empty``.

    transformers does it in the method that draws initial weights, which leaves alone what is marked as loaded; so
    everything that a checkpoint holds is marked. Drawing Gemma's embedding (its scale is such a buffer) would be wasted
    on the CPU, and sharded on GPUs it would wait for all ranks of the job, drafters too, to agree on random numbers.
    """
    for tensor in module.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    module.initialize_weights()


def load_module(module: PreTrainedModel, weights: TargetWeights, device: torch.device, dtype: torch.dtype) -> None:
    """Allocate a decoder (built on meta, sharded or not), rebuild its buffers and read its weights.

    Matrices that the decoder keeps in float8 are read in ``dtype`` and quantized, one at a time.
    """
    module.to_empty(device=device)
    rebuild_buffers(module)
    with torch.no_grad():
        parts = {weights.prefix + name: part.data for name, part in module.state_dict().items()}
        for place, linear in module.named_modules():
            if isinstance(linear, Float8Linear):
                name = f"{weights.prefix}{place}"
                weight, scale = (parts.pop(f"{name}.{part}") for part in ("weight", "scale"))
                whole = torch.empty_like(weight, dtype=dtype)
                weights.read_into({f"{name}.weight": whole})
                for held, found in zip((weight, scale), quantize_rows(own_rows(whole)[0]), strict=True):
                    own_rows(held)[0].copy_(found)
        weights.read_into(parts)
