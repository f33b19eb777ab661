"""Time preparing data: random conversations through ``prepare``, then the packing plan of many documents."""

import json
import os
import random
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_data.chat import load_tokenizer
from dflash_data.plan import PackPlan
from dflash_data.prepare import Recipe, Source, prepare
from dflash_model import UserError
from dflash_train.cli import parse
from dflash_train.config import key

WORDS = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text().split()


@dataclass
class DataBench:
    """One to three turns each, log-normal lengths."""

    config: str = key("", "YAML file that the other keys override")
    tokenizer: str = key("", "folder with the target's tokenizer and chat template")
    rows: int = key(100_000, "conversations")
    seq_len: int = key(4096, "S")
    workers: int = key(0, "processes; 0: one per core")
    documents: int = key(1_000_000, "documents of the packing plan")


def write_conversations(path: Path, rows: int) -> None:
    """JSONL of a median answer of 74 words, the same at every call."""
    rng = random.Random(0)

    def text(mean: float) -> str:
        at, length = rng.randrange(len(WORDS)), max(1, int(rng.lognormvariate(mean, 0.8)))
        return " ".join(WORDS[(at + 7 * index) % len(WORDS)] for index in range(length))

    with path.open("w") as file:
        for _ in range(rows):
            turns = [
                turn
                for _ in range(rng.choice([1, 1, 2, 3]))
                for turn in ({"role": "user", "content": text(3)}, {"role": "assistant", "content": text(4.3)})
            ]
            file.write(json.dumps({"messages": turns}) + "\n")


def bench_data(argv: list[str]) -> dict[str, Any]:
    """Prepare once, plan once; wall-clock seconds and the largest process."""
    bench = parse(DataBench, argv, __doc__ or "")
    if not bench.tokenizer:
        raise UserError("tokenizer is missing; it takes the target's folder")
    tokenizer, workers = load_tokenizer(bench.tokenizer), bench.workers or os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "chat.jsonl"
        write_conversations(source, bench.rows)
        recipe, began = Recipe(max_length=bench.seq_len, heldout_ratio=0.01), time.perf_counter()
        ledger, _ = prepare([Source(source)], Path(folder) / "out", tokenizer, recipe, workers=workers)
        seconds, megabytes = time.perf_counter() - began, source.stat().st_size / 1e6
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    peak = max(resource.getrusage(process).ru_maxrss for process in who) / 2**20
    lengths = np.random.default_rng(0).lognormal(6.5, 0.9, bench.documents).astype(np.int64).clip(16, bench.seq_len)
    began = time.perf_counter()
    plan = PackPlan(lengths, bench.seq_len, seed=0)
    tokens = sum(ledger.tokens.values())
    return {
        "bench": "data", "rows": ledger.rows_in, "megabytes": megabytes, "tokens": tokens, "workers": workers,
        "seconds": seconds, "rows_s": ledger.rows_in / seconds, "ktok_s": tokens / seconds / 1e3,
        "peak_gib_of_a_process": peak, "plan_documents": bench.documents,
        "plan_seconds": time.perf_counter() - began,
        "plan_fill": float(lengths.sum() / (len(plan) * bench.seq_len)),
    }  # fmt: skip
