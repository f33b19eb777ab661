"""tools/train.py with a fault planted in one rank: DFLASH_FAULT=KIND:RANK."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import train
from dflash_data.packs import Collator
from dflash_train import checkpoint
from dflash_train.channel import SendingChannel
from dflash_train.cli import run_tool
from dflash_train.step import DraftStep

AT = 12  # the call that fails


def plant(owner: Any, name: str, failure: Callable[[], BaseException], at: int) -> None:
    """Let the ``at``-th call of a method or function fail."""
    plain, calls = getattr(owner, name), iter(range(10**9))

    def failing(*args: Any, **options: Any) -> Any:
        if next(calls) == at:
            raise failure()
        return plain(*args, **options)

    setattr(owner, name, failing)


kind, _, rank = os.environ["DFLASH_FAULT"].partition(":")
if os.environ["RANK"] == rank:
    {
        "collate": lambda: plant(Collator, "__call__", lambda: ValueError("planted in collate"), AT),
        "transfer": lambda: plant(SendingChannel, "_deliver", lambda: OSError("planted in a transfer"), AT),
        "memory": lambda: plant(DraftStep, "loss", lambda: torch.OutOfMemoryError("planted"), AT),
        "disk": lambda: plant(
            checkpoint, "write_manifest", lambda: OSError(errno.ENOSPC, "No space left on device"), 0
        ),
    }[kind]()

if __name__ == "__main__":
    run_tool(train.main)
