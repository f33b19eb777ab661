"""Conversations on disk to a tokenized dataset on disk, with a ledger that accounts for every row.

``<data.path>/train`` and ``<data.path>/heldout`` are Hugging Face datasets (memory-mapped Arrow), ``ledger.json``
stands beside them. The folder appears complete or not at all.
"""

import hashlib
import json
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Sequence, Value, disable_progress_bars
from datasets.arrow_writer import ArrowWriter
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dflash_data.chat import ChatEncoder, Refused
from dflash_data.sources import SourceRow, read_rows
from dflash_model.errors import UserError

HELDOUT = "heldout.jsonl"  # the held-out conversations as they came, for tools/evaluate.py
HELDOUT = "heldout.jsonl"  # the held-out conversations as they came: prompts for tools/evaluate.py
FORMAT = 4
FEATURES = Features(
    {
        "input_ids": Sequence(Value("int32")),
        "loss_mask": Sequence(Value("bool")),
        "length": Value("int32"),
        "supervised": Value("int32"),
        "source": Value("string"),
    }
)


@dataclass
class Ledger:
    """Where every input row went: ``rows_in == train + heldout + sum(dropped.values())``."""

    settings: dict[str, Any]
    rows_in: int = 0
    rows: dict[str, int] = field(default_factory=lambda: {"train": 0, "heldout": 0})
    tokens: dict[str, int] = field(default_factory=lambda: {"train": 0, "heldout": 0})
    supervised_tokens: dict[str, int] = field(default_factory=lambda: {"train": 0, "heldout": 0})
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_rows: list[dict[str, Any]] = field(default_factory=list)
    cut_to_max_length: int = 0
    generated_by: Counter[str] = field(default_factory=Counter)
    max_token_id: int = 0
    fingerprint: str = ""

    def write(self, folder: Path) -> None:
        """Write ``ledger.json``."""
        (folder / "ledger.json").write_text(json.dumps(self.__dict__, indent=2, sort_keys=True) + "\n")


def is_heldout(messages: list[dict[str, Any]], ratio: float) -> bool:
    """Whether a conversation is held out: a pure function of its text, so that equal conversations stay together."""
    text = json.dumps([(m.get("role"), m.get("content")) for m in messages], ensure_ascii=False)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < ratio * 2**64


