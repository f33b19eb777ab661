"""Time the drafter's training step on random weights: one process, FSDP2 over one rank."""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dflash_data.ends import FrozenEnds
from dflash_data.float8 import Float8Head
from dflash_data.packs import HiddenPack, make_blocks
from dflash_data.schedule import Stream, WorkItem
from dflash_model import DFlash2Config, Drafter, DrafterConfig, UserError
from dflash_model.attention import check_flash, check_flash_heads
from dflash_model.blocks import default_gamma, sample_anchors
from dflash_model.config import FULL, SLIDING
from dflash_train.cli import parse
from dflash_train.config import OptimizerSection, key
from dflash_train.flops import pack_flops
from dflash_train.job import DTYPES, dtype_of
from dflash_train.parallelize import begin_micro_step, fill_sharded, parallelize_drafter, use_flash_attention
from dflash_train.step import DraftStep, Tally
from dflash_train.titan import LRSchedulersContainer, OptimizersContainer, apply_gradients, build_optimizer
from dflash_train.watch import CompileWatch

SIZES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936, "num_target_layers": 36},
    "qwen3.6-27b": {"hidden_size": 5120, "intermediate_size": 17408, "vocab_size": 248320, "num_target_layers": 64},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "num_target_layers": 8},
}


@dataclass
class StepSizes:
    """One drafter step: forward, loss, backward, clip, AdamW."""

    config: str = key("", "YAML file that the other keys override")
    preset: str = key("qwen3-8b", "sizes: qwen3-8b, qwen3.6-27b or tiny")
    num_layers: int = key(5, "drafter layers")
    num_sliding_layers: int = key(0, "of which sliding, window 2048")
    block_size: int = key(16, "K")
    seq_len: int = key(4096, "S")
    anchors: int = key(512, "A")
    packs: int = key(1, "packs of an optimizer step, one after the other")
    dtype: str = key("bfloat16", "compute type; masters are fp32")
    warmup: int = key(5, "steps not counted")
    repeats: int = key(20, "steps counted")
    profile: str = key("", "write a table of kernel times to this file")


@dataclass
class StepBench(StepSizes):
    """This project's step."""

    dflash2: bool = key(False, "with DFlash2's convolutions and selector")
    documents: int = key(1, "documents the row is cut into")
    compile: bool = key(True, "compile the layers")
    activation_budget: float = key(0.9, "share of activations that compiled layers keep")
    chunk_rows: int = key(1024, "slots whose logits exist at once")
    float8: bool = key(False, "multiply with the head in float8")
    flash: bool = key(False, "attention by flash-attn-4")


def check_sizes(sizes: StepSizes) -> None:
    """Refuse what no step can have.

    Raises:
        UserError: an unknown preset or type, a number that is too small, layers that do not fit together.
    """
    for name in ("packs", "anchors", "seq_len", "repeats"):
        if getattr(sizes, name) < 1:
            raise UserError(f"{name} is {getattr(sizes, name)}; it must be at least 1")
    if sizes.warmup < 0:
        raise UserError(f"warmup is {sizes.warmup}; it must be 0 or more")
    dtype_of("dtype", sizes.dtype)
    drafter_config(sizes)


def check_step(bench: StepBench) -> None:
    """Refuse what this project's step cannot have, before anything is measured.

    Raises:
        UserError: as ``check_sizes``; or flash-attn-4 cannot be had.
    """
    check_sizes(bench)
    if bench.flash:
        check_flash("flash", _device())
        check_flash_heads("flash", DTYPES[bench.dtype], drafter_config(bench).head_dim)


