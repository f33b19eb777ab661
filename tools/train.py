"""Train a drafter: torchrun --nproc-per-node N tools/train.py config=FILE key=value …"""

import os
import traceback
from pathlib import Path

from dflash_model import UserError
from dflash_train.channel import ChannelError, first_line
from dflash_train.checkpoint import CheckpointError
from dflash_train.cli import parse, run_tool
from dflash_train.config import RunConfig
from dflash_train.dryrun import report
from dflash_train.job import check_job
from dflash_train.run import leave, run_job
from dflash_train.situation import Situation
from dflash_train.stop import Stop
from dflash_train.trainer import SkippedStepsError

DEMO = str(Path(__file__).parent / "configs" / "demo.yaml")


def main(argv: list[str]) -> int:
    """Check everything that can be checked alone, then meet the other ranks and train."""
    config = parse(RunConfig, argv, __doc__ or "", default_config=DEMO)
    ranks = os.environ.get("WORLD_SIZE")
    if config.dry_run:
        plan, too_much = report(check_job(config, int(ranks) if ranks else None))
        if os.environ.get("RANK", "0") == "0":
            print(plan)
            if too_much:
                raise UserError("; ".join(too_much))
        return 0
    job = check_job(config, int(ranks or "1"))
    stop, situation = Stop(), Situation.of(job.split, int(os.environ.get("RANK", "0")))
    stop.listen(situation)
    try:
        run_job(job, stop, situation)
        leave(stop, situation, config.channel.start_timeout_seconds)
    except UserError:
        stop.refuse()
        raise
    except (ChannelError, CheckpointError, SkippedStepsError) as error:
        situation.last_words(str(error))
        return 1
    except Exception as error:  # the last line must say who failed at what
        traceback.print_exc()
        situation.last_words(f"{type(error).__name__}: {first_line(error)} (traceback above)")
        return 1
    return 0


if __name__ == "__main__":
    run_tool(main)