def settings_of(
    paths: list[Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    heldout_ratio: float,
    options: dict[str, Any],
) -> dict[str, Any]:
    """What decides the result; a prepared folder with equal settings is reused."""
    return {
        "format": FORMAT,
        "sources": [[str(path), hashlib.sha256(path.read_bytes()).hexdigest()] for path in paths],
        "chat_template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
        "tokenizer": hashlib.sha256(_tokenizer_text(tokenizer).encode()).hexdigest(),
        "max_length": max_length,
        "heldout_ratio": heldout_ratio,
        "template_options": options,
    }


def _tokenizer_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """What decides how a tokenizer cuts text: all of it where it is a fast one, else its vocabulary."""
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer.backend_tokenizer.to_str()
    return json.dumps(tokenizer.get_vocab(), sort_keys=True)


def prepare(
    paths: list[Path],
    out: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    heldout_ratio: float,
    options: dict[str, Any],
) -> tuple[Ledger, bool]:
    """Tokenize ``paths`` into ``out``.

    Returns:
        The ledger, and whether it was reused from an earlier run with equal inputs and settings.

    Raises:
        UserError: the tokenizer has no chat template, ``out`` holds something else, or no row could be used.
    """
    if not tokenizer.chat_template:
        raise UserError("the target's tokenizer has no chat template; conversations need one")
    settings = settings_of(paths, tokenizer, max_length=max_length, heldout_ratio=heldout_ratio, options=options)
    known = read_ledger(out)
    if known is not None and known.settings == settings:
        return known, True
    out = out.absolute()
    if known is None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"data.path is {out}; it exists and is no prepared dataset: choose a folder of its own")
    encoder = ChatEncoder(tokenizer, options, max_length)
    work = out.with_name(out.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    ledger = _tokenize(paths, work, encoder, Ledger(settings), heldout_ratio)
    if not ledger.rows["train"]:
        shutil.rmtree(work)
        raise UserError(f"data.sources: none of {ledger.rows_in} rows can be trained on ({_reasons(ledger)})")
    ledger.write(work)
    shutil.rmtree(out, ignore_errors=True)
    work.rename(out)
    return ledger, False


def _reasons(ledger: Ledger) -> str:
    if not ledger.rows_in:
        return "the files are empty"
    reasons = [f"{reason}: {count}" for reason, count in ledger.dropped.most_common()]
    if ledger.rows["heldout"]:
        reasons.append(f"held out by data.heldout_ratio: {ledger.rows['heldout']}")
    return ", ".join(reasons)


def read_ledger(folder: Path) -> Ledger | None:
    """The ledger of a prepared dataset, or None where there is none."""
    path = folder / "ledger.json"
    if not path.is_file():
        return None
    raw = json.loads(path.read_text())
    ledger = Ledger(**raw)
    ledger.dropped, ledger.generated_by = Counter(raw["dropped"]), Counter(raw["generated_by"])
    return ledger


def _tokenize(paths: list[Path], work: Path, encoder: ChatEncoder, ledger: Ledger, heldout_ratio: float) -> Ledger:
    writer = DatasetWriter(work)
    heldout = (work / HELDOUT).open("w", encoding="utf-8")
    progress = tqdm(unit="B", unit_scale=True, total=sum(p.stat().st_size for p in paths), desc="tokenizing")
    for source in read_rows(paths):
        ledger.rows_in += 1
        try:
            split, row = _encode(source, encoder, heldout_ratio)
        except Refused as refused:
            ledger.dropped[refused.args[0]] += 1
            ledger.dropped_rows.append({"file": source.file, "line": source.line, "reason": refused.args[0]})
            continue
        finally:
            progress.update(len(json.dumps(source.row, ensure_ascii=False).encode("utf-8", "surrogatepass")))
        ledger.cut_to_max_length += row.pop("cut")
        writer.write(split, row)
        ledger.rows[split] += 1
        ledger.tokens[split] += row["length"]
        ledger.max_token_id = max(ledger.max_token_id, *row["input_ids"])
        ledger.supervised_tokens[split] += row["supervised"]
        assert source.row is not None  # _encode refused it otherwise
        ledger.generated_by[str(source.row.get("generated_by"))] += 1
        if split == "heldout":
            heldout.write(json.dumps(source.row, ensure_ascii=False) + "\n")
    progress.close()
    heldout.close()
    ledger.fingerprint = writer.close()
    return ledger


def _encode(source: SourceRow, encoder: ChatEncoder, heldout_ratio: float) -> tuple[str, dict[str, Any]]:
    if source.row is None:
        raise Refused(str(source.problem))
    messages = source.row["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Refused("messages is not a list of turns")
    encoded = encoder(
        messages,
        ended=source.row.get("finish_reason", "stop") != "length",
        last_turn_only="generated_by" in source.row,  # earlier turns are somebody else's words
    )
    row = {
        "input_ids": encoded.input_ids,
        "loss_mask": encoded.loss_mask,
        "length": len(encoded.input_ids),
        "supervised": sum(encoded.loss_mask),
        "source": f"{source.file}:{source.line}",
        "cut": encoded.cut,
    }
    return "heldout" if is_heldout(messages, heldout_ratio) else "train", row


class DatasetWriter:
    """Streams rows into the two splits and fingerprints their content."""

    def __init__(self, folder: Path) -> None:
        disable_progress_bars()  # of datasets; the tools show their own
        self.folder = folder
        self._digest = hashlib.sha256()
        self._writers = {
            split: ArrowWriter(features=FEATURES, path=str(folder / f"{split}.arrow")) for split in ("train", "heldout")
        }

    def write(self, split: str, row: dict[str, Any]) -> None:
        """Add one document."""
        self._digest.update(json.dumps([split, row["input_ids"], row["loss_mask"]]).encode())
        self._writers[split].write(row)

    def close(self) -> str:
        """Finish both splits and return the fingerprint of what they hold."""
        for split, writer in self._writers.items():
            count, _ = writer.finalize()
            path = self.folder / f"{split}.arrow"
            rows = Dataset.from_file(str(path))
            rows.save_to_disk(str(self.folder / split), num_shards=None if count else 1)  # 0 shards cannot be opened
            path.unlink()
        return self._digest.hexdigest()
