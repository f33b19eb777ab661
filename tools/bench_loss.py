"""Time head and loss, forward and backward, on random hidden states."""

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from bench_step import SIZES, bench_device, measured_ceiling, timed, write_profile
from dflash_data.float8 import Float8Head
from dflash_model import UserError
from dflash_train.cli import parse
from dflash_train.config import key
from dflash_train.job import dtype_of
from dflash_train.loss import ROW_LOSSES, frozen_head_loss


@dataclass
class LossBench:
    """The loss of one pack's supervised slots."""

    config: str = key("", "YAML file that the other keys override")
    preset: str = key("qwen3-8b", f"sizes: {', '.join(SIZES)}")
    kind: str = key("ce", f"as loss.kind: {', '.join(ROW_LOSSES)}")
    rows: int = key(7680, "supervised slots; 512 anchors of block 16 have as many")
    chunk_rows: int = key(1024, "slots whose logits exist at once")
    float8: bool = key(False, "multiply with the head in float8")
    top_k: int = key(0, "candidates of DFlash2's selector; 0 without")
    dtype: str = key("bfloat16", "of head and hidden states")
    compile: bool = key(True, "fuse what lies between the matrix products, on a GPU")
    warmup: int = key(3, "calls not counted")
    repeats: int = key(10, "calls counted")
    profile: str = key("", "write a table of kernel times to this file")


def bench_loss(argv: list[str]) -> dict[str, Any]:
    """Build, run, measure."""
    bench = parse(LossBench, argv, __doc__ or "")
    for name, value, known in (("preset", bench.preset, SIZES), ("kind", bench.kind, ROW_LOSSES)):
        if value not in known:
            raise UserError(f"{name} is {value}; it takes {', '.join(known)}")
    device, dtype = bench_device(), dtype_of("dtype", bench.dtype)
    width, vocab, rows = SIZES[bench.preset]["hidden_size"], SIZES[bench.preset]["vocab_size"], bench.rows
    with torch.device(device):
        head, hidden = torch.randn(vocab, width, dtype=dtype) * 0.02, torch.randn(rows, width, dtype=dtype)
        taught = torch.randint(0, vocab, (rows,)) if bench.kind == "ce" else torch.randn(rows, width, dtype=dtype)
    hidden.requires_grad_()
    float8 = Float8Head(head) if bench.float8 else None
    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0

    def call() -> None:
        hidden.grad = None
        loss = frozen_head_loss(
            hidden, float8 or head, taught, bench.chunk_rows, kind=bench.kind, top_k=bench.top_k,
            compiled=bench.compile and device.type == "cuda",
        ).loss_R  # fmt: skip
        loss.mean().backward()

    times = timed(call, device, warmup=bench.warmup, repeats=bench.repeats)
    peak = torch.cuda.max_memory_allocated() - held if device.type == "cuda" else 0
    write_profile(bench.profile, call)
    # Logits and their gradient's way back; a distribution loss makes the target's logits too.
    flops = 2.0 * rows * vocab * width * (2 if bench.kind == "ce" else 3)
    median, ceiling = statistics.median(times), measured_ceiling(device, dtype)
    return {
        "bench": "loss", "preset": bench.preset, "kind": bench.kind, "rows": rows, "chunk_rows": bench.chunk_rows,
        "top_k": bench.top_k, "float8": bench.float8, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "median_ms": median * 1e3, "min_ms": min(times) * 1e3, "max_ms": max(times) * 1e3,
        "counted_tflop": flops / 1e12, "achieved_tflop_s": flops / median / 1e12, "ceiling_tflop_s": ceiling / 1e12,
        "share_of_ceiling": flops / median / ceiling,
        "peak_gib_beside_head": peak / 2**30 if device.type == "cuda" else None,
    }  # fmt: skip
