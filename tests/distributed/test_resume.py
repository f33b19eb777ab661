"""The run that cannot be lost: stopped, killed, damaged, diverged, resumed, on forked ranks."""

import json
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash_model import UserError
from dflash_train.audit import audit, report
from dflash_train.checkpoint import CheckpointError
from dflash_train.cli import parse
from dflash_train.config import RunConfig
from dflash_train.finite import FiniteWatch
from dflash_train.job import check_job
from dflash_train.metrics import append, read_jsonl
from dflash_train.resume import clear_leftovers
from dflash_train.retention import Retention, list_checkpoints, read_manifest, write_manifest
from dflash_train.run import run_job
from dflash_train.situation import Situation
from dflash_train.step import DraftStep
from dflash_train.stop import Stop
from dflash_train.trainer import SkippedStepsError
from support.jobs import QWEN3, assert_same_ending, evaluations, logged, run, settings, state_of, without_times
from support.ranks import run_ranks
from support.tiny import tiny_target

STEPS = 7
SPARSE = {"trainer.steps": STEPS, "checkpoint.interval": 2, "log.interval": 3, "evaluate.interval": 2}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2+1 that was never stopped; log lines, evaluations and checkpoints fall on different steps."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    run(folder, 3, QWEN3, **SPARSE)
    return folder


def start_like(straight: Path, name: str) -> Path:
    """An empty run folder that shares data with the straight run."""
    folder = straight.parent / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "run").mkdir(parents=True)
    return folder


def run_and_stop(
    folder: Path, ranks: int, asked: int, when: Callable[[Situation], bool], *, saves: bool = True, **changes: Any
) -> list[Any]:
    """Start a job and ask one rank to stop as soon as something is true of it; the steps behind which ranks left."""
    argv = settings(folder, QWEN3, **changes)

    def work(rank: int) -> int | None:
        job = check_job(parse(RunConfig, argv, ""), dist.get_world_size())
        stop, situation = Stop(saves=saves), Situation.of(job.split, rank)

        def watch() -> None:
            while not when(situation):
                time.sleep(0.001)
            stop.ask("the test")

        if rank == asked:
            threading.Thread(target=watch, daemon=True).start()
        run_job(job, stop, situation)
        return stop.agreed_step

    return run_ranks(work, ranks, folder)


