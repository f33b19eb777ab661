"""Time the target's forward on random weights: one process, nothing read, no logits."""

import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bench_step import bench_device, measured_ceiling, timed, write_profile
from dflash_data.float8 import Float8Linear
from dflash_data.packs import TokenPack
from dflash_data.schedule import Stream, WorkItem
from dflash_data.target import ShardedTarget, find_target
from dflash_model import UserError, default_target_layer_ids
from dflash_train.cli import parse
from dflash_train.config import RunConfig, key
from dflash_train.job import dtype_of


@dataclass
class TargetBench(RunConfig):
    """A training job's target.config, target.* and data.seq_len: one forward through the last tapped layer."""

    documents: int = key(8, "documents the row is cut into, evenly")
    warmup: int = key(3, "forwards not counted")
    repeats: int = key(10, "forwards counted")
    profile_table: str = key("", "write a table of kernel times to this file")


def bench_target(argv: list[str]) -> dict[str, Any]:
    """Build, run, measure."""
    bench = parse(TargetBench, argv, __doc__ or "")
    if bench.target.config is None:
        raise UserError("target.config is missing; it describes the target (config=tools/configs/qwen3.6-27b.yaml)")
    device, dtype = bench_device(), dtype_of("target.dtype", bench.target.dtype)
    target, began = find_target(None, bench.target.config), time.perf_counter()
    rule = default_target_layer_ids(target.config.num_hidden_layers, 5)
    taps = bench.drafter.target_layer_ids or list(dict.fromkeys(rule))  # of few layers it names some twice
    sharded = ShardedTarget(
        target, tuple(taps), mesh=DeviceMesh(device.type, [0]), dtype=dtype, reshard=False, float8=bench.target.float8
    )
    print(f"drawn and checked in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    eager = sharded.compile(bench.data.seq_len) if bench.target.compile and device.type == "cuda" else "compile is off"
    print(f"ready in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    pack = random_row(bench, target.config.vocab_size)
    times = timed(lambda: sharded(pack), device, warmup=bench.warmup, repeats=bench.repeats)
    median, ceiling = statistics.median(times), measured_ceiling(device, dtype)
    write_profile(bench.profile_table, lambda: sharded(pack))
    flops = 2.0 * bench.data.seq_len * matrix_elements(sharded.decoder)
    return {
        "bench": "target", "model_type": target.config.model_type, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "taps": taps, "seq_len": bench.data.seq_len, "documents": bench.documents, "eager": eager,
        "float8": bench.target.float8,
        "median_ms": median * 1e3, "min_ms": min(times) * 1e3, "max_ms": max(times) * 1e3,
        "ktok_s": bench.data.seq_len / median / 1e3, "counted_tflop": flops / 1e12,
        "achieved_tflop_s": flops / median / 1e12, "ceiling_tflop_s": ceiling / 1e12,
        "share_of_ceiling": flops / median / ceiling,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }  # fmt: skip


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
