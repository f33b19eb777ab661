"""One rank's way through a job: meet the others, build this rank's part, work, leave."""

import fcntl
import os
import shlex
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.distributed_c10d import _get_default_store

from dflash_data.clock import StageClock
from dflash_data.packs import Collator
from dflash_data.pipeline import MadePack, hidden_states
from dflash_data.prepare import read_ledger
from dflash_data.schedule import Schedule
from dflash_data.synthetic import write_synthetic
from dflash_data.target import ShardedTarget
from dflash_model import UserError
from dflash_model.attention import check_flash
from dflash_train.channel import ChannelError, LocalChannel, Receiver, ReceivingChannel, SendingChannel, Timeouts
from dflash_train.checkpoint import Checkpointer, Position
from dflash_train.describe import describe, facts_for_card, origin
from dflash_train.flops import pack_flops
from dflash_train.job import DTYPES, Job
from dflash_train.mesh import Meshes, make_meshes
from dflash_train.metrics import STARTS, RunLog, append, logger, start_logging
from dflash_train.producer import make_packs
from dflash_train.resume import check_files, clear_leftovers, find_position
from dflash_train.retention import Retention
from dflash_train.situation import Situation
from dflash_train.stop import Stop, same_command
from dflash_train.titan import peak_flops
from dflash_train.trainer import Course, Trainer


def pick_device(job: Job) -> torch.device:
    """This rank's device; ranks beyond the number of GPUs share them in turn.

    Raises:
        UserError: cuda is asked for and absent, or flash-attn-4 and cannot be had.
    """
    device = _device(job.config.mesh.device)
    if job.config.trainer.flash_attention:  # on target ranks too: nothing is begun if one of the others cannot
        check_flash("trainer.flash_attention", device)
    return device


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("mesh.device is cuda; torch sees no GPU here")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def run_job(job: Job, stop: Stop | None = None, situation: Situation | None = None) -> None:
    """Run this rank's part of a job to its end, or to where all ranks agree to stop.

    Args:
        job: what to run.
        stop: this rank's part in stopping early.
        situation: where it notes what it is doing.

    Raises:
        UserError: something that only shows once the data is open or an old run is found.
        ChannelError: a peer is gone or frozen.
        CheckpointError: a checkpoint could not be written.
        SkippedStepsError: training has diverged.
    """
    device, stop = pick_device(job), stop or Stop()
    if not dist.is_initialized():
        _meet(timedelta(seconds=job.config.channel.start_timeout_seconds))
    meshes = make_meshes(job.split, device, job.config.channel.start_timeout_seconds)
    situation = situation or Situation.of(job.split, meshes.rank)
    situation.meet()
    lock = _take_folder(job.run_dir) if meshes.rank == 0 else None
    _write_synthetic(job)
    situation.log = job.run_dir / "log.txt"
    data = job.open_data()
    collator = job.collator(data)
    identity = job.identity(data.ledger.fingerprint)
    checkpoints = job.run_dir / "checkpoints"
    position, changes = find_position(checkpoints, identity, job.config.resume.allow)
    _agree({"the step to start from": position.step, **identity})
    check_files(checkpoints, position.step)
    schedule = job.schedule(collator, position)
    if meshes.rank == 0:
        _note_start(job, position, changes)
    if not schedule.segments:
        if meshes.rank == 0:
            start_logging(job.run_dir / "log.txt")
            drafter = shlex.quote(f"drafter.init_from={job.run_dir}/checkpoints/step-{position.step}/dflash")
            drafter += " drafter.init_from_target=false" if job.config.drafter.init_from_target else ""
            logger.info(
                f"run.dir {job.run_dir} is complete at step {position.step}. To train longer, start another run.dir"
                f" with {drafter}; to redo it, remove it"
            )
        return
    epoch_steps = len(collator.train_plan) / job.config.trainer.packs_per_step
    own_text = set(data.ledger.heldout_by) == {job.target.name}
    course = Course(
        schedule, position, job.heldout_chunks(collator), epoch_steps, "replay" if own_text else "teacher-forced"
    )
    section = job.config.channel
    # Behind the first step lie the posted receives, a pack in use and one staged on each drafter rank, and on each
    # target rank two buffers and the pack it has just made.
    buffered = (section.depth + 2) * job.split.num_drafters + 3 * job.split.num_targets
    settled = schedule.first_step_end + buffered
    timeouts = Timeouts(section.start_timeout_seconds, section.timeout_seconds, settled)
    clock = StageClock()
    packs = _target_packs(job, meshes, schedule, collator, clock)
    receiver: Receiver
    if meshes.channel is None:
        assert packs is not None
        receiver = LocalChannel(packs, device)
    elif packs is not None:
        sender = SendingChannel(
            job.layout(), job.split, meshes.channel, device=device, timeouts=timeouts, stop=stop
        )  # fmt: skip
        make_packs(packs, sender, meshes, timeouts, stop, situation, clock)
        return
    else:
        receiver = ReceivingChannel(
            job.layout(),
            schedule,
            job.split,
            group=meshes.channel,
            device=device,
            depth=section.depth,
            timeouts=timeouts,
        )
    _train(job, meshes, course, receiver, identity, stop=stop, situation=situation, clock=clock, changes=changes)
    del lock


