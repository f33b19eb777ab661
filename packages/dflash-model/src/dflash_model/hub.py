"""Reading and writing drafters in the layout that z-lab's package, SGLang and vLLM load.

A folder with ``config.json`` and ``model.safetensors``: bf16, names without prefix, exactly the drafter's own tensors.
The name set is checked on write and on read: SGLang detects neither missing nor unknown tensors, vLLM refuses unknown
ones only when it starts.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_model.config import DrafterConfig
from dflash_model.drafter import Drafter
from dflash_model.errors import UserError
from dflash_model.layout import from_published, to_published

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
FLOATS = ("BF16", "F16", "F32", "F64")


def expected_shapes(config: DrafterConfig) -> dict[str, torch.Size]:
    """Names and shapes of a drafter's tensors: 3 + 11 per layer; a DFlash2 drafter has 4 more in each, and 3 more."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in Drafter(config).state_dict().items()}


def _check(found: dict[str, torch.Size], config: DrafterConfig, origin: str) -> None:
    expected = expected_shapes(config)
    for problem, names in (("has no", expected.keys() - found.keys()), ("has unknown", found.keys() - expected.keys())):
        if names:
            listed = ", ".join(sorted(names)[:5])
            raise UserError(
                f"{origin} {problem} tensor {listed} ({len(names)} in all); its {CONFIG_NAME} describes"
                f" {len(expected)} tensors"
            )
    for name, shape in expected.items():
        if found[name] != shape:
            raise UserError(
                f"{origin}: {name} has shape {list(found[name])}; its {CONFIG_NAME} describes {list(shape)}"
            )


def save_drafter(state: dict[str, Tensor], config: DrafterConfig, folder: Path) -> None:
    """Write a drafter for serving, in bf16.

    Args:
        state: full (unsharded) tensors by parameter name, any float type.
        config: the drafter's configuration.
        folder: created if needed. vLLM recognises the method by ``dflash`` in the folder's path.

    Raises:
        UserError: the tensors are not those of the configuration.
    """
    _check({name: tensor.shape for name, tensor in state.items()}, config, "the drafter's state")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {  # cloned: two names may share memory, which safetensors refuses
        name: tensor.detach().to("cpu", torch.bfloat16).clone(memory_format=torch.contiguous_format)
        for name, tensor in state.items()
    }
    (folder / CONFIG_NAME).write_text(json.dumps(to_published(config), indent=2) + "\n")
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    shutil.copymode(folder / CONFIG_NAME, folder / WEIGHTS_NAME)  # safetensors leaves it to its owner alone
    (folder / INDEX_NAME).unlink(missing_ok=True)  # of an earlier drafter there


def read_config(folder: Path) -> DrafterConfig:
    """Read a drafter's configuration.

    Raises:
        UserError: there is none, or it does not describe a DFlash drafter.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise UserError(
            f"no drafter at {folder}: there is no {CONFIG_NAME} (a checkpoint's drafter is its folder dflash, such as"
            " runs/a/checkpoints/step-100/dflash)"
        )
    return from_published(_read_object(path), str(path))


def _read_object(path: Path) -> dict[str, object]:
    try:
        raw = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds a {type(raw).__name__}; it must be a JSON object")
    return raw


def check_drafter(folder: Path) -> DrafterConfig:
    """Read a drafter's configuration and compare its tensors with it, without loading them.

    Raises:
        UserError: no such drafter, its tensors are not those of its configuration, or one is not a float.
    """
    config = read_config(folder)
    shapes: dict[str, torch.Size] = {}
    for path, names in _weight_files(folder).items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in names or file.keys():
                    stored = file.get_slice(name)
                    if stored.get_dtype() not in FLOATS:
                        raise UserError(
                            f"{path}: {name} is stored as {stored.get_dtype()}; a drafter's tensors are one of"
                            f" {', '.join(FLOATS)}"
                        )
                    shapes[name] = torch.Size(stored.get_shape())
        except SafetensorError as error:
            raise UserError(f"{path} cannot be read: {error}") from error
    _check(shapes, config, str(folder / WEIGHTS_NAME))
    return config


def _weight_files(folder: Path) -> dict[Path, list[str]]:
    """One file and no names, or the files that an index names and what to take from each.

    ``model.safetensors`` goes before an index, as in transformers.
    """
    single, index = folder / WEIGHTS_NAME, folder / INDEX_NAME
    files: dict[Path, list[str]] = {single: []}
    if not single.is_file() and index.is_file():
        weight_map = _read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index} has no weight_map")
        files = {}
        for name, file in weight_map.items():
            if Path(str(file)).name != file:
                raise UserError(f"{index} names {file}; it must be a file of the same folder")
            files.setdefault(folder / file, []).append(name)
    for path in files:
        if not path.is_file():
            raise UserError(f"no drafter at {folder}: there is no {path.name}")
    if (folder / "mask_embedding.pt").exists():
        raise UserError(f"{folder} has a mask_embedding.pt, which vLLM uses and no other reader; it is not supported")
    return files


def stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each tensor of a drafter that ``check_drafter`` has passed, one at a time."""
    for path, names in _weight_files(folder).items():
        with safe_open(path, framework="pt") as file:
            for name in names or file.keys():
                yield name, file.get_tensor(name)


def load_drafter(
    folder: Path | str, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> Drafter:
    """Load a drafter for inference.

    Args:
        folder: a z-lab-layout drafter; of a training checkpoint, its folder ``dflash``.
        dtype: of the weights and the arithmetic; the target's own is the usual choice.
        device: the target's.

    Raises:
        UserError: no such drafter, or its tensors are not those of its configuration.
    """
    folder = Path(folder).expanduser()
    config = check_drafter(folder)
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict({name: t.to(device, dtype) for name, t in stored_tensors(folder)}, assign=True)
    return drafter.requires_grad_(False).eval()
