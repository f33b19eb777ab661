"""Tokenize conversations: python tools/prepare.py config=FILE data.sources=a.jsonl,b.parquet data.path=DIR

With inspect=N also shows N of them, what carries loss marked.
"""

import json
import os
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dflash_data.chat import load_tokenizer
from dflash_data.dataset import open_prepared
from dflash_data.prepare import DROPPED, Ledger, Recipe, Source, prepare
from dflash_data.sources import NO_ARRAY, UNREADABLE, check_sources
from dflash_data.target import find_target
from dflash_model import UserError
from dflash_train.cli import parse, run_tool
from dflash_train.config import DataSection, RunConfig, key
from dflash_train.job import check_row_length

DEMO = str(Path(__file__).parent / "configs" / "demo.yaml")
GREEN, PLAIN = "\033[92m", "\033[0m"


@dataclass
class PrepareConfig(RunConfig):
    """A training job's configuration, and what to show of its data."""

    inspect: int = key(0, "show this many prepared conversations, what carries loss in green (between ⟦ ⟧ in a file)")


def main(argv: list[str]) -> int:
    """Prepare, or find that it is done already."""
    config = parse(PrepareConfig, argv, __doc__ or "", default_config=DEMO)
    data = config.data
    sources = list_sources(data)
    source = config.target.tokenizer or find_target(config.target.path, config.target.config).folder
    if source is None:
        raise UserError("target.path is missing; its tokenizer and chat template are needed to prepare data")
    check_row_length(data.seq_len)
    if not 0 <= data.heldout_ratio < 1:
        raise UserError(f"data.heldout_ratio is {data.heldout_ratio}; it must be at least 0 and less than 1")
    if data.prepare_workers < 0 or config.inspect < 0:
        raise UserError(f"data.prepare_workers is {data.prepare_workers}, inspect {config.inspect}; both are 0 or more")
    out = Path(data.path).expanduser()
    tokenizer = load_tokenizer(source, config.target.template_options)
    recipe = Recipe(
        max_length=data.seq_len, heldout_ratio=data.heldout_ratio, options=config.target.template_options,
        too_long=data.too_long, turns=data.turns, reasoning=data.train_on_reasoning, max_bad_rows=data.max_bad_rows,
    )  # fmt: skip
    existed = out.is_dir()
    ledger, reused = prepare(sources, out, tokenizer, recipe, workers=data.prepare_workers or os.cpu_count() or 1)
    print(f"{out}: {'unchanged, reused' if reused else 'replaced' if existed else 'written'}")
    print(summary(ledger))
    if data.heldout_sources and not ledger.rows["heldout"]:
        print("  WARNING: data.heldout_sources gave no conversation: nothing will be evaluated")
    for row in map(json.loads, (out / DROPPED).read_text().splitlines()):
        if row["reason"] in (UNREADABLE, NO_ARRAY):
            print(f"  WARNING: {row['file']} was read up to row or line {row['line'] - 1} only: {row['reason']}")
    if config.inspect:
        show(out, tokenizer, config.inspect, data.seq_len)
    return 0


def list_sources(data: DataSection) -> list[Source]:
    """Sources with their weights and caps.

    Raises:
        UserError: the lists do not go together.
    """
    paths = check_sources("data.sources", data.sources)
    for name, values in (("weights", data.weights), ("max_rows", data.max_rows)):
        if values and (len(values) != len(paths) or min(values) < 0):
            raise UserError(
                f"data.{name} is {values}; it takes one number, 0 or more, for each of {len(paths)} sources"
            )
    weights, caps = data.weights or [1.0] * len(paths), data.max_rows or [0] * len(paths)
    heldout = check_sources("data.heldout_sources", data.heldout_sources) if data.heldout_sources else []
    trained = [Source(path, weight, cap) for path, weight, cap in zip(paths, weights, caps, strict=True)]
    return trained + [Source(path, heldout=True) for path in heldout]


def summary(ledger: Ledger) -> str:
    """What became of every row."""
    lines = [f"{ledger.rows_in} rows in, {sum(ledger.rows.values())} kept, {ledger.dropped.total()} dropped"]
    for split, rows in ledger.rows.items():
        tokens, supervised = ledger.tokens[split], ledger.supervised_tokens[split]
        lines.append(f"  {split}: {rows} conversations, {tokens} tokens, {supervised / max(tokens, 1):.0%} supervised")
    if ledger.cut_to_max_length:
        lines.append(f"  longer than data.seq_len: {ledger.cut_to_max_length}, ended early")
    if ledger.duplicates:
        lines.append(f"  duplicates (kept): {ledger.duplicates}")
    if ledger.in_both_splits:
        lines.append(f"  WARNING: {ledger.in_both_splits} conversations of data.heldout_sources are trained on too")
    lengths = sorted((int(limit), count) for limit, count in ledger.lengths.items())
    lines.append("  tokens: " + ", ".join(f"up to {limit}: {count}" for limit, count in lengths))
    lines += [f"  dropped: {reason}: {count}" for reason, count in ledger.dropped.most_common()]
    return "\n".join(lines)


def show(folder: Path, tokenizer: PreTrainedTokenizerBase, count: int, seq_len: int) -> None:
    """Print conversations with what carries loss marked."""
    begin, end = (GREEN, PLAIN) if sys.stdout.isatty() else ("⟦", "⟧")
    rows = open_prepared(folder, seq_len=seq_len, vocab_size=1 << 31).train
    for index in range(min(count, len(rows))):
        ids, mask = rows[index]
        print(f"\n--- {rows.source(index)}: {len(ids)} tokens, {int(mask.sum())} with loss")
        cuts = [0, *(i for i in range(1, len(ids)) if mask[i] != mask[i - 1]), len(ids)]
        for a, b in pairwise(cuts):
            text = str(tokenizer.decode(ids[a:b]))
            print(f"{begin}{text}{end}" if mask[a] else text, end="")
        print()


if __name__ == "__main__":
    run_tool(main)
