"""What a run says of itself: its settings and versions, where its drafter began, what a model card needs."""

import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from omegaconf import OmegaConf

from dflash_train.config import DrafterSection
from dflash_train.job import Job
from dflash_train.start import BorrowedLayers
from dflash_train.stop import same_command


def describe(job: Job) -> str:
    """Settings, versions and command line, as Markdown."""
    settings = OmegaConf.to_yaml(OmegaConf.structured(job.config))
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    return f"{versions}\n\n    {same_command()}\n\n" + "".join(f"    {line}\n" for line in settings.splitlines())


def _origin_on_card(section: DrafterSection) -> str | None:
    if section.init_from_target:
        return "the target's last layers"
    return section.init_from and Path(section.init_from).expanduser().absolute().name


def origin(job: Job) -> str:
    """Where the drafter's first values come from, as the end of a sentence."""
    section = job.config.drafter
    if section.init_from is not None:
        return f"from the drafter at {section.init_from}"
    if section.init_from_target:
        return f"from the target's last layers ({' and '.join(BorrowedLayers(job.target, job.drafter).parts)})"
    return "from drawn weights"


def facts_for_card(job: Job, epoch_steps: float) -> dict[str, Any]:
    """What an exported drafter's model card tells beside the run's identity; file names only, no machine's paths."""
    data, named = job.open_data(), job.config.target.path
    hub_name = named is not None and not Path(named).expanduser().exists()
    ledger = data.ledger
    return {
        "target": named if hub_name else job.target.name,
        "init_from": _origin_on_card(job.config.drafter),
        "template_options": ledger.settings.get("recipe", {}).get("options", {}),
        "epoch_steps": epoch_steps,
        "data": {
            "sources": [
                Path(path).name for path, _, _, heldout, *_ in ledger.settings.get("sources", []) if not heldout
            ]
            or ["synthetic"],
            "rows": ledger.rows["train"],
            "tokens": ledger.tokens["train"],
            "supervised_tokens": ledger.supervised_tokens["train"],
            "longest": int(data.train.lengths.max()),
            "generated_by": dict(ledger.generated_by + ledger.heldout_by),
        },
    }
