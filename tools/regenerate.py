"""Let the target answer prompts greedily: python tools/regenerate.py target.path=T prompts=in.jsonl out=out.jsonl"""

import itertools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from dflash_data.chat import load_tokenizer
from dflash_data.regenerate import regenerate
from dflash_data.sources import check_sources, read_rows
from dflash_data.target import find_target
from dflash_model import UserError
from dflash_train.cli import parse, run_tool
from dflash_train.config import TargetSection, key
from dflash_train.job import DTYPES


@dataclass
class RegenerateConfig:
    """One pass over a file of prompts."""

    config: str = key("", "YAML file that the other keys override")
    target: TargetSection = field(default_factory=TargetSection)
    prompts: list[str] = key([], "JSONL files with messages; a last assistant turn is replaced")
    out: str = key("", "JSONL file to write; an existing one is continued")
    batch_size: int = key(32, "conversations decoded at once")
    max_new_tokens: int = key(512, "longest response")


def main(argv: list[str]) -> int:
    """Continue where the output file ends, count what is dropped."""
    config = parse(RegenerateConfig, argv, __doc__ or "")
    if not config.out:
        raise UserError("out is not set; it takes the JSONL file to write")
    rows = [(source.row, source) for source in read_rows(check_sources(config.prompts))]
    usable = [row for row, _ in rows if row is not None and isinstance(row["messages"], list) and row["messages"]]
    target = find_target(config.target.path, None)
    out = Path(config.out)
    progress_file = out.with_name(out.name + ".progress")  # prompts done; the output file lacks the dropped ones
    done = int(progress_file.read_text()) if progress_file.is_file() and out.is_file() else 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(target.location)
    model = AutoModelForCausalLM.from_pretrained(target.location, dtype=DTYPES[config.target.dtype]).to(device)
    results = regenerate(
        model,
        tokenizer,
        itertools.islice(usable, done, None),
        target_name=target.name,
        batch_size=config.batch_size,
        max_new_tokens=config.max_new_tokens,
    )
    dropped = 0
    with out.open("a" if done else "w") as file:
        for _, new in tqdm(results, total=len(usable), initial=done, unit="prompt"):
            done += 1
            dropped += new is None
            if new is not None:
                file.write(json.dumps(new, ensure_ascii=False) + "\n")
            if done % config.batch_size == 0:
                file.flush()
                progress_file.write_text(str(done))
    progress_file.unlink(missing_ok=True)
    print(
        f"{out}: {done - dropped} of {len(rows)} prompts; {dropped} responses did not survive decoding and encoding,"
        f" {len(rows) - len(usable)} rows had no messages",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    run_tool(main)