def drafter_config(sizes: StepSizes, dflash2: DFlash2Config | None = None) -> DrafterConfig:
    """The drafter of these sizes.

    Raises:
        UserError: an unknown preset, or layers that do not fit together.
    """
    if sizes.preset not in SIZES:
        raise UserError(f"preset is {sizes.preset}; it takes {', '.join(SIZES)}")
    preset, sliding = SIZES[sizes.preset], sizes.num_sliding_layers
    return DrafterConfig(
        **preset, num_layers=sizes.num_layers, num_heads=32, num_kv_heads=8, head_dim=128,
        target_layer_ids=tuple(range(1, 6)), block_size=sizes.block_size, mask_token_id=preset["vocab_size"] - 1,
        layer_types=(SLIDING,) * sliding + (FULL,) * (sizes.num_layers - sliding), sliding_window=2048,
        dflash2=dflash2,
    )  # fmt: skip


def random_ends(config: DrafterConfig, device: torch.device, dtype: torch.dtype) -> FrozenEnds:
    """An embedding and a head."""
    with torch.device(device):
        embed, head = (torch.randn(config.vocab_size, config.hidden_size, dtype=dtype) * std for std in (1.0, 0.02))
    return FrozenEnds(embed, head)


def random_pack(bench: StepBench, config: DrafterConfig, device: torch.device, seed: int) -> HiddenPack:
    """A fully supervised row with random features."""
    rng = np.random.default_rng(seed)
    doc = (np.arange(bench.seq_len) * bench.documents // bench.seq_len).astype(np.int32)
    starts = np.flatnonzero(np.diff(doc, prepend=-1))
    position = (np.arange(bench.seq_len) - starts[doc]).astype(np.int32)
    ids, mask = (
        rng.integers(0, config.vocab_size, bench.seq_len).astype(np.int32),
        np.ones(bench.seq_len, dtype=np.bool_),
    )
    anchors = sample_anchors(mask, doc, bench.anchors, rng)
    host = make_blocks(ids, mask, doc, anchors, bench.anchors, config.block_size, default_gamma(config.block_size))
    host |= {"input_ids_S": torch.from_numpy(ids), "position_S": torch.from_numpy(position)}
    tensors = {name: tensor.to(device) for name, tensor in host.items()}
    tensors["context_SE"] = torch.randn(bench.seq_len, config.context_size, device=device, dtype=DTYPES[bench.dtype])
    return HiddenPack(WorkItem(0, Stream.TRAIN, seed), tensors, host, {})


def measured_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product of random numbers, here and now."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = timed(lambda: a @ b, device, warmup=3, repeats=10)
    return 2 * size**3 / statistics.median(times)


def timed(call: Any, device: torch.device, *, warmup: int, repeats: int) -> list[float]:  # noqa: ANN401
    """Seconds of each repeat; on a GPU between events on its stream, as a job runs: the host does not wait in between.

    Raises:
        UserError: there is none.
    """
    if warmup < 0 or repeats < 1:
        raise UserError(f"warmup is {warmup} and repeats {repeats}; they take 0 or more, and 1 or more")
    for _ in range(warmup):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def write_profile(path: str, call: Callable[[], Any]) -> None:
    """A table of one call's kernels by their time, if there is a path.

    Raises:
        UserError: there is no GPU.
    """
    if not path:
        return
    if not torch.cuda.is_available():
        raise UserError(f"a profile is to be written to {path}; it is of a GPU's kernels, and torch sees none here")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        call()
        torch.cuda.synchronize()
    Path(path).write_text(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=60))


@dataclass(frozen=True)
class Training:
    """A drafter on random weights that can be trained step by step.

    Attributes:
        drafter: sharded over one rank.
        optimizers: AdamW.
        schedule: of the learning rate.
        tally: metrics of all steps.
        step: trains on the next of a few random packs.
    """

    drafter: Drafter
    optimizers: OptimizersContainer
    schedule: LRSchedulersContainer
    tally: Tally
    step: Callable[[], None]


