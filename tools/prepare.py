"""Tokenize conversations: python tools/prepare.py config=FILE data.sources=a.jsonl,b.jsonl data.path=DIR"""

from pathlib import Path

from dflash_data.chat import load_tokenizer
from dflash_data.prepare import Ledger, prepare
from dflash_data.sources import check_sources
from dflash_data.target import find_target
from dflash_model import UserError
from dflash_train.cli import parse, run_tool
from dflash_train.config import RunConfig

DEMO = str(Path(__file__).parent / "configs" / "demo.yaml")


def main(argv: list[str]) -> int:
    """Prepare, or find that it is done already."""
    config = parse(RunConfig, argv, __doc__ or "", default_config=DEMO)
    paths = check_sources("data.sources", config.data.sources)
    source = config.target.tokenizer or find_target(config.target.path, config.target.config).folder
    if source is None:
        raise UserError("target.path is missing; its tokenizer and chat template are needed to prepare data")
    out = Path(config.data.path).expanduser()
    existed = out.is_dir()
    ledger, reused = prepare(
        paths,
        out,
        load_tokenizer(source),
        max_length=config.data.seq_len,
        heldout_ratio=config.data.heldout_ratio,
        options=config.target.template_options,
    )
    print(f"{out}: {'unchanged, reused' if reused else 'replaced' if existed else 'written'}")
    print(summary(ledger))
    return 0


def summary(ledger: Ledger) -> str:
    """What became of every row."""
    lines = [f"{ledger.rows_in} rows in, {sum(ledger.rows.values())} kept, {sum(ledger.dropped.values())} dropped"]
    for split, rows in ledger.rows.items():
        tokens, supervised = ledger.tokens[split], ledger.supervised_tokens[split]
        lines.append(f"  {split}: {rows} conversations, {tokens} tokens, {supervised / max(tokens, 1):.0%} supervised")
    if ledger.cut_to_max_length:
        lines.append(f"  cut at data.seq_len: {ledger.cut_to_max_length}")
    lines += [f"  dropped: {reason}: {count}" for reason, count in ledger.dropped.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    run_tool(main)
