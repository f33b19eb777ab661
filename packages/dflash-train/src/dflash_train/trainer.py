"""The two loops of the job: target ranks make packs, drafter ranks train on them."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dflash_data.ends import FrozenEnds
from dflash_data.packs import HiddenPack
from dflash_data.pipeline import MadePack
from dflash_data.schedule import Schedule, Segment, Stream
from dflash_model import Drafter
from dflash_model.hub import stored_tensors
from dflash_train.acceptance import Acceptance, Rounds
from dflash_train.channel import Receiver, SendingChannel, Timeouts
from dflash_train.checkpoint import Checkpointer
from dflash_train.evaluate import evaluate_pack
from dflash_train.job import DTYPES, Job
from dflash_train.mesh import Meshes
from dflash_train.metrics import Interval, Pipeline, RunLog, logger
from dflash_train.parallelize import fill_sharded, parallelize_drafter
from dflash_train.step import DraftStep, Tally
from dflash_train.titan import GarbageCollection, apply_gradients, build_optimizer

GC_INTERVAL = 100


def make_packs(packs: Iterable[MadePack], channel: SendingChannel, meshes: Meshes, timeouts: Timeouts) -> None:
    """The loop of a target rank: run the target, hand the result over, keep in step with the other target ranks."""
    settled = False
    for made in packs:
        if not settled and made.pack.item.index >= timeouts.settled:
            meshes.settle(timeouts.later)
            settled = True
        if made.pack.item.stream is not Stream.PADDING:
            channel.send(made)
    channel.close()


def initial_tensors(job: Job) -> Iterator[tuple[str, Tensor]]:
    """Full fp32 start values of every drafter parameter, one at a time."""
    init_from = job.config.drafter.init_from
    if init_from is not None:
        for name, tensor in stored_tensors(Path(init_from).expanduser()):
            yield name, tensor.float()
        return
    yield from Drafter.initial_tensors(job.drafter, torch.Generator().manual_seed(job.config.run.seed))


def build_drafter(job: Job, meshes: Meshes) -> Drafter:
    """The sharded drafter with start values: meta, compile, shard, allocate, fill."""
    assert meshes.drafter is not None
    with torch.device("meta"):
        drafter = Drafter(job.drafter)
    section = job.config.trainer
    parallelize_drafter(drafter, meshes.drafter, dtype=DTYPES[section.dtype], compile_layers=section.compile)
    drafter.to_empty(device=meshes.device)
    fill_sharded(drafter, initial_tensors(job))
    return drafter.train()


@dataclass(frozen=True)
class Course:
    """What a drafter rank goes through.

    Attributes:
        schedule: the job's sequence.
        start_step: finished steps when it begins.
        heldout_chunks: drafter forwards per held-out pack.
        epoch_steps: steps in one epoch.
        acceptance_name: ``replay`` if the held-out responses are the target's own, else ``teacher-forced``.
    """

    schedule: Schedule
    start_step: int
    heldout_chunks: int
    epoch_steps: float
    acceptance_name: str


class Trainer:
    """One drafter rank. ``log`` is None on all but the first."""

    def __init__(
        self,
        job: Job,
        meshes: Meshes,
        course: Course,
        *,
        receiver: Receiver,
        checkpointer: Checkpointer,
        log: RunLog | None,
    ) -> None:
        assert meshes.drafter is not None
        self.job, self.meshes, self.course = job, meshes, course
        self.group = meshes.drafter.get_group()
        self.receiver, self.checkpointer, self.log = receiver, checkpointer, log
        self.drafter = build_drafter(job, meshes)
        self.optimizers, self.lr_schedule = build_optimizer(
            self.drafter, job.config.optimizer, job.config.trainer.steps
        )
        ends = FrozenEnds.load(job.target, dtype=DTYPES[job.config.target.dtype], device=meshes.device)
        self.draft = DraftStep(
            self.drafter, ends, DTYPES[job.config.trainer.dtype], job.config.loss.chunk_rows,
            sparse=meshes.device.type == "cuda",
        )  # fmt: skip
        self.tally = Tally(job.drafter.block_size, meshes.device)
        self.interval = Interval.empty(job.split.num_targets)
        self.grad_norm, self.lr = torch.zeros((), device=meshes.device), 0.0
        if course.start_step:
            checkpointer.load(course.start_step, self.drafter, self.optimizers, self.lr_schedule)

    def run(self) -> None:
        """Go through the schedule."""
        collector = GarbageCollection(GC_INTERVAL)
        for segment in self.course.schedule.segments:
            if segment.stream is Stream.HELDOUT:
                self.evaluate(segment)
                continue
            began = time.perf_counter()
            self.train_step()
            collector.run(segment.step)
            if segment.step == self.course.start_step + 1:
                self.meshes.settle(self.job.config.channel.timeout_seconds)
            if self._log_due(segment.step):
                self._write_log(segment.step, began)
            else:
                self.interval.train_s += time.perf_counter() - began
            if self._is_due(segment.step, self.job.config.checkpoint.interval) and not self._evaluates_after(segment):
                self.save(segment.step)
        self.receiver.close()

    def train_step(self) -> None:
        """One optimizer step over this rank's share of the step's packs.

        The numerators of the loss are backpropagated; gradients, averaged over ranks by FSDP, are scaled once by
        ``D / sum of weights`` over all ranks and micro-steps, so a token's weight does not depend on where it landed.
        """
        weight_total = torch.zeros((), device=self.meshes.device)
        for micro in range(self.job.micro_steps):
            pack = self._receive()
            last = micro == self.job.micro_steps - 1
            assert isinstance(self.drafter, FSDPModule)
            self.drafter.set_requires_gradient_sync(last)
            self.drafter.set_reshard_after_backward(last)
            loss_sum, weight_sum = self.draft.loss(pack, self.tally)
            loss_sum.backward()
            weight_total += weight_sum
        dist.all_reduce(weight_total, group=self.group)
        self.grad_norm, self.lr = apply_gradients(
            self.drafter,
            self.optimizers,
            self.lr_schedule,
            scale=self.job.split.num_drafters / weight_total.clamp_min(1e-6),
            max_norm=self.job.config.optimizer.max_grad_norm,
        )

    def evaluate(self, segment: Segment) -> None:
        """Acceptance length on the held-out packs; weights and the training stream are untouched."""
        if self.log is not None:
            logger.info("evaluating on the held-out packs")
        self.interval.wait_s += self.receiver.waiting.take()
        self.drafter.eval()
        mine: list[Rounds] = []
        for offset in range(segment.count):
            if offset % self.job.split.num_drafters == self.job.split.drafter_rank(self.meshes.rank):
                mine += evaluate_pack(self.draft, self.receiver.receive(), self.course.heldout_chunks)
        for module in (self.drafter, *self.drafter.layers):
            assert isinstance(module, FSDPModule)
            module.reshard()  # no backward did it
        self.drafter.train()
        self.receiver.waiting.take()  # an evaluation's waiting is not training's
        everyone: list[list[Rounds]] = [[] for _ in range(self.job.split.num_drafters)]
        dist.all_gather_object(everyone, mine, group=self.meshes.control)
        texts = [text for part in everyone for text in part]
        if self.log is not None and texts:
            self.log.evaluation(segment.step, Acceptance.of(texts), self.course.acceptance_name)
        if segment.step and self._is_due(segment.step, self.job.config.checkpoint.interval):
            self.save(segment.step)

    def save(self, step: int) -> None:
        """Write a checkpoint."""
        began = time.perf_counter()
        folder = self.checkpointer.save(step, self.drafter, self.optimizers, self.lr_schedule)
        if self.log is not None:
            logger.info(f"saved {folder} in {time.perf_counter() - began:.1f} s")

    def _receive(self) -> HiddenPack:
        pack = self.receiver.receive()
        self.interval.add_pack(pack.item.index % self.job.split.num_targets, pack.stats)
        return pack

    def _is_due(self, step: int, interval: int) -> bool:
        return step % interval == 0 or step == self.job.config.trainer.steps

    def _evaluates_after(self, segment: Segment) -> bool:
        segments = self.course.schedule.segments
        after = segments.index(segment) + 1
        return after < len(segments) and segments[after].stream is Stream.HELDOUT

    def _log_due(self, step: int) -> bool:
        return self._is_due(step, self.job.config.log.interval) or step == 1

    def _write_log(self, step: int, began: float) -> None:
        """Reduce over the drafter ranks and write; the only place in training that waits for the device."""
        split, device = self.job.split, self.meshes.device
        dist.all_reduce(self.tally.sums, group=self.group)
        sums, grad_norm = self.tally.sums.tolist(), float(self.grad_norm)
        self.interval.train_s += time.perf_counter() - began
        drafters = torch.zeros(split.num_drafters, 4, dtype=torch.float64)
        waited = self.interval.wait_s + self.receiver.waiting.take()
        own = [waited, self.interval.train_s, self.interval.packs, self.receiver.depth()]
        drafters[split.drafter_rank(self.meshes.rank) or 0] = torch.tensor(own, dtype=torch.float64)
        targets = torch.from_numpy(self.interval.targets)
        for tensor in (drafters, targets):
            dist.all_reduce(tensor, group=self.meshes.control)
        if self.log is not None:
            values = Tally.read(sums, self.job.drafter.block_size)
            values |= {"grad_norm": grad_norm, "lr": self.lr}
            pipeline = Pipeline.measure(targets.numpy(), drafters.numpy(), colocated=split.colocated)
            memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
            self.log.step(step, values, pipeline, memory)
        self.tally = Tally(self.job.drafter.block_size, device)
        self.interval = Interval.empty(split.num_targets)
