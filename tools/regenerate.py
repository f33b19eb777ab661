"""Let the target answer prompts greedily: python tools/regenerate.py target.path=T prompts=in.jsonl out=out.jsonl"""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from dflash_train.job import dtype_of


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
    """Continue where an earlier run of the same command stopped, count what is dropped."""
    config = parse(RegenerateConfig, argv, __doc__ or "")
    if not config.out:
        raise UserError("out is not set; it takes the JSONL file to write")
    dtype = dtype_of("target.dtype", config.target.dtype)
    rows = list(read_rows(check_sources("prompts", config.prompts)))
    usable = [s.row for s in rows if s.row is not None and isinstance(s.row["messages"], list) and s.row["messages"]]
    target = find_target(config.target.path, None)
    settings = {"target": str(target.location), "prompts": config.prompts, "max_new_tokens": config.max_new_tokens}
    progress = Progress.open(Path(config.out), {**settings, "dtype": config.target.dtype, "rows": len(usable)})
    if progress.done == len(usable):
        print(f"{config.out} is complete ({progress.done} prompts); remove it to redo it", file=sys.stderr)
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(config.target.tokenizer or target.location)
    model = AutoModelForCausalLM.from_pretrained(target.location, dtype=dtype).to(device)
    bar = tqdm(total=len(usable), initial=progress.done, unit="prompt")
    for begin in range(progress.done, len(usable), config.batch_size):
        batch = usable[begin : begin + config.batch_size]
        new = regenerate(
            model,
            tokenizer,
            batch,
            target_name=target.name,
            max_new_tokens=config.max_new_tokens,
            options=config.target.template_options,
        )
        progress.add(new)
        bar.update(len(batch))
    bar.close()
    print(
        f"{config.out}: {progress.done - progress.dropped} of {len(rows)} prompts; {progress.dropped} responses did not"
        f" survive decoding and encoding, {len(rows) - len(usable)} rows had no messages",
        file=sys.stderr,
    )
    return 0


@dataclass
class Progress:
    """An output file and, beside it, how much of it is done: written after each batch, so a kill loses one batch."""

    out: Path
    settings: dict[str, Any]
    done: int = 0
    dropped: int = 0
    size: int = 0

    @classmethod
    def open(cls, out: Path, settings: dict[str, Any]) -> "Progress":
        """Find what is done already.

        Raises:
            UserError: the output exists and was not written by this command with these settings.
        """
        out.parent.mkdir(parents=True, exist_ok=True)
        progress = cls(out, settings)
        if not out.exists():
            return progress
        if not progress.path.is_file():
            raise UserError(
                f"out is {out}; it exists and was not written by this tool: remove it or choose another name"
            )
        known = json.loads(progress.path.read_text())
        if known["settings"] != settings:
            raise UserError(f"out is {out}; it was written with other settings ({known['settings']}): remove it first")
        progress.done, progress.dropped, progress.size = known["done"], known["dropped"], known["size"]
        os.truncate(out, progress.size)  # what a killed run wrote after its last complete batch
        return progress

    @property
    def path(self) -> Path:
        """The file that says how much is done."""
        return self.out.with_name(self.out.name + ".progress.json")

    def add(self, rows: list[dict[str, Any] | None]) -> None:
        """Append one batch."""
        with self.out.open("ab") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows if row is not None).encode())
            self.size = file.tell()
        self.done, self.dropped = self.done + len(rows), self.dropped + rows.count(None)
        state = {"settings": self.settings, "done": self.done, "dropped": self.dropped, "size": self.size}
        self.path.write_text(json.dumps(state) + "\n")


if __name__ == "__main__":
    run_tool(main)