def _meet(timeout: timedelta) -> None:
    """Initialise the default group, which is gloo.

    torchrun's store outlives a restart of the ranks (``--max-restarts``) on one host, and would hand the new ranks the
    addresses of the old ones: each attempt gets keys of its own.
    """
    if "RANK" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _target_packs(
    job: Job, meshes: Meshes, schedule: Schedule, collator: Collator, clock: StageClock
) -> Iterator[MadePack] | None:
    """The pipeline of a target rank; None on the others."""
    if meshes.target is None:
        return None
    target = ShardedTarget(
        job.target,
        job.tap_ids,
        mesh=meshes.target,
        dtype=DTYPES[job.config.target.dtype],
        reshard=job.config.target.reshard_after_forward,
        float8=job.config.target.float8,
    )
    if job.config.target.compile and target.device.type == "cuda":
        eager = target.compile(job.config.data.seq_len)
        if eager is not None and meshes.rank == 0:
            logger.warning(f"the target's layers run uncompiled: {eager}")
    return hidden_states(
        schedule,
        collator,
        target,
        rank=meshes.rank,
        num_targets=job.split.num_targets,
        num_workers=job.config.data.workers,
        prefetch=job.config.data.prefetch,
        clock=clock,
    )


def _write_synthetic(job: Job) -> None:
    """Rank 0 writes the data that the configuration only describes.

    Raises:
        UserError: what an earlier run wrote there is something else.
    """
    synthetic = synthetic_settings(job)
    if synthetic is not None and dist.get_rank() == 0 and not job.data_dir.is_dir():
        write_synthetic(job.data_dir, **synthetic)
    dist.barrier()
    known = read_ledger(job.data_dir)
    if synthetic is not None and (known is None or known.settings != synthetic):
        raise UserError(
            f"data.path is {job.data_dir}; it does not hold the synthetic data of this configuration:"
            " remove it or choose another data.path"
        )


def synthetic_settings(job: Job) -> dict[str, int] | None:
    """What decides the synthetic data of a job, None if it uses prepared data."""
    if not job.config.data.synthetic_documents:
        return None
    return {
        "documents": job.config.data.synthetic_documents,
        "max_length": min(job.config.data.seq_len, job.config.data.synthetic_length),
        "vocab_size": job.drafter.vocab_size,
        "seed": job.config.run.seed,
    }


def _agree(facts: dict[str, Any]) -> None:
    """All ranks must see the same data and checkpoints (they may be on several nodes).

    Raises:
        UserError: naming the first fact that differs.
    """
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, facts)
    for rank, other in enumerate(everyone):
        for name, value in facts.items():
            if other[name] != value:
                raise UserError(
                    f"rank {rank} sees {name} = {other[name]}, rank {dist.get_rank()} sees {value}; all ranks need"
                    " the same data.path and run.dir contents"
                )


