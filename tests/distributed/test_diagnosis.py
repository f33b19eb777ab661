"""Causes of slowness planted in real jobs (2 target and 2 drafter ranks): the log names each of them."""

import multiprocessing
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import FailOnRecompileLimitHit

from dflash_data.packs import Collator
from dflash_data.target import ShardedTarget
from dflash_model import Drafter
from dflash_train import watch
from dflash_train.channel import SendingChannel
from dflash_train.checkpoint import Checkpointer
from dflash_train.cli import parse
from dflash_train.config import RunConfig
from dflash_train.job import check_job
from dflash_train.run import run_job
from dflash_train.situation import Situation
from dflash_train.step import DraftStep
from support.jobs import QWEN3, logged, settings
from support.ranks import run_ranks

TARGETS, DRAFTERS = (0, 1), (2, 3)
SLOW = {
    "trainer.steps": 24, "log.interval": 4, "evaluate.packs": 0, "checkpoint.interval": 100,
    "channel.depth": 1, "data.prefetch": 2,
    "trainer.packs_per_step": 2, "mesh.target": 2, "mesh.drafter": 2,
}  # fmt: skip


FEW = {"trainer.steps": 12, "log.interval": 3}


def slowed(owner: type, name: str, seconds: float, ranks: tuple[int, ...]) -> Callable[[int], None]:
    """A method takes longer on some ranks."""

    def plant(rank: int) -> None:
        plain = getattr(owner, name)

        def slow(*args: Any, **options: Any) -> Any:
            time.sleep(seconds)
            return plain(*args, **options)

        if rank in ranks:
            setattr(owner, name, slow)

    return plant


def recompiling(rank: int) -> None:
    """Every step has another shape for a compiler that takes its time."""
    plain, calls = DraftStep.loss, iter(range(2, 1000))

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        time.sleep(0.2)
        return graph.forward

    torch._dynamo.config.recompile_limit = 1000
    compiled = torch.compile(lambda x: x + 1, backend=backend, dynamic=False)

    def loss(*args: Any) -> Any:
        compiled(torch.ones(next(calls)))
        return plain(*args)

    if rank in DRAFTERS:
        DraftStep.loss = loss  # type: ignore[method-assign] - in a forked process


def diagnosed(folder: Path, plant: Callable[[int], None], **changes: Any) -> tuple[list[dict[str, Any]], str]:
    """Rows behind the start, when buffers are as full as they stay, and the log."""
    argv = settings(folder, QWEN3, **SLOW | changes)

    def work(rank: int) -> None:
        plant(rank)
        run_job(check_job(parse(RunConfig, argv, ""), dist.get_world_size()))

    run_ranks(work, 4, folder)
    return logged(folder)[3:], (folder / "run" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("plant", "changes", "name", "evidence"),
    [
        (slowed(ShardedTarget, "__call__", 0.2, TARGETS), {}, "target-bound", "in the target's forward"),
        (slowed(DraftStep, "loss", 0.2, DRAFTERS), {}, "drafter-bound", "a drafter rank takes 0.2"),
        (slowed(Collator, "__call__", 0.4, TARGETS), {}, "data-bound", "target ranks spend .* waiting for data"),
        (slowed(Collator, "__call__", 0.5, (1,)), {}, "data-bound", "target rank 1, for which the others wait, spend"),
        (slowed(SendingChannel, "_deliver", 0.25, TARGETS), {}, "channel-bound", "handing packs over"),
        (slowed(Situation, "at", 0.1, TARGETS), {}, "host-bound", "target ranks spend .* outside of data, forward"),
        (slowed(Situation, "at", 0.05, DRAFTERS), {}, "host-bound", "drafter rank . spends .*% of its time outside"),
        (slowed(Checkpointer, "_write", 0.3, DRAFTERS), FEW | {"checkpoint.interval": 1}, "checkpoint", "s of .* s"),
        (recompiling, FEW, "compiling", "s of .* s"),
    ],
    ids=["target", "drafter", "data", "one rank", "channel", "target host", "drafter host", "disk", "recompiles"],
)  # fmt: skip
def test_planted_causes_are_named(
    tmp_path: Path, plant: Callable[[int], None], changes: dict[str, Any], name: str, evidence: str
) -> None:
    rows, log = diagnosed(tmp_path / "job", plant, **changes)
    assert [row["bound"] for row in rows] == [name] * len(rows), [row["evidence"] for row in rows]
    assert re.search(evidence, rows[-1]["evidence"]), rows[-1]["evidence"]
    assert f"{name}: " in log
    for row in rows:
        spent = sum(value for stage, value in row["seconds"].items() if stage.startswith("drafter_"))
        assert spent - row["seconds"]["drafter_compile_s"] == pytest.approx(row["seconds"]["interval_s"])
    if name == "compiling":
        assert "ALARM: compiled again on drafter rank 2" in log