MOMENTS: dict[str, Callable[[Situation], bool]] = {
    "at once": lambda _: True,
    "in the first step": lambda seen: seen.doing == "training step 1",
    "in a step": lambda seen: seen.doing == "training step 5",
    "evaluating before the first step": lambda seen: seen.doing == "evaluating after step 0",
    "evaluating": lambda seen: seen.doing == "evaluating after step 4",
    "at the last evaluation": lambda seen: seen.doing == f"evaluating after step {STEPS}",
    "saving": lambda seen: seen.doing == "saving step 4",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(straight: Path, moment: str) -> None:
    """All ranks leave behind one step, saved; the same command ends like the run that was never stopped."""
    folder = start_like(straight, moment.replace(" ", "-"))
    steps = run_and_stop(folder, 3, 2, MOMENTS[moment], **SPARSE)
    (step,) = {step for step in steps if step is not None}  # at the end, target ranks have gone already
    assert steps == [step] * 3 or step == STEPS
    saved = list_checkpoints(folder / "run" / "checkpoints")
    assert saved[-1:] == ([step] if step else [])
    assert audit(folder / "run").exact if step else not saved
    board = EventAccumulator(str(folder / "run" / "tensorboard")).Reload()
    written = [event.step for event in board.Scalars("Train/loss")] if "Train/loss" in board.Tags()["scalars"] else []
    assert written == [row["step"] for row in logged(folder)], "nothing of the last seconds is lost"
    run(folder, 3, QWEN3, **SPARSE)
    assert_same_ending(straight, folder, STEPS)
    assert audit(folder / "run").exact


def test_a_target_rank_may_ask_and_a_colocated_one(straight: Path) -> None:
    handing = run_and_stop(start_like(straight, "target-asks"), 3, 0, lambda seen: seen.item is not None, **SPARSE)
    assert len(set(handing)) == 1
    assert handing[0] is not None
    both = run_and_stop(
        start_like(straight, "colocated-asks"), 2, 1, MOMENTS["in a step"], **SPARSE, **{"mesh.colocated": "true"}
    )
    assert both in ([5, 5], [6, 6])


def job_process(argv: list[str], ranks: int, folder: Path) -> Any:
    """A whole job in a process group of its own, to be killed at once."""

    def work(rank: int) -> None:
        run_job(check_job(parse(RunConfig, argv, ""), dist.get_world_size()))

    def main() -> None:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        run_ranks(work, ranks, folder)

    process = get_context("fork").Process(target=main)
    process.start()
    return process


def test_killed_anywhere_it_ends_the_same(straight: Path, kills: int) -> None:
    """SIGKILL to all processes at a random moment, several times on the way; the same command, the same ending."""
    rng = random.Random(kills)
    for number in range(kills):
        folder = start_like(straight, f"killed-{number}")
        argv = settings(folder, QWEN3, **SPARSE)
        for _ in range(2):
            process = job_process(argv, 3, folder)
            process.join(rng.uniform(0.4, 4.0))
            if process.is_alive():
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        run(folder, 3, QWEN3, **SPARSE)
        assert_same_ending(straight, folder, STEPS)
        assert audit(folder / "run").exact
        assert not list((folder / "run" / "checkpoints").glob("*.partial"))
        shutil.rmtree(folder)


@pytest.mark.parametrize(("ranks", "changes"), [(2, {}), (1, {}), (8, {}), (6, {"mesh.target": 4, "mesh.drafter": 2})])
def test_another_split_takes_over(straight: Path, ranks: int, changes: dict[str, Any]) -> None:
    """From 2+1 to 1+1, colocated, 5+3 or 4+2 in the middle of a logging interval and back."""
    folder = start_like(straight, f"split-{ranks}")
    run_and_stop(folder, 3, 2, MOMENTS["in a step"], **SPARSE)
    run_and_stop(folder, ranks, ranks - 1, lambda seen: seen.doing == "training step 6", **SPARSE, **changes)
    run(folder, 3, QWEN3, **SPARSE)
    expected, found = without_times(logged(straight)), without_times(logged(folder))
    assert [row["packs"] for row in found] == [row["packs"] for row in expected]
    for one, other in zip(expected, found, strict=True):
        for name in ("loss", "grad_norm", "acc", "streak", "lr"):
            assert other[name] == pytest.approx(one[name], rel=1e-3), name
    assert evaluations(folder) == evaluations(straight)
    found_audit = audit(folder / "run")
    assert found_audit.exact
    assert len({start["split"] for start in found_audit.starts}) == 2, report(folder / "run", found_audit)


# What would change the run -------------------------------------------------------------------------------------------


def outcome(argv: list[str], error: type[Exception], prepare: Callable[[], None] | None = None) -> Callable[[int], str]:
    """A rank that starts a job and returns the sentence with which it ends."""

    def work(rank: int) -> str:
        if prepare is not None:
            prepare()
        try:
            run_job(check_job(parse(RunConfig, argv, ""), dist.get_world_size()))
        except error as caught:
            return str(caught)
        return "nothing happened"

    return work


def test_a_changed_setting_is_refused_unless_it_is_allowed(straight: Path) -> None:
    folder = start_like(straight, "allowed")
    run_and_stop(folder, 1, 0, MOMENTS["in a step"], **SPARSE)
    for change, sentence in (
        ({"trainer.packs_per_step": 3}, "trainer.packs_per_step = 6, this one has 3; resuming would change the run"),
        ({"optimizer.lr": 1e-3}, r"allow it with resume.allow=[optimizer.lr]"),
        ({"optimizer.lr": 1e-3, "resume.allow": "run.sed"}, "resume.allow names run.sed; it takes"),
        (
            {"drafter.mask_token_id": 129},
            "drafter = {'dflash_config': {'mask_token_id': 130}}, this one has {'dflash_config': {'mask_token_id': 12",
        ),
    ):
        argv = settings(folder, QWEN3, **SPARSE | change)
        assert sentence in run_ranks(outcome(argv, UserError), 1, folder)[0]
    shape = settings(folder, QWEN3, **SPARSE | {"drafter.num_layers": 3, "resume.allow": "drafter"})
    assert (
        "resume.allow names drafter; another shape takes another run"
        in run_ranks(outcome(shape, UserError), 1, folder)[0]
    )
    changes = {"trainer.packs_per_step": 3, "trainer.steps": 9, "optimizer.weight_decay": 0.25}
    run(folder, 1, QWEN3, **SPARSE | changes, **{"resume.allow": ",".join(changes)})
    found = audit(folder / "run")
    assert (found.exact, found.packs) == (True, 5 * 6 + 4 * 3)
    assert found.starts[-1]["changes"] == [
        "trainer.packs_per_step was 6 up to step 5, now 3",
        "trainer.steps was 7 up to step 5, now 9",
        "optimizer.weight_decay was 0.0 up to step 5, now 0.25",
    ]
    decays = {value for name, value in state_of(folder, 9).items() if name.endswith(".weight_decay")}
    assert decays == {0.0, 0.25}, "the loaded state does not put the old one back"


def test_a_stopped_bench_saves_nothing(straight: Path) -> None:
    folder = start_like(straight, "bench")
    left = run_and_stop(folder, 2, 1, MOMENTS["in a step"], saves=False, **SPARSE | {"checkpoint.interval": 0})
    assert left in ([5, 5], [6, 6])
    assert not list_checkpoints(folder / "run" / "checkpoints")
    assert "(the test), nothing is saved" in (folder / "run" / "log.txt").read_text()


def test_a_setting_younger_than_the_checkpoint_had_its_default(straight: Path) -> None:
    folder = start_like(straight, "older")
    run_and_stop(folder, 1, 0, MOMENTS["in a step"], **SPARSE)
    checkpoints = folder / "run" / "checkpoints"
    step = list_checkpoints(checkpoints)[-1]
    manifest = read_manifest(checkpoints, step)
    del manifest["loss.kind"], manifest["loss.weighting"]
    write_manifest(checkpoints / f"step-{step}", manifest)
    argv = settings(folder, QWEN3, **SPARSE | {"loss.weighting": "dpace", "optimizer.beta1": 0.5})
    sentence = run_ranks(outcome(argv, UserError), 1, folder)[0]
    assert "run.dir holds a run with loss.weighting = decay, this one has dpace; with optimizer.beta1 = 0.9" in sentence
    assert "allow it with resume.allow=[loss.weighting,optimizer.beta1]" in sentence, "all that differs at once"
    rows = run(folder, 1, QWEN3, **SPARSE)
    assert rows[-1]["step"] == STEPS


# Checkpoints ---------------------------------------------------------------------------------------------------------


def test_which_checkpoints_stay() -> None:
    known = {10: 1.5, 20: 1.9, 30: None, 40: 1.7, 50: 1.9, 60: 1.2, 70: None}
    assert Retention(1, 0).choose(known) == ({50, 70}, 50)
    assert Retention(2, 30).choose(known) == ({30, 50, 60, 70}, 50)
    assert Retention(1, 0).choose({10: None}) == ({10}, None)


def test_the_newest_the_milestones_and_the_best_are_kept(straight: Path) -> None:
    folder = start_like(straight, "kept")
    run(
        folder,
        1,
        QWEN3,
        **SPARSE | {"checkpoint.interval": 1, "checkpoint.keep": 1, "checkpoint.milestone_interval": 3},
    )
    checkpoints = folder / "run" / "checkpoints"
    best = max((tokens / rounds, step) for step, tokens, rounds in evaluations(folder) if step)[1]
    assert list_checkpoints(checkpoints) == sorted({3, 6, STEPS, best})
    assert (checkpoints / "best").resolve().name == f"step-{best}"


@pytest.mark.parametrize("name", ["state/__0_0.distcp", "state/.metadata", "dflash/model.safetensors"])
def test_a_flipped_byte_is_found(straight: Path, name: str) -> None:
    folder = start_like(straight, "flipped")
    shutil.copytree(straight / "run", folder / "run", dirs_exist_ok=True, symlinks=True)
    damaged = folder / "run" / "checkpoints" / f"step-{STEPS}" / name
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    argv = settings(folder, QWEN3, **SPARSE)
    for sentence in run_ranks(outcome(argv, UserError), 3, folder):
        assert f"step-{STEPS}/{name} is not what was written: its checksum differs" in sentence
        assert f"remove {damaged.parents[1]} and the same command continues from step 6" in sentence
    shutil.rmtree(damaged.parents[1])
    run(folder, 3, QWEN3, **SPARSE)
    assert_same_ending(straight, folder, STEPS)


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda text: text[:100], "is damaged"),
        (lambda text: text.replace('"packs": 42', '"packs": 24'), "is not what was written"),
        (None, "is missing"),
    ],
)
def test_a_damaged_manifest_is_named(straight: Path, harm: Callable[[str], str] | None, problem: str) -> None:
    folder = start_like(straight, "manifest")
    shutil.copytree(straight / "run", folder / "run", dirs_exist_ok=True, symlinks=True)
    manifest = folder / "run" / "checkpoints" / f"step-{STEPS}" / "manifest.json"
    text = manifest.read_text()
    manifest.unlink() if harm is None else manifest.write_text(harm(text))
    sentence = run_ranks(outcome(settings(folder, QWEN3, **SPARSE), UserError), 1, folder)[0]
    assert (
        sentence == f"{manifest} {problem}; remove {manifest.parent} and the same command continues from the one before"
    )


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    """A checkpoint that was about to be replaced is put back; half-written and half-removed ones go."""
    for name in ("step-10", "step-20.superseded", "step-20.partial", "step-10.superseded", "step-5.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(name)
    (tmp_path / "step-0030").mkdir()
    clear_leftovers(tmp_path)
    assert list_checkpoints(tmp_path) == [10, 20]
    assert (tmp_path / "step-20" / "manifest.json").read_text() == "step-20.superseded"
    assert (tmp_path / "step-10" / "manifest.json").read_text() == "step-10"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0030", "step-10", "step-20"]


def test_a_target_with_other_weights_is_another_run(straight: Path) -> None:
    folder = start_like(straight, "other-target")
    tiny_target("qwen3").save_pretrained(folder / "target")
    named = SPARSE | {"target.path": folder / "target", "target.config": "null"}
    run_and_stop(folder, 1, 0, MOMENTS["in a step"], **named)
    weights = folder / "target" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    sentence = run_ranks(outcome(settings(folder, QWEN3, **named), UserError), 1, folder)[0]
    assert "run.dir holds a run with target.files" in sentence


def limit_files() -> None:
    """As a full disk: writing beyond a few hundred kB fails."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))


def test_a_full_disk_ends_the_run_with_one_sentence_and_the_last_checkpoint(straight: Path) -> None:
    folder = start_like(straight, "full")
    run_and_stop(folder, 3, 2, MOMENTS["in a step"], **SPARSE)
    saved = list_checkpoints(folder / "run" / "checkpoints")
    argv = settings(folder, QWEN3, **SPARSE)
    sentences = run_ranks(until_error(outcome(argv, CheckpointError, limit_files)), 3, folder)
    assert "could not be written" in sentences[2]
    assert "File too large" in sentences[2]
    assert f"the last complete one is step-{saved[-1]}" in sentences[2]
    assert list_checkpoints(folder / "run" / "checkpoints") == saved
    run(folder, 3, QWEN3, **SPARSE)
    assert_same_ending(straight, folder, STEPS)


def until_error(work: Callable[[int], str]) -> Callable[[int], str]:
    """Target ranks wait for drafters that have left; they end with the channel's error, which is not the point."""

    def guarded(rank: int) -> str:
        try:
            return work(rank)
        except RuntimeError as error:
            return str(error)

    return guarded


def test_a_folder_in_use_is_refused(straight: Path) -> None:
    folder = start_like(straight, "busy")
    argv = settings(folder, QWEN3, **SPARSE | {"trainer.steps": 500})
    process = job_process(argv, 1, folder)
    while not (folder / "run" / "metrics.jsonl").is_file():
        time.sleep(0.05)
    under_way = folder / "run" / "checkpoints" / "step-499.partial"
    under_way.mkdir(parents=True)
    sentence = run_ranks(outcome(argv, UserError), 1, folder)[0]
    assert under_way.is_dir(), "the other job may be writing it"
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert "another job is running in it" in sentence


# Steps whose gradients are not finite --------------------------------------------------------------------------------


def test_a_poisoned_step_is_skipped_by_all(straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pack of 2 drafter ranks' step 3 has an infinite loss: no weight moves, the run goes on, the pack is named."""
    plain = DraftStep.loss

    def poisoned(self: DraftStep, pack: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss_sum, weight_sum = plain(self, pack, *rest)
        return (loss_sum * float("inf") if pack.item.number == 13 else loss_sum), weight_sum

    monkeypatch.setattr(DraftStep, "loss", poisoned)
    folder = start_like(straight, "poisoned")
    rows = run(folder, 3, QWEN3, **SPARSE | {"log.interval": 1, "mesh.target": 1, "mesh.drafter": 2})
    assert [row["skipped"] for row in rows] == [0, 0, 1, 1, 1, 1, 1]
    assert (rows[2]["loss"], rows[2]["grad_norm"]) == (None, None)
    assert rows[3]["loss"] < rows[0]["loss"]
    assert "step skipped, its gradients are not finite: packs 12 to 17" in (folder / "run" / "log.txt").read_text()
    assert "1 steps were skipped" in report(folder / "run", audit(folder / "run"))


def test_a_diverged_run_stops_with_a_checkpoint(straight: Path) -> None:
    folder = start_like(straight, "diverged")
    changes = {"optimizer.lr": 1e30, "optimizer.warmup_ratio": 0, "trainer.max_skipped_steps": 3, "trainer.steps": 50}
    argv = settings(folder, QWEN3, **SPARSE | changes)
    sentences = run_ranks(outcome(argv, SkippedStepsError), 3, folder)
    assert "trainer.max_skipped_steps is 3, and as many steps in a row" in sentences[2]
    assert sentences[:2] == ["nothing happened"] * 2, "the target ranks leave in order"
    step = list_checkpoints(folder / "run" / "checkpoints")[-1]
    manifest = json.loads((folder / "run" / "checkpoints" / f"step-{step}" / "manifest.json").read_text())
    assert manifest["position"]["skipped_in_a_row"] == 4, "flags are read a step late"


def test_a_run_that_was_stopped_for_them_gets_another_chance() -> None:
    assert (FiniteWatch(3, 5, 3).in_a_row, FiniteWatch(3, 5, 2).in_a_row) == (0, 2)


def test_an_evaluation_that_is_done_again_is_told_once(straight: Path) -> None:
    """Stopped in it, resumed, killed behind its line, resumed: the line of the lost one goes."""
    folder = start_like(straight, "evaluated")
    run_and_stop(folder, 3, 2, MOMENTS["evaluating"], **SPARSE)
    append(folder / "run" / "evaluations.jsonl", {"step": 4, "tokens": 1, "rounds": 1, "pooled": 1.0})
    run(folder, 3, QWEN3, **SPARSE)
    assert_same_ending(straight, folder, STEPS)


def test_a_torn_line_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    append(path, {"step": 3})
    assert read_jsonl(path) == [{"step": 1}, {"step": 3}]
    assert path.read_text() == '{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n'


# The audit -----------------------------------------------------------------------------------------------------------


def test_the_audit_names_what_is_wrong(straight: Path) -> None:
    folder = start_like(straight, "audited")
    shutil.copytree(straight / "run", folder / "run", dirs_exist_ok=True, symlinks=True)
    rows = logged(folder)
    assert [row["packs"] for row in rows] == [[[0, 5]], [[6, 17]], [[18, 35]], [[36, 41]]]
    rows[1]["packs"], rows[2]["packs"] = [[6, 9], [12, 17]], [[17, 35]]
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = audit(folder / "run")
    assert (found.exact, found.missing, found.repeated) == (False, [[10, 11]], [[17, 17]])
    assert "never trained on: packs 10 to 11" in report(folder / "run", found)
    assert "more than once: packs 17 to 17" in report(folder / "run", found)
