"""Train a drafter: torchrun --nproc-per-node N tools/train.py config=FILE key=value …"""

import os
import sys
import traceback
from pathlib import Path

from dflash_train.channel import ChannelError
from dflash_train.cli import parse, run_tool
from dflash_train.config import RunConfig
from dflash_train.dryrun import report
from dflash_train.job import check_job
from dflash_train.run import leave, run_job

DEMO = str(Path(__file__).parent / "configs" / "demo.yaml")


def main(argv: list[str]) -> int:
    """Check everything that can be checked alone, then meet the other ranks and train."""
    config = parse(RunConfig, argv, __doc__ or "", default_config=DEMO)
    if config.dry_run:
        print(report(check_job(config, None)))
        return 0
    job = check_job(config, int(os.environ.get("WORLD_SIZE", "1")))
    try:
        run_job(job)
        leave()
    except ChannelError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except RuntimeError:
        rank = int(os.environ.get("RANK", "0"))
        role = "drafter" if job.split.drafter_rank(rank) is not None else "target"
        traceback.print_exc()
        print(f"error: {role} rank {rank} failed (traceback above)", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    run_tool(main)