def test_the_story_this_project_comes_from(tmp_path: Path) -> None:
    """Prefetch queues full, the hidden-state queue empty, drafters idle: the targets are slow, not the drafters."""
    plant = slowed(ShardedTarget, "__call__", 0.1, TARGETS)
    rows, log = diagnosed(tmp_path / "job", plant, **{"data.prefetch": 46, "trainer.steps": 80})
    last = rows[1]
    assert min(last["q_pre"]) > 40
    assert last["q_hs"] == [0.0, 0.0]
    assert last["bound"] == "target-bound"
    assert "target-bound: drafter ranks wait" in log
    assert last["drafter_packs_s"] > last["target_packs_s"]


@pytest.mark.parametrize("frozen", DRAFTERS)
def test_a_frozen_rank_is_named_while_the_others_wait(frozen: int, tmp_path: Path) -> None:
    """Long before the channel's timeout; woken up again, the job goes on to its end.

    Rank 2 is the one that writes the log: of it the first target rank tells.
    """
    folder, calls, found = tmp_path / "job", iter(range(1000)), []

    def plant(rank: int) -> None:
        plain = DraftStep.loss
        watch.STALL_SECONDS = 1.0

        def freezing(*args: Any, **options: Any) -> Any:
            if rank == frozen and next(calls) == 6:
                os.kill(os.getpid(), signal.SIGSTOP)
            return plain(*args, **options)

        DraftStep.loss = freezing  # type: ignore[method-assign] - in a forked process

    def wake() -> None:
        for _ in range(600):
            time.sleep(0.1)
            log = folder / "run" / "log.txt"
            alarm = re.search(r"ALARM: no progress .*", log.read_text()) if log.is_file() else None
            if alarm:
                found.append(alarm[0])
                os.kill(int(re.findall(r"\(pid (\d+)\)", alarm[0])[0]), signal.SIGCONT)
                return
        for process in multiprocessing.active_children():  # the test fails by what it finds, not by a timeout
            assert process.pid is not None
            os.kill(process.pid, signal.SIGCONT)

    waker = threading.Thread(target=wake)
    waker.start()
    rows, _ = diagnosed(folder, plant)
    waker.join()
    assert found
    told = rf"ALARM: no progress for \d s, [^:]+: drafter rank {frozen} \(pid \d+\) is stopped"
    assert re.fullmatch(told, found[0]), found[0]
    assert rows[-1]["step"] == SLOW["trainer.steps"]


def test_the_recompile_limit_ends_the_job(tmp_path: Path) -> None:
    """One graph is allowed; the first layer's input needs no gradient and the second one's does, so there are two."""
    argv = settings(tmp_path / "job", QWEN3, **FEW, **{"trainer.compile": True, "evaluate.packs": 0})

    def work(rank: int) -> str:
        warnings.simplefilter("ignore")  # Dynamo looks at gradients of tensors that have none
        torch._dynamo.config.recompile_limit = 1
        torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend="eager")  # type: ignore[assignment]
        try:
            run_job(check_job(parse(RunConfig, argv, ""), dist.get_world_size()))
        except FailOnRecompileLimitHit:
            return "it ended"
        return "it went on, slower"

    assert run_ranks(work, 1, tmp_path) == ["it ended"]


def test_only_the_main_thread_computes(tmp_path: Path) -> None:
    """Neither the target's nor the drafter's forward ever runs on another thread: nothing races in the compiler."""

    def plant(rank: int) -> None:
        for owner, name in ((ShardedTarget, "__call__"), (Drafter, "forward")):
            plain = getattr(owner, name)

            def checked(*args: Any, plain: Any = plain, **options: Any) -> Any:
                assert threading.current_thread() is threading.main_thread()
                return plain(*args, **options)

            setattr(owner, name, checked)

    rows, log = diagnosed(tmp_path / "job", plant)
    assert len(rows) == 4
    assert "compiles; only the main thread may" not in log
