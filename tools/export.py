"""Export a drafter for serving: python tools/export.py checkpoint.path=runs/a/checkpoints/step-N export.path=DIR

Writes config.json, model.safetensors (bf16) and a model card; the folder loads in SGLang, vLLM and z-lab's package.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from dflash_model import UserError, check_drafter, save_drafter
from dflash_model.hub import expected_shapes, stored_tensors
from dflash_train.card import Origin, model_card
from dflash_train.cli import parse, run_tool
from dflash_train.config import key


@dataclass
class CheckpointPath:
    """What to export."""

    path: str = key("", "a checkpoint (runs/a/checkpoints/step-N) or a drafter's folder")


@dataclass
class ExportPath:
    """Where it goes."""

    path: str = key("", "folder to write; it must not exist, and its name must contain dflash")


@dataclass
class ExportConfig:
    """One export."""

    config: str = key("", "YAML file that the other keys override")
    checkpoint: CheckpointPath = field(default_factory=CheckpointPath)
    export: ExportPath = field(default_factory=ExportPath)
    target: str | None = key(None, "name of the target in the model card; default: what the checkpoint says")


def main(argv: list[str]) -> int:
    """Export; the folder appears complete or not at all."""
    config = parse(ExportConfig, argv, __doc__ or "")
    for name, value in (("checkpoint.path", config.checkpoint.path), ("export.path", config.export.path)):
        if not value:
            raise UserError(f"{name} is not set (--help lists the keys)")
    out = Path(config.export.path).expanduser()
    if "dflash" not in out.name.lower():
        raise UserError(f"export.path is {out}; its name must contain dflash, by which vLLM recognises the method")
    if out.exists():
        raise UserError(f"export.path is {out}; it exists: remove it or choose another name")
    origin = Origin.find(Path(config.checkpoint.path).expanduser())
    drafter = check_drafter(origin.drafter)
    card = model_card(drafter, origin, out.name, config.target)
    work = out.with_name(out.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    try:
        save_drafter(dict(stored_tensors(origin.drafter)), drafter, work)
        (work / "README.md").write_text(card)
        work.rename(out)
    except OSError as error:
        raise UserError(f"export.path is {out}; it cannot be written: {error}") from error
    named = config.target or origin.manifest["facts"]["target"]
    if "/" not in named:
        print(f"the card calls the target {named}; give target=OWNER/NAME if that is not where a server finds it")
    print(f"{out}: {len(expected_shapes(drafter))} tensors, block {drafter.block_size}; see README.md for serving it")
    return 0


if __name__ == "__main__":
    run_tool(main)
