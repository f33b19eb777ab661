"""The loop of a drafter rank: it trains on the packs that come, evaluates, saves and tells."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile

from dflash_data.clock import StageClock
from dflash_data.packs import HiddenPack
from dflash_data.schedule import Schedule, Segment, Stream
from dflash_model.stopwatch import Stopwatch, measured
from dflash_train.acceptance import Acceptance, Rounds
from dflash_train.build import build_drafter, build_step
from dflash_train.channel import Receiver
from dflash_train.checkpoint import Checkpointer, Position
from dflash_train.evaluate import evaluate_pack
from dflash_train.finite import FiniteWatch
from dflash_train.job import Job
from dflash_train.mesh import Meshes
from dflash_train.metrics import Interval, RunLog, as_ranges, logger
from dflash_train.parallelize import begin_micro_step
from dflash_train.situation import Situation
from dflash_train.step import Tally, add_noise
from dflash_train.stop import Stop
from dflash_train.titan import GarbageCollection, apply_gradients, build_optimizer
from dflash_train.verdict import DRAFTER, STAGES, Accounts
from dflash_train.watch import CompileWatch, DeviceWatch, StallWatch

GC_INTERVAL = 100
EVALUATE_STOP_PACKS = 4  # held-out packs between two looks for a stop


class SkippedStepsError(RuntimeError):
    """Too many steps in a row had gradients that are not finite."""


@dataclass(frozen=True)
class Course:
    """What a drafter rank goes through.

    Attributes:
        schedule: the job's sequence.
        position: where the run stands when it begins.
        heldout_chunks: drafter forwards per held-out pack.
        epoch_steps: steps in one epoch.
        acceptance_name: ``replay`` if the held-out responses are the target's own, else ``teacher-forced``.
    """

    schedule: Schedule
    position: Position
    heldout_chunks: int
    epoch_steps: float
    acceptance_name: str


class Trainer:
    """One drafter rank. ``log`` is None on all but the first."""

    def __init__(
        self, job: Job, meshes: Meshes, course: Course, *, receiver: Receiver, checkpointer: Checkpointer, stop: Stop,
        situation: Situation, clock: StageClock, log: RunLog | None,
    ) -> None:  # fmt: skip
        assert meshes.drafter is not None
        self.job, self.meshes, self.course = job, meshes, course
        self.group = meshes.drafter.get_group()
        self.receiver, self.checkpointer, self.log = receiver, checkpointer, log
        self.stop, self.situation, self.clock = stop, situation, clock
        self.compiling = CompileWatch(self._alarm)
        self.devices = DeviceWatch(meshes.device)
        self.drafter = build_drafter(job, meshes)
        self.optimizers, self.lr_schedule = build_optimizer(
            self.drafter, job.config.optimizer, job.config.trainer.steps
        )
        self.draft = build_step(job, meshes, self.drafter)
        self.own_rank = job.split.drafter_rank(meshes.rank) or 0
        self.tally = Tally.of(job.drafter, meshes.device)
        self.interval = Interval.empty(job.split.num_targets)
        self.evaluated = False
        self.stalls: StallWatch | None = None
        self.grad_norm, self.lr = torch.zeros((), device=meshes.device), 0.0
        position = course.position
        self.finite = FiniteWatch(job.config.trainer.max_skipped_steps, position.skipped, position.skipped_in_a_row)
        if position.step:
            checkpointer.load(position.step, self.drafter, self.optimizers, self.lr_schedule)
            self._restore_unlogged(position)

    def run(self) -> None:
        """Go through the schedule, or to where all ranks agree to stop."""
        collector = GarbageCollection(GC_INTERVAL)
        self.clock.take()  # what came before is the start
        segments = self.course.schedule.segments
        for index, segment in enumerate(segments):
            follows = index + 1 < len(segments) and segments[index + 1].stream is Stream.HELDOUT
            if segment.stream is Stream.HELDOUT:
                self._finish_steps()
                with self.clock.stage("evaluate"):
                    acceptance = self.evaluate(segment)
                stopped = self.stop.agreed_step is not None
                evaluated = not stopped
            else:
                self._train(segment, collector)
                with self.clock.stage("agree"):
                    stopped = self.stop.drafters_agree(self.meshes.control, segment.step)
                acceptance, evaluated = None, not follows
            due = self._is_due(segment.step, self.job.config.checkpoint.interval) and not follows
            if segment.step and (due or (stopped and self.stop.saves)):
                self.save(segment.step, acceptance, evaluated=evaluated)
            if stopped:
                break
        self._finish_save(wait=True)
        if self.stalls is not None:
            self.stalls.close()
        if self.stop.agreed_step is None:
            self.receiver.close()

    def _train(self, segment: Segment, collector: GarbageCollection) -> None:
        """One step and what belongs to it: its log line, the news of saving, the watch over gradients."""
        self.situation.at(f"training step {segment.step}")
        logs = self._is_due(segment.step, self.job.config.log.interval) or segment.step == 1
        parts = Stopwatch(self.meshes.device) if logs else None
        with self._traced(segment.step):
            self.train_step(segment, parts)
        collector.run(segment.step)
        if segment.step == self.course.position.step + 1:
            self.meshes.settle(self.job.config.channel.timeout_seconds)
            self.compiling.settle()
            if self.log is not None:
                self.situation.at("training")  # what came before compiled
                self.stalls = StallWatch(self.situation, self.job.config.channel.timeout_seconds, self._alarm)
        if parts is not None:
            self._finish_steps()
            with self.clock.stage("log"):
                self._write_log(segment.step, parts)
        self._finish_save(wait=False)
        if self.finite.too_many:
            self.stop.end(segment.step, first=self.own_rank == 0)
            self.save(segment.step, None, evaluated=False)
            self._finish_save(wait=True)
            raise SkippedStepsError(self.finite.sentence())

    def _alarm(self, alarm: str) -> None:
        """On any rank and thread."""
        if self.log is not None:
            self.log.alarm(alarm)
        else:
            logger.warning(f"ALARM: {alarm}")

    @contextmanager
    def _traced(self, step: int) -> Iterator[None]:
        """Write a trace of the step if ``profile.steps`` names it."""
        if self.log is None or step not in self.job.config.profile.steps:
            yield
            return
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.meshes.device.type == "cuda" else [])]
        folder, trace = self.job.run_dir / "profile", profile(activities=kinds)
        trace.start()
        yield
        self._finish_steps()
        with self.clock.stage("log"):
            trace.stop()
            folder.mkdir(exist_ok=True)
            trace.export_chrome_trace(str(folder / f"step-{step}.json.gz"))
        logger.info(f"traced step {step}: {folder / f'step-{step}.json.gz'}, for ui.perfetto.dev")

    def _noise(self, step: int) -> float:
        """Standard deviation of the noise on the context in a step."""
        trainer = self.job.config.trainer
        return trainer.context_noise * (1 - (step - 1) / trainer.steps)

    def train_step(self, segment: Segment, parts: Stopwatch | None) -> None:
        """One optimizer step over this rank's share of the segment's packs.

        The numerators of the loss are backpropagated; gradients, averaged over ranks by FSDP, are scaled once by
        ``D / sum of weights`` over all ranks and micro-steps, so a token's weight does not depend on where it landed.

        Args:
            segment: of training.
            parts: gets the times of the step's parts, if it logs.
        """
        weight_total = torch.zeros((), device=self.meshes.device)
        noise, numbers = self._noise(segment.step), range(segment.first_number, segment.first_number + segment.count)
        for micro in range(self.job.micro_steps):
            pack = self._receive()
            begin_micro_step(self.drafter, last=micro == self.job.micro_steps - 1)
            with self.clock.stage("compute"):
                if noise:
                    width, seed = self.job.drafter.context_size, self.job.config.run.seed
                    add_noise(pack.tensors["context_SE"], width, noise, seed, pack.item.number)
                loss_sum, weight_sum = self.draft.loss(pack, self.tally, parts)
                with measured(parts, "backward"):
                    loss_sum.backward()
                weight_total += weight_sum
        with self.clock.stage("compute"):
            dist.all_reduce(weight_total, group=self.group)
            with measured(parts, "optimizer"):
                self.grad_norm, self.lr = apply_gradients(
                    self.drafter, self.optimizers, self.lr_schedule,
                    scale=self.job.split.num_drafters / weight_total.clamp_min(1e-6),
                    max_norm=self.job.config.optimizer.max_grad_norm,
                )  # fmt: skip
            finite = torch.isfinite(self.grad_norm)
            self.tally.commit(finite)
        with self.clock.stage("device"):  # the flag of the step before: the device is still at it, or was too fast
            self._report_skipped(self.finite.add(finite, numbers))

    def _finish_steps(self) -> None:
        """Wait for the device: what it is still at is training, and not what comes next.

        With log lines four steps apart, this was 4 to 29 % of the time at 27B sizes.
        """
        if self.meshes.device.type == "cuda":
            with self.clock.stage("device"):
                torch.cuda.current_stream().synchronize()

    def _report_skipped(self, steps: Iterable[range]) -> None:
        for packs in steps:
            if self.log is not None:
                logger.warning(f"step skipped, its gradients are not finite: packs {packs.start} to {packs.stop - 1}")

    def evaluate(self, segment: Segment) -> float | None:
        """Acceptance length on the held-out packs; weights and the training stream are untouched.

        Returns:
            The pooled acceptance length, or None if the run was stopped on the way.
        """
        if self.log is not None:
            logger.info("evaluating on the held-out packs")
        self.interval.wait_s += self.receiver.waiting.take()
        self.drafter.eval()
        mine: list[Rounds] = []
        for offset in range(0, segment.count, self.job.split.num_drafters):
            self.situation.at(f"evaluating after step {segment.step}")
            pack = self.receiver.receive()
            self.situation.at(self.situation.doing, pack.item)
            mine += evaluate_pack(self.draft, pack, self.course.heldout_chunks)
            if offset % EVALUATE_STOP_PACKS == 0 and self.stop.drafters_agree(self.meshes.control, segment.step):
                return None
        for module in (self.drafter, *self.drafter.layers):
            assert isinstance(module, FSDPModule)
            module.reshard()  # no backward did it
        self.drafter.train()
        if not self.evaluated:  # a resumed run compiles its forward without gradients only now
            self.evaluated = True
            self.compiling.settle()
        self.receiver.waiting.take()  # an evaluation's waiting is not training's
        everyone: list[list[Rounds]] = [[] for _ in range(self.job.split.num_drafters)]
        dist.all_gather_object(everyone, mine, group=self.meshes.control)
        texts = [text for part in everyone for text in part]
        if not texts:
            return None
        if self.log is not None:
            self.log.evaluation(segment.step, texts, self.job.drafter.block_size, self.course.acceptance_name)
        return Acceptance.of(texts).pooled

    def save(self, step: int, acceptance: float | None, *, evaluated: bool) -> None:
        """Begin to write a checkpoint; training goes on when the state is copied."""
        self.situation.at(f"saving step {step}")
        self._finish_steps()
        with self.clock.stage("save"):
            self._report_skipped(self.finite.settle())
            self._finish_save(wait=True)
            position = self._position(step, acceptance, evaluated=evaluated)
            self.checkpointer.save(position, self.drafter, self.optimizers, self.lr_schedule)

    def _finish_save(self, *, wait: bool) -> None:
        news = self.checkpointer.wait() if wait else self.checkpointer.finished()
        if news is not None and self.log is not None:
            logger.info(news)

    def _position(self, step: int, acceptance: float | None, *, evaluated: bool) -> Position:
        """Where the run stands behind a step; all drafter ranks call it."""
        unlogged: list[dict[str, Any]] = [{}] * self.job.split.num_drafters
        own = {"sums": self.tally.sums.tolist(), "packs": self.interval.numbers, "tokens": self.interval.tokens}
        dist.all_gather_object(unlogged, own, group=self.meshes.control)
        start = self.course.position
        return Position(
            step=step,
            packs=start.packs + (step - start.step) * self.job.config.trainer.packs_per_step,
            evaluated=evaluated,
            acceptance=acceptance,
            skipped=self.finite.skipped,
            skipped_in_a_row=self.finite.in_a_row,
            unlogged=unlogged,
        )

    def _restore_unlogged(self, position: Position) -> None:
        """Take up what the checkpoint's ranks had not logged; on another split the first rank takes it all."""
        parts: list[dict[str, Any]] = position.unlogged
        if len(parts) != self.job.split.num_drafters:
            sums = torch.tensor([part["sums"] for part in parts], dtype=torch.float64).sum(0).tolist()
            numbers = sorted(number for part in parts for number in part["packs"])
            whole = {"sums": sums, "packs": numbers, "tokens": sum(part["tokens"] for part in parts)}
            nothing = {"sums": [0.0] * len(sums), "packs": [], "tokens": 0.0}
            parts = [whole, *[nothing] * (self.job.split.num_drafters - 1)]
        self.tally.sums += torch.tensor(parts[self.own_rank]["sums"], dtype=torch.float64, device=self.meshes.device)
        self.interval.numbers += parts[self.own_rank]["packs"]
        self.interval.tokens += parts[self.own_rank]["tokens"]

    def _receive(self) -> HiddenPack:
        with self.clock.stage("receive"):
            pack = self.receiver.receive()
        self.situation.at(self.situation.doing, pack.item)
        self.interval.add_pack(pack.item, pack.stats)
        return pack

    def _is_due(self, step: int, interval: int) -> bool:
        return interval > 0 and (step % interval == 0 or step == self.job.config.trainer.steps)

    def _write_log(self, step: int, parts: Stopwatch) -> None:
        """Reduce over the drafter ranks and write; the only place in training that waits for the device."""
        self._report_skipped(self.finite.settle())
        split, device = self.job.split, self.meshes.device
        dist.all_reduce(self.tally.sums, group=self.group)
        sums, grad_norm = self.tally.sums.tolist(), float(self.grad_norm)
        compiled = self.compiling.take()
        drafters = np.zeros((split.num_drafters, len(DRAFTER)))
        drafters[self.own_rank] = self._own_account(compiled.seconds)
        targets = self.interval.targets
        for table in (drafters, targets):
            dist.all_reduce(torch.from_numpy(table), group=self.meshes.control)
        numbers: list[list[int]] = [[] for _ in range(split.num_drafters)]
        dist.all_gather_object(numbers, self.interval.numbers, group=self.meshes.control)
        for reason in compiled.reasons:
            self._alarm(f"compiled again on drafter rank {self.meshes.rank}: {reason}")
        if self.log is not None:
            values = Tally.read(sums, self.job.drafter.block_size)
            values |= {"grad_norm": grad_norm, "lr": self.lr, "skipped": self.finite.skipped}
            values |= {"context_noise": self._noise(step)} if self.job.config.trainer.context_noise else {}
            accounts = Accounts(split, self.job.config.trainer.packs_per_step, targets, drafters, device.type == "cuda")
            memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
            packs = as_ranges(number for part in numbers for number in part)
            seconds = {name: parts.seconds(name) for name in parts.names}
            self.log.step(step, values, accounts, parts=seconds, memory_gib=memory, packs=packs)
        self.tally = Tally.of(self.job.drafter, device)
        self.interval = Interval.empty(split.num_targets)

    def _own_account(self, compile_s: float) -> list[float]:
        """This rank's row of ``Accounts.drafters``."""
        spent = self.clock.take()
        if self.job.split.colocated:  # the target is at work while this rank receives
            spent["receive"] += spent["data"] + spent["forward"]
        waited = self.interval.wait_s + self.receiver.waiting.take()
        rest = {
            "compile": compile_s, "wait": waited, "packs": self.interval.packs, "q_hs": self.receiver.depth(),
            "busy": self.devices.take(), "tokens": self.interval.tokens,
        }  # fmt: skip
        return [float(spent[name]) if name in STAGES else float(rest[name]) for name in DRAFTER]