def bench_device() -> torch.device:
    """The GPU if there is one, with a process group of one rank."""
    device = _device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    return device


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def build_training(bench: StepBench, device: torch.device) -> Training:
    """Everything one step needs."""
    config = drafter_config(bench, DFlash2Config() if bench.dflash2 else None)
    with torch.device("meta"):
        drafter = Drafter(config)
    if bench.flash:
        use_flash_attention(drafter)
    parallelize_drafter(
        drafter, DeviceMesh(device.type, [0]), dtype=DTYPES[bench.dtype], compile_layers=bench.compile,
        activation_budget=bench.activation_budget,
    )  # fmt: skip
    drafter.to_empty(device=device)
    fill_sharded(drafter, Drafter.initial_tensors(config, torch.Generator(device).manual_seed(0)))
    optimizers, schedule = build_optimizer(drafter, OptimizerSection(), steps=1000)
    ends = random_ends(config, device, DTYPES[bench.dtype])
    draft = DraftStep(
        drafter, ends, DTYPES[bench.dtype], bench.chunk_rows,
        sparse=device.type == "cuda", compiled=bench.compile and device.type == "cuda",
        float8=Float8Head(ends.head_VD) if bench.float8 else None,
    )  # fmt: skip
    packs = [random_pack(bench, config, device, seed) for seed in range(4)]
    tally, calls = Tally.of(config, device), iter(range(10**9))

    def one_step() -> None:
        weight_total = torch.zeros((), device=device)
        for number in range(bench.packs):
            begin_micro_step(drafter, last=number == bench.packs - 1)
            loss_sum, weight_sum = draft.loss(packs[next(calls) % len(packs)], tally)
            loss_sum.backward()
            weight_total += weight_sum
        norm, _ = apply_gradients(drafter, optimizers, schedule, scale=1 / weight_total, max_norm=1.0)
        tally.commit(torch.isfinite(norm))

    return Training(drafter, optimizers, schedule, tally, one_step)


def step_figures(
    bench: StepSizes, drafter: nn.Module, config: DrafterConfig, device: torch.device, times: list[float]
) -> dict[str, Any]:
    """What a bench of a step tells of the seconds its steps took."""
    flops = bench.packs * pack_flops(config, bench.seq_len, bench.anchors)
    median, ceiling = statistics.median(times), measured_ceiling(device, DTYPES[bench.dtype])
    return {
        "preset": bench.preset, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "num_layers": bench.num_layers, "sliding_layers": bench.num_sliding_layers, "seq_len": bench.seq_len,
        "anchors": bench.anchors, "block_size": bench.block_size, "packs": bench.packs,
        "repeats": bench.repeats,
        "median_ms": median * 1e3, "min_ms": min(times) * 1e3, "max_ms": max(times) * 1e3,
        "ms_a_pack": median / bench.packs * 1e3, "ktok_s": bench.packs * bench.seq_len / median / 1e3,
        "counted_tflop": flops / 1e12, "achieved_tflop_s": flops / median / 1e12,
        "ceiling_tflop_s": ceiling / 1e12, "share_of_ceiling": flops / median / ceiling,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }  # fmt: skip


def measure_step(bench: StepBench, device: torch.device) -> dict[str, Any]:
    """Build, run, measure."""
    training = build_training(bench, device)
    drafter, tally = training.drafter, training.tally
    watch = CompileWatch(lambda alarm: print(alarm, file=sys.stderr))
    try:
        print(f"{bench.warmup} steps to warm up, {bench.repeats} counted", file=sys.stderr, flush=True)
        for _ in range(bench.warmup):
            training.step()
        watch.take()
        times = timed(training.step, device, warmup=0, repeats=bench.repeats)
        compilations = watch.take().count
    finally:
        watch.close()
    figures = step_figures(bench, drafter, drafter.config, device, times)
    write_profile(bench.profile, training.step)
    return {
        "dflash2": bench.dflash2, "float8": bench.float8, "flash": bench.flash, **figures,
        "compilations": compilations, "loss": float(tally.sums[0] / tally.sums[1]),
    }  # fmt: skip


def bench_step(argv: list[str]) -> dict[str, Any]:
    """One measurement."""
    bench = parse(StepBench, argv, __doc__ or "")
    check_step(bench)
    return {"bench": "step", **measure_step(bench, bench_device())}
