"""Small whole jobs on forked ranks, and what they leave behind."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dflash_train.cli import parse
from dflash_train.config import RunConfig
from dflash_train.job import check_job
from dflash_train.run import run_job
from support.ranks import run_ranks
from support.tiny import DENSE, HYBRID

STEPS = 4
QWEN3 = {"model_type": "qwen3", **DENSE, "num_hidden_layers": 4}
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    **HYBRID,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
TIMES = ("time", "packs_s", "tokens_s", "wait_share", "q_pre", "q_hs", "bound", "evidence", "seconds", "gpu_busy")


def settings(folder: Path, model: dict[str, Any], **changes: Any) -> list[str]:
    """A small job: 6 packs a step, a line and an evaluation every step or two, data and target shared by all runs."""
    config = {
        "run": {"dir": str(folder / "run")},
        "target": {"dtype": "float32", "config": model},
        "drafter": {"num_layers": 2, "target_layer_ids": [0, 1, 2], "block_size": 8, "mask_token_id": 130,
                    "num_sliding_layers": 1, "sliding_window": 32},
        "data": {"path": str(folder.parent / "data"), "synthetic_documents": 24,
                 "seq_len": 128, "anchors_per_pack": 32},
        "trainer": {"steps": STEPS, "packs_per_step": 6, "dtype": "float32", "compile": False},
        "optimizer": {"lr": 3e-3},
        "evaluate": {"interval": 2},
        "checkpoint": {"interval": 1, "keep": 9},
        "log": {"interval": 1},
        "channel": {"timeout_seconds": 30, "start_timeout_seconds": 60},
        "mesh": {"device": "cpu"},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.yaml").write_text(json.dumps(config))
    return [f"config={folder / 'job.yaml'}", *(f"{name}={value}" for name, value in changes.items())]


def run(folder: Path, world_size: int, model: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    """Run a job; returns what it logged."""
    argv = settings(folder, model, **changes)

    def work(rank: int) -> None:
        run_job(check_job(parse(RunConfig, argv, ""), dist.get_world_size()))

    run_ranks(work, world_size, folder)
    return logged(folder)


def logged(folder: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def evaluations(folder: Path) -> list[tuple[int, int, int]]:
    """Step, tokens and rounds of each evaluation."""
    lines = (folder / "run" / "evaluations.jsonl").read_text().splitlines()
    return [(row["step"], row["tokens"], row["rounds"]) for row in map(json.loads, lines)]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Logged rows less what depends on speed."""
    return [{name: value for name, value in row.items() if not name.endswith(TIMES)} for row in rows]


def state_of(folder: Path, step: int) -> dict[str, Any]:
    """All tensors and numbers of a checkpoint by name: weights, moments, schedule."""
    whole = folder / "state.pt"
    dcp_to_torch_save(folder / "run" / "checkpoints" / f"step-{step}" / "state", whole)
    return dict(_leaves(torch.load(whole, weights_only=True)))


def _leaves(node: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(node, dict):
        return [leaf for key, value in node.items() for leaf in _leaves(value, f"{name}.{key}")]
    if isinstance(node, (list, tuple)):
        return [leaf for index, value in enumerate(node) for leaf in _leaves(value, f"{name}.{index}")]
    return [(name, node)]


def assert_same_ending(one: Path, other: Path, steps: int) -> None:
    """Logged values, evaluations, weights, moments and schedule are equal to the last bit."""
    assert without_times(logged(one)) == without_times(logged(other))
    assert evaluations(one) == evaluations(other)
    states = state_of(one, steps), state_of(other, steps)
    assert states[0].keys() == states[1].keys()
    assert any("exp_avg" in name for name in states[0])
    for name, value in states[0].items():
        found = states[1][name]
        assert torch.equal(value, found) if isinstance(value, torch.Tensor) else value == found, name
