"""Reading and writing drafters in the layout that z-lab's package, SGLang and vLLM load.

A folder with ``config.json`` and ``model.safetensors``: bf16, names without prefix, exactly the drafter's own tensors.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_model.config import DrafterConfig
from dflash_model.drafter import Drafter
from dflash_model.errors import UserError

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"


def expected_shapes(config: DrafterConfig) -> dict[str, torch.Size]:
    """Names and shapes of a drafter's tensors: 3 + 11 per layer."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in Drafter(config).state_dict().items()}


def _check(found: dict[str, torch.Size], config: DrafterConfig, origin: str) -> None:
    expected = expected_shapes(config)
    for problem, names in (("has no", expected.keys() - found.keys()), ("has unknown", found.keys() - expected.keys())):
        if names:
            listed = ", ".join(sorted(names)[:5])
            raise UserError(
                f"{origin} {problem} tensor {listed} ({len(names)} in all); its config.json describes"
                f" {len(expected)} tensors"
            )
    for name, shape in expected.items():
        if found[name] != shape:
            raise UserError(f"{origin}: {name} has shape {list(found[name])}; its config.json describes {list(shape)}")


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
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    (folder / CONFIG_NAME).write_text(json.dumps(config.to_dict(), indent=2) + "\n")


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
    return DrafterConfig.from_dict(json.loads(path.read_text()), str(path))


def check_drafter(folder: Path) -> DrafterConfig:
    """Read a drafter's configuration and compare its tensors' names and shapes with it, without loading them.

    Raises:
        UserError: no such drafter, or its tensors are not those of its configuration.
    """
    config = read_config(folder)
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise UserError(f"no drafter at {folder}: there is no {WEIGHTS_NAME}")
    with safe_open(path, framework="pt") as file:
        shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    _check(shapes, config, str(path))
    return config


def load_drafter(
    folder: Path | str, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> Drafter:
    """Load a drafter for inference.

    Raises:
        UserError: no such drafter, or its tensors are not those of its configuration.
    """
    folder = Path(folder).expanduser()
    config = check_drafter(folder)
    state = {name: tensor.to(device, dtype) for name, tensor in load_file(folder / WEIGHTS_NAME).items()}
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict(state, assign=True)
    return drafter.eval()
