"""Time the target's forward up to its last tap: one process, no logits.

Weights, of target.config, and tokens are random. With real=true they are those of target.path and of the first
row of data.path; then target.float8=true also tells how far each tapped layer's states are from those without.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bench_step import bench_device, measured_ceiling, timed, write_profile
from dflash_data.dataset import open_prepared
from dflash_data.float8 import Float8Linear
from dflash_data.packs import Collator, TokenPack
from dflash_data.schedule import Stream, WorkItem
from dflash_data.target import ShardedTarget, TargetModel, find_target
from dflash_model import UserError, default_target_layer_ids
from dflash_train.cli import parse
from dflash_train.config import RunConfig, key
from dflash_train.job import check_row_length, dtype_of


@dataclass
class TargetBench(RunConfig):
    """A training job's target.*, drafter.target_layer_ids and data.*: one forward through the last tapped layer."""

    real: bool = key(False, "run target.path on the first row of data.path")
    documents: int = key(8, "documents a row of random tokens is cut into, evenly; a real one has its own")
    warmup: int = key(3, "forwards not counted")
    repeats: int = key(10, "forwards counted")
    profile_table: str = key("", "write a table of kernel times to this file")


def bench_target(argv: list[str]) -> dict[str, Any]:
    """Build, run, measure."""
    bench = parse(TargetBench, argv, __doc__ or "")
    device, dtype = bench_device(), dtype_of("target.dtype", bench.target.dtype)
    if not bench.real and bench.target.config is None:
        raise UserError("target.config is missing; it describes the target (config=tools/configs/qwen3.6-27b.yaml)")
    check_row_length(bench.data.seq_len)
    if not 1 <= bench.documents <= bench.data.seq_len:
        raise UserError(f"documents is {bench.documents}; it takes 1 to data.seq_len ({bench.data.seq_len})")
    path = bench.target.path if bench.real else None
    target, began = find_target(path, bench.target.config), time.perf_counter()
    pack = row_of(bench, target)
    rule = default_target_layer_ids(target.config.num_hidden_layers, 5)
    taps = bench.drafter.target_layer_ids or list(dict.fromkeys(rule))  # of few layers it names some twice
    if min(taps) < 0:
        raise UserError(f"drafter.target_layer_ids is {taps}; layers count from 0")

    def build(*, float8: bool) -> ShardedTarget:
        mesh = DeviceMesh(device.type, [0])
        return ShardedTarget(target, tuple(taps), mesh=mesh, dtype=dtype, reshard=False, float8=float8)

    errors = None
    if bench.target.float8 and bench.real:
        errors = relative_errors(build(float8=False)(pack), build(float8=True)(pack), len(taps))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
    sharded = build(float8=bench.target.float8)
    print(f"drawn and checked in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    eager = sharded.compile(bench.data.seq_len) if bench.target.compile and device.type == "cuda" else "compile is off"
    print(f"ready in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    times = timed(lambda: sharded(pack), device, warmup=bench.warmup, repeats=bench.repeats)
    median, ceiling = statistics.median(times), measured_ceiling(device, dtype)
    write_profile(bench.profile_table, lambda: sharded(pack))
    tokens = int((pack.doc_S >= 0).sum())  # not the padding at a real row's end
    flops = 2.0 * bench.data.seq_len * matrix_elements(sharded.decoder)
    return {
        "bench": "target", "model_type": target.config.model_type, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "taps": taps, "seq_len": bench.data.seq_len, "documents": int(pack.doc_S.max()) + 1,
        "eager": eager, "float8": bench.target.float8, "float8_errors": errors,
        "median_ms": median * 1e3, "min_ms": min(times) * 1e3, "max_ms": max(times) * 1e3,
        "ktok_s": tokens / median / 1e3, "counted_tflop": flops / 1e12,
        "achieved_tflop_s": flops / median / 1e12, "ceiling_tflop_s": ceiling / 1e12,
        "share_of_ceiling": flops / median / ceiling,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }  # fmt: skip


def row_of(bench: TargetBench, target: TargetModel) -> TokenPack:
    """The first row of the data, or a random one."""
    if not bench.real:
        return random_row(bench, target.config.vocab_size)
    seq_len = bench.data.seq_len
    data = open_prepared(Path(bench.data.path), seq_len=seq_len, vocab_size=target.config.vocab_size)
    collate = Collator(data, seq_len=seq_len, num_anchors=1, block_size=2, gamma=1.0, seed=0, heldout_limit=0)
    return collate(WorkItem(0, Stream.TRAIN, 0))


def relative_errors(exact_SE: Tensor, found_SE: Tensor, taps: int) -> list[float]:
    """Of each tapped layer, the norm of the difference over the norm."""
    pairs = zip(exact_SE.float().chunk(taps, -1), found_SE.float().chunk(taps, -1), strict=True)
    return [round(float((found - exact).norm() / exact.norm()), 5) for exact, found in pairs]


def random_row(bench: TargetBench, vocab_size: int) -> TokenPack:
    """Random tokens in documents of equal length; nothing to train on."""
    doc = torch.arange(bench.data.seq_len) * bench.documents // bench.data.seq_len
    starts = (doc.diff(prepend=torch.tensor([-1])) > 0).nonzero()[:, 0]
    nothing = torch.zeros(0)
    return TokenPack(
        item=WorkItem(0, Stream.TRAIN, 0), input_ids_S=torch.randint(0, vocab_size, (bench.data.seq_len,)),
        position_S=torch.arange(bench.data.seq_len) - starts[doc], doc_S=doc, loss_mask_S=nothing, anchor_A=nothing,
        first_A=nothing, label_AK=nothing, weight_AK=nothing,
    )  # fmt: skip


def matrix_elements(decoder: nn.Module) -> int:
    """Elements of the matrices that every token goes through; scores of attention and recurrences are left out."""
    linear = (module for module in decoder.modules() if isinstance(module, (nn.Linear, Float8Linear)))
    return sum(module.weight.numel() for module in linear)
