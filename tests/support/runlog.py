"""A run's log, written line by line with chosen numbers."""

from pathlib import Path

import numpy as np

from dflash_data.packs import STATS
from dflash_train.mesh import Split
from dflash_train.metrics import RunLog
from dflash_train.verdict import DRAFTER, Accounts


def open_log(folder: Path, step: int, *, evaluated: bool = True, num_steps: int = 9) -> RunLog:
    return RunLog(
        folder, start_step=step, evaluated=evaluated, num_steps=num_steps, epoch_steps=9.0, flops_per_pack=1.0,
        peak=None, expected_tokens_s=None, description="",
    )  # fmt: skip


def log_step(log: RunLog, step: int, loss: float, packs: list[list[int]], tokens_a_pack: float) -> None:
    """A status line whose interval had these packs; four were received by the process that writes it."""
    targets, drafters = np.zeros((1, 1 + len(STATS))), np.zeros((1, len(DRAFTER)))
    targets[0, 0], targets[0, 1 + STATS.index("document_tokens")] = 4, 4 * tokens_a_pack
    drafters[0, DRAFTER.index("compute")], drafters[0, DRAFTER.index("packs")] = 2.0, 4
    drafters[0, DRAFTER.index("tokens")] = tokens_a_pack * sum(last - first + 1 for first, last in packs)
    values = {"loss": loss, "acc": 0.5, "streak": step / 10, "lr": 0.1}
    log.step(step, values, Accounts(Split(1, 1, False), 2, targets, drafters), parts={}, memory_gib=0.0, packs=packs)
