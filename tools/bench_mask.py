"""Time the block-sparse mask of a row: drawing its tiles from the anchors, no attention."""

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from bench_step import bench_device, timed
from dflash_model.mask import TILE, sparse_mask
from dflash_train.cli import parse
from dflash_train.config import key


@dataclass
class MaskBench:
    """One mask."""

    config: str = key("", "YAML file that the other keys override")
    seq_len: int = key(4096, "S")
    anchors: int = key(512, "A, spread evenly")
    block_size: int = key(16, "K")
    documents: int = key(1, "documents the row is cut into, evenly")
    window: int = key(0, "of a sliding layer; 0 for a full one")
    warmup: int = key(5, "masks not counted")
    repeats: int = key(50, "masks counted")


def bench_mask(argv: list[str]) -> dict[str, Any]:
    """Build, run, measure."""
    bench = parse(MaskBench, argv, __doc__ or "")
    device = bench_device()
    anchor_BA = (torch.arange(bench.anchors, device=device) * bench.seq_len // bench.anchors)[None]
    length = bench.seq_len // bench.documents
    first_BA = anchor_BA // length * length

    def call() -> Any:  # noqa: ANN401 - a BlockMask
        window = bench.window or None
        return sparse_mask(first_BA, anchor_BA, bench.seq_len, bench.block_size, window=window, causal=False)

    times, mask = timed(call, device, warmup=bench.warmup, repeats=bench.repeats), call()
    queries = bench.anchors * bench.block_size // TILE
    return {
        "bench": "mask", "seq_len": bench.seq_len, "anchors": bench.anchors, "block_size": bench.block_size,
        "documents": bench.documents, "window": bench.window, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "median_ms": statistics.median(times) * 1e3, "min_ms": min(times) * 1e3, "max_ms": max(times) * 1e3,
        "tiles": queries * (queries + bench.seq_len // TILE),
        "full_tiles": int(mask.full_kv_num_blocks.sum()), "partial_tiles": int(mask.kv_num_blocks.sum()),
    }  # fmt: skip