def _take_folder(run_dir: Path) -> IO[str]:
    """Keep other jobs out of the run folder as long as the returned file is open.

    Raises:
        UserError: another job has it, or it cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = (run_dir / "lock").open("w")
    except OSError as error:
        raise UserError(f"run.dir is {run_dir}; it cannot be written: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"run.dir is {run_dir}; another job is running in it: choose another run.dir") from error
    clear_leftovers(run_dir / "checkpoints")
    return file


def _note_start(job: Job, position: Position, changes: list[str]) -> None:
    """The settings, and one line for every start of the run."""
    (job.run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(job.config)))
    start = {"step": position.step, "packs": position.packs, "split": job.split.describe(), "changes": changes}
    append(job.run_dir / STARTS, {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **start})


def _train(
    job: Job, meshes: Meshes, course: Course, receiver: Receiver, identity: dict[str, Any], *, stop: Stop,
    situation: Situation, clock: StageClock, changes: list[str],
) -> None:  # fmt: skip
    first = job.split.drafter_rank(meshes.rank) == 0
    log = None
    if first:
        start_logging(job.run_dir / "log.txt")
        peak = peak_flops(meshes.device)
        log = RunLog(
            job.run_dir,
            start_step=course.position.step,
            evaluated=course.position.evaluated,
            num_steps=job.config.trainer.steps,
            epoch_steps=course.epoch_steps,
            flops_per_pack=pack_flops(job.drafter, job.config.data.seq_len, job.config.data.anchors_per_pack),
            peak=peak * job.split.num_drafters if peak else None,
            description=describe(job),
            expected_tokens_s=expected * 1e3 if (expected := job.config.trainer.expected_ktok_s) else None,
        )
        if not course.heldout_chunks:
            logger.info("no held-out rows, or evaluate.packs is 0: evaluation is off")
        if not job.config.checkpoint.interval and stop.saves:
            logger.info("checkpoint.interval is 0: nothing is saved unless the run is stopped")
        start = f"starting {origin(job)}"
        begin = f"resuming at step {course.position.step}" if course.position.step else start
        for change in changes:
            logger.info(f"allowed by resume.allow: {change}")
        logger.info(
            f"{begin}: {job.split.describe()} on {meshes.device.type}, {job.config.trainer.steps} steps of"
            f" {job.config.trainer.packs_per_step} packs of {job.config.data.seq_len} tokens, target layers"
            f" {list(job.drafter.target_layer_ids)}, run folder {job.run_dir}"
        )
    began = time.perf_counter()
    checkpoint_group = meshes.checkpoint
    assert checkpoint_group is not None
    retention = Retention(job.config.checkpoint.keep, job.config.checkpoint.milestone_interval)
    checkpointer = Checkpointer(
        job.run_dir / "checkpoints", checkpoint_group, retention, identity, facts_for_card(job, course.epoch_steps)
    )  # fmt: skip
    situation.at("building the drafter")
    trainer = Trainer(
        job, meshes, course, receiver=receiver, checkpointer=checkpointer, stop=stop, situation=situation, clock=clock,
        log=log,
    )  # fmt: skip
    if log is not None:
        logger.info(f"{job.drafter.kind} drafter ready in {time.perf_counter() - began:.1f} s")
    try:
        trainer.run()
    finally:  # whatever ends it: the board's own thread may be 10 s behind
        if log is not None:
            log.flush()
    if log is None:
        return
    if stop.agreed_step is None:
        log.close()
    else:
        kept = f"saved as step-{stop.agreed_step}" if stop.agreed_step else "nothing trained yet"
        told = f", {kept}. To go on: {same_command()}" if stop.saves else ", nothing is saved"
        logger.info(f"stopped behind step {stop.agreed_step} ({stop.reason}){told}")


def leave(stop: Stop, situation: Situation, limit: float) -> None:
    """Wait until every rank has finished; a last checkpoint may take its time, a rank that is gone may not.

    Args:
        stop: this rank's part in stopping early.
        situation: who else is there.
        limit: seconds to wait for ranks that cannot be seen from here.

    Raises:
        ChannelError: a rank will not finish.
    """
    store, deadline = _get_default_store(), time.monotonic() + limit
    store.set(f"left-{situation.rank}", "1")
    names = [f"left-{rank}" for rank in range(dist.get_world_size())]
    situation.at("waiting for the others to finish")
    while not store.check(names):
        if situation.missing() or time.monotonic() > deadline:
            raise ChannelError("not all ranks finished")
        time.sleep(0.1)
    stop.over = True
    if stop.agreed_step is None:
        dist.destroy_process_group()
