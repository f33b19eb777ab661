"""Whole jobs on forked gloo ranks: every split is the same run, and so is a resumed one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash_data.target import find_target
from dflash_model import UserError, load_drafter
from dflash_train.cli import parse
from dflash_train.config import RunConfig
from dflash_train.job import check_job
from dflash_train.run import run_job
from dflash_train.step import add_noise
from support.jobs import QWEN3, QWEN3_5, STEPS, evaluations, logged, run, settings
from support.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def test_every_split_is_the_same_run(tmp_path: Path) -> None:
    """Colocated on 1 and 2, 1+1, 2+1 and 5+3 with the same packs per step: losses, acceptance and weights agree."""
    straight = run(tmp_path / "one", 1, QWEN3)
    weights = load_file(tmp_path / "one" / "run" / "checkpoints" / f"step-{STEPS}" / "dflash" / "model.safetensors")
    assert [row["step"] for row in straight] == [1, 2, 3, 4]
    assert straight[-1]["loss"] < straight[0]["loss"] - 0.02
    for name, ranks, changes in (
        ("both", 2, {"mesh.colocated": "true"}),
        ("1+1", 2, {}),
        ("2+1", 3, {}),
        ("5+3", 8, {}),
    ):
        other = run(tmp_path / name, ranks, QWEN3, **changes)
        for a, b in zip(straight, other, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
            assert (a["acc"], a["lr"]) == pytest.approx((b["acc"], b["lr"]), abs=1e-3)
        assert evaluations(tmp_path / "one") == evaluations(tmp_path / name)
        found = load_file(tmp_path / name / "run" / "checkpoints" / f"step-{STEPS}" / "dflash" / "model.safetensors")
        for key, tensor in weights.items():
            torch.testing.assert_close(found[key], tensor, rtol=2e-2, atol=2e-3)  # bf16 files


@pytest.mark.parametrize(("kind", "weighting", "noise"), [("lk", "decay", 0.3), ("ce", "dpace", 0.0)])
def test_other_objectives_do_not_depend_on_the_split(kind: str, weighting: str, noise: float, tmp_path: Path) -> None:
    """The target's distribution travels with the pack, weights that depend on losses are summed over all ranks.

    Noise belongs to a pack, not to the rank that trains on it.
    """
    changes = {"loss.kind": kind, "loss.weighting": weighting, "drafter.target_layer_ids": "[0,2,3]"}
    changes |= {"trainer.context_noise": noise}
    one = run(tmp_path / "one", 1, QWEN3, **changes)
    split = run(tmp_path / "split", 4, QWEN3, **changes, **{"mesh.target": 2, "mesh.drafter": 2})
    for a, b in zip(one, split, strict=True):
        assert (a["loss"], a["grad_norm"]) == pytest.approx((b["loss"], b["grad_norm"]), rel=1e-4)
    assert evaluations(tmp_path / "one") == evaluations(tmp_path / "split")
    if noise:
        assert [row["context_noise"] for row in one] == pytest.approx([noise * left / 4 for left in (4, 3, 2, 1)])


DFLASH2 = {"drafter.kind": "dflash2", "drafter.selector_rank": 24, "loss.selector_weight": 0.5}


@pytest.mark.parametrize(("kind", "weighting"), [("ce", "dpace"), ("kl", "decay")])
def test_dflash2_does_not_depend_on_the_split(kind: str, weighting: str, tmp_path: Path) -> None:
    """One rank, 1+3 (more drafter ranks than a base kernel has rows), and 1+3 that goes on as 2+2 behind step 2."""
    changes = DFLASH2 | {"loss.kind": kind, "loss.weighting": weighting, "optimizer.weight_decay": 0.1}
    one = run(tmp_path / "one", 1, QWEN3, **changes)
    three = run(tmp_path / "three", 4, QWEN3, **changes, **{"mesh.target": 1, "mesh.drafter": 3})
    shutil.copytree(tmp_path / "three", tmp_path / "two")
    for step in (3, 4):
        shutil.rmtree(tmp_path / "two" / "run" / "checkpoints" / f"step-{step}")
    two = run(tmp_path / "two", 4, QWEN3, **changes, **{"mesh.target": 2, "mesh.drafter": 2})
    names = ("loss", "selector_loss", "selector_missed", "grad_norm")
    for row, *others in zip(one, three, two, strict=True):
        for other in others:
            assert [other[name] for name in names] == pytest.approx([row[name] for name in names], rel=1e-4)
    assert 0 < one[0]["selector_missed"] < 1
    for name in ("three", "two"):
        assert evaluations(tmp_path / "one") == evaluations(tmp_path / name)
    folder = tmp_path / "two" / "run" / "checkpoints" / f"step-{STEPS}" / "dflash"
    drafter, tensors = load_drafter(folder), load_file(folder / "model.safetensors")
    assert drafter.config.kind == "dflash2"
    for layer in range(2):  # every new part has moved from where it starts
        assert tensors[f"layers.{layer}.attention_conv.kernel_projection.weight"].any()
        assert tensors[f"layers.{layer}.mlp_conv.base_kernel"][:, 1].any()
    assert tensors["candidate_selector.successor_codebook"].any()


def test_noise_is_the_packs_own() -> None:
    """As large as asked for, on the drafter's columns alone; the target's last state behind them stays."""
    context = [torch.zeros(400, 40) for _ in range(3)]
    for tensor, number in zip(context, (7, 7, 8), strict=True):
        add_noise(tensor, 30, 0.3, seed=1, number=number)
    assert context[0][:, :30].std().item() == pytest.approx(0.3, rel=0.03)
    assert not context[0][:, 30:].any()
    assert torch.equal(context[0], context[1])
    assert not torch.equal(context[0], context[2])
    other = torch.zeros(400, 40)
    add_noise(other, 30, 0.3, seed=2**40, number=7)
    assert not torch.equal(context[0], other)


def test_resumed_on_another_split_equals_never_stopped(tmp_path: Path) -> None:
    """As if killed after step 2: same command, then as 1+1 instead of 2+1; curves have one value a step."""
    straight = run(tmp_path / "straight", 3, QWEN3_5)
    for name, ranks in (("same", 3), ("other", 2)):
        shutil.copytree(tmp_path / "straight", tmp_path / name)
        for step in (3, 4):
            shutil.rmtree(tmp_path / name / "run" / "checkpoints" / f"step-{step}")
        resumed = run(tmp_path / name, ranks, QWEN3_5)
        assert [row["step"] for row in resumed] == [1, 2, 3, 4]
        for a, b in zip(straight, resumed, strict=True):
            assert (a["loss"], a["grad_norm"], a["lr"]) == (
                (b["loss"], b["grad_norm"], b["lr"])
                if name == "same"
                else pytest.approx((b["loss"], b["grad_norm"], b["lr"]), rel=1e-3)
            )
        assert evaluations(tmp_path / "straight") == evaluations(tmp_path / name)
        state = [
            tmp_path / run_ / "run" / "checkpoints" / "step-4" / "dflash" / "model.safetensors"
            for run_ in ("straight", name)
        ]
        if name == "same":
            assert state[0].read_bytes() == state[1].read_bytes()
        board = EventAccumulator(str(tmp_path / name / "run" / "tensorboard")).Reload()
        steps = [event.step for event in board.Scalars("Train/loss")]
        assert steps == [1, 2, 3, 4]
        for tag in (
            "Train/acc",
            "Train/streak",
            "Train/lr",
            "Acceptance/pooled",
            "Pipeline/target_tokens_s",
            "Pipeline/q_hs_0",
            "Pipeline/q_pre_0",
        ):
            assert tag in board.Tags()["scalars"]


def test_the_debug_configuration_runs_as_5_and_3(tmp_path: Path) -> None:
    """The shipped file itself, all of its ranks; two starts, the second finds the first one's data."""
    argv = [
        f"config={ROOT / 'tools/configs/debug.yaml'}",
        f"run.dir={tmp_path / 'run'}",
        f"data.path={tmp_path / 'data'}",
    ]
    argv += ["trainer.steps=3", "evaluate.packs=2", "log.interval=1"]

    def work(rank: int) -> None:
        run_job(check_job(parse(RunConfig, argv, ""), 8))

    for _ in range(2):
        shutil.rmtree(tmp_path / "run" / "checkpoints", ignore_errors=True)
        run_ranks(work, 8, tmp_path)
    assert [row["step"] for row in logged(tmp_path)] == [1, 2, 3]
    target = find_target(None, QWEN3)
    before = target.fingerprint()
    target.build_meta(torch.bfloat16)  # which notes the type in the configuration
    assert target.fingerprint() == before
    argv += ["target.config.intermediate_size=256", "drafter.intermediate_size=128"]
    assert "run.dir holds a run with target.files" in run_ranks(refusal(argv), 1, tmp_path)[0]


