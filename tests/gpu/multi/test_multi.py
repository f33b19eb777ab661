"""On two or more GPUs of one host: the channel, the splits, and what is left of a killed job.

    python -m pytest -x tests/gpu/multi                    # all GPUs of this machine
    DFLASH_MULTI=cpu:3 python -m pytest -x tests/gpu/multi # rehearsed on three CPU ranks

Every job is a real one, under torchrun.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from faults import CELLS, run_cell

ROOT = Path(__file__).parents[3]
DEVICE, _, COUNT = os.environ.get("DFLASH_MULTI", "cuda").partition(":")
RANKS = int(COUNT) if COUNT else torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(RANKS < 2, reason="needs two CUDA devices")]
PACKS = 24  # of a step, which all these numbers of drafters divide
SPLITS = sorted({(1, 1), (RANKS - 1, 1), (RANKS - RANKS // 2, RANKS // 2), (4, 1), (5, 1), (1, 3), (5, 3)})
FITTING = [split for split in SPLITS if sum(split) <= RANKS]


def torchrun(ranks: int, *arguments: str) -> str:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *arguments,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


@pytest.mark.parametrize("split", FITTING, ids=str)
def test_packs_arrive_as_they_were_sent(split: tuple[int, int]) -> None:
    assert "packs are equal on both ends" in torchrun(
        sum(split), "tests/gpu/multi/digests.py", *(str(part) for part in split), DEVICE
    )


def curve(folder: Path, ranks: int, *mesh: str) -> list[float]:
    """Losses and the acceptance of a job of 12 steps."""
    torchrun(
        ranks, "tools/train.py", "config=tools/configs/debug.yaml", f"mesh.device={DEVICE}", f"run.dir={folder}",
        f"data.path={folder.parent / 'data'}", "trainer.steps=12", f"trainer.packs_per_step={PACKS}", "log.interval=1",
        "checkpoint.interval=0", "evaluate.interval=12", *mesh,
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = json.loads((folder / "evaluations.jsonl").read_text().splitlines()[-1])
    return [*(row["loss"] for row in rows), last["pooled"]]


def test_every_split_learns_the_same(tmp_path: Path) -> None:
    """A target sharded over several ranks, uneven numbers of drafters, both roles on each rank: all as on one rank."""
    expected = curve(tmp_path / "one", 1, "mesh.colocated=true")
    assert expected[-2] < expected[0] - 0.2
    for targets, drafters in FITTING:
        mesh = f"mesh.target={targets}", f"mesh.drafter={drafters}"
        found = curve(tmp_path / f"{targets}-{drafters}", targets + drafters, *mesh)
        assert found == pytest.approx(expected, rel=2e-3), f"{targets}+{drafters}"
    if PACKS % RANKS == 0:
        assert curve(tmp_path / "both", RANKS, "mesh.colocated=true") == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("victim", ["target", "drafter"])
def test_a_killed_rank_takes_the_job_with_it(victim: str, tmp_path: Path) -> None:
    """Nothing stays behind on the GPUs, the dead rank is named, and the same command goes on."""
    targets = RANKS - RANKS // 2
    rank = targets - 1 if victim == "target" else RANKS - 1
    cell = next(cell for cell in CELLS if cell.name == "sigkill-step-13-1")
    settings = (f"mesh.device={DEVICE}", f"trainer.packs_per_step={RANKS - targets}")
    expected = cell.expected.replace("rank 1", f"rank {rank}")
    run_cell(
        replace(cell, victim=rank, ranks=(targets, RANKS - targets), settings=settings, expected=expected), tmp_path
    )
