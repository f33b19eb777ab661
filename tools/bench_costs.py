"""How the cost of a training step grows: the step bench, and again with one setting changed at a time."""

import gc
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench_step import StepBench, bench_device, check_step, measure_step
from dflash_model import UserError
from dflash_train.cli import parse
from dflash_train.config import key

VARIED = [
    "anchors=128", "anchors=256", "anchors=1024", "seq_len=2048", "seq_len=8192", "block_size=8", "num_layers=3",
    "num_layers=8", "num_sliding_layers=4", "packs=4", "float8=true", "dflash2=true",
]  # fmt: skip
TOLD = ("median_ms", "min_ms", "max_ms", "ms_a_pack", "ktok_s", "counted_tflop", "compilations", "peak_gib")
OWN = ("config", "vary", "profile")


@dataclass
class CostsBench(StepBench):
    """The step that is varied."""

    vary: list[str] = key(VARIED, "key=value of this bench, each for a measurement of its own")
    repeats: int = key(10, "steps counted")


def bench_costs(argv: list[str]) -> dict[str, Any]:
    """Measure each setting; one that does not fit on the device says so.

    Raises:
        UserError: a setting that cannot be; before anything is measured.
    """
    given = parse(CostsBench, argv, __doc__ or "")
    settings = [("as given", given), *((change, parse(CostsBench, [*argv, change], "")) for change in given.vary)]
    for name, bench in settings:
        try:
            check_step(bench)
        except UserError as error:
            raise UserError(f"{error} (vary: {name})") from error
    device, rows = bench_device(), []
    for name, bench in settings:
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        rows.append({"setting": name, **_measured(bench, device)})
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), file=sys.stderr, flush=True)
    return {
        "bench": "costs", "preset": given.preset, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "given": {name: value for name, value in asdict(given).items() if name not in OWN}, "rows": rows,
    }  # fmt: skip


def _measured(bench: CostsBench, device: torch.device) -> dict[str, Any]:
    """One step's figures; nothing of the step before is left on the device or in the compiler."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        figures = measure_step(bench, device)
    except torch.OutOfMemoryError as error:
        return {"failed": str(error).splitlines()[0]}
    return {name: float(f"{figures[name]:.4g}") for name in TOLD if figures[name] is not None}