def test_a_head_in_float8_teaches_nearly_the_same(tmp_path: Path) -> None:
    changes = {"trainer.steps": 2, "evaluate.packs": 0, "checkpoint.interval": 0}
    even = {**QWEN3, "vocab_size": 144}
    exact = run(tmp_path / "exact", 1, even, **changes)
    found = run(tmp_path / "float8", 2, even, **changes, **{"loss.float8": "true"})
    for one, other in zip(exact, found, strict=True):
        assert 0 < abs(other["loss"] / one["loss"] - 1) < 1e-2
    argv = settings(tmp_path / "odd", QWEN3, **changes, **{"loss.float8": "true"})
    assert "loss.float8 is true; the head is 131 x 64, and" in run_ranks(refusal(argv), 1, tmp_path)[0]


def refusal(argv: list[str]) -> Callable[[int], str]:
    """A rank that starts a job alone and returns the sentence with which it is refused."""

    def work(rank: int) -> str:
        try:
            run_job(check_job(parse(RunConfig, argv, ""), 1))
        except UserError as error:
            return str(error)
        return "not refused"

    return work


def test_a_run_that_would_change_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "job", 1, QWEN3)
    argv = settings(tmp_path / "job", QWEN3, **{"trainer.packs_per_step": 3})
    assert "trainer.packs_per_step = 6, this one has 3" in run_ranks(refusal(argv), 1, tmp_path)[0]


@pytest.mark.parametrize(("kind", "then"), [("dflash", "dflash"), ("dflash", "dflash2"), ("dflash2", "dflash2")])
def test_warm_start_begins_where_the_other_drafter_ended(kind: str, then: str, tmp_path: Path) -> None:
    run(tmp_path / "first", 1, QWEN3, **{"drafter.kind": kind})
    drafter = tmp_path / "first" / "run" / "checkpoints" / f"step-{STEPS}" / "dflash"
    run(tmp_path / "second", 1, QWEN3, **{"drafter.init_from": drafter, "drafter.kind": then})
    before, after = evaluations(tmp_path / "first")[-1], evaluations(tmp_path / "second")[0]
    assert after[0] == 0
    assert after[1] == before[1]
    assert np.isclose(after[2], before[2], rtol=0.02)  # the file is bf16, the run was fp32
