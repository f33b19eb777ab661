"""One chunk of rows to files: the unit of parallel and resumable preparation.

A chunk writes its documents, its held-out rows, its dropped rows and the hashes of its texts under its number, and last
its part of the ledger: that file says that the chunk is done.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from datasets import Features, Sequence, Value
from datasets.arrow_writer import ArrowWriter

from dflash_data.conversation import Conversation, Refused, Text, as_document
from dflash_data.encoder import Encoded, Encoder
from dflash_data.sources import RawRow, parse

SPLITS = ("train", "heldout")
LEFT_OUT = "left out by data.weights"
FEATURES = Features(
    {
        "input_ids": Sequence(Value("int32")),
        "loss_mask": Sequence(Value("bool")),
        "length": Value("int32"),
        "supervised": Value("int32"),
        "copies": Value("int32"),
        "source": Value("string"),
    }
)


def _splits() -> dict[str, int]:
    return dict.fromkeys(SPLITS, 0)


@dataclass
class Part:
    """Counts of some rows; see ``Ledger``.

    Attributes:
        rows_in: rows read.
        rows: documents by split.
        tokens: their tokens.
        supervised_tokens: those with loss.
        dropped: rows by the reason for which they were dropped.
        cut_to_max_length: documents that were longer.
        generated_by: documents to train on by the model that wrote their last turn.
        heldout_by: the same of those held out.
        lengths: documents by length, in powers of two (the key is the upper bound).
        max_token_id: largest token id.
        digest: of the documents' content.
    """

    COUNTERS: ClassVar[tuple[str, ...]] = ("dropped", "generated_by", "heldout_by", "lengths")

    rows_in: int = 0
    rows: dict[str, int] = field(default_factory=_splits)
    tokens: dict[str, int] = field(default_factory=_splits)
    supervised_tokens: dict[str, int] = field(default_factory=_splits)
    dropped: Counter[str] = field(default_factory=Counter)
    cut_to_max_length: int = 0
    generated_by: Counter[str] = field(default_factory=Counter)
    heldout_by: Counter[str] = field(default_factory=Counter)
    lengths: Counter[str] = field(default_factory=Counter)
    max_token_id: int = 0
    digest: str = ""

    def as_json(self) -> dict[str, Any]:
        """All fields; ``dataclasses.asdict`` would count a Counter's items."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}

    def add(self, split: str, encoded: Encoded, generated_by: str | None) -> None:
        """Count one kept row."""
        length = len(encoded.input_ids)
        self.rows[split] += 1
        self.tokens[split] += length
        self.supervised_tokens[split] += sum(encoded.loss_mask)
        self.cut_to_max_length += encoded.cut
        (self.generated_by if split == "train" else self.heldout_by)[str(generated_by)] += 1
        self.lengths[str(1 << (length - 1).bit_length())] += 1
        self.max_token_id = max(self.max_token_id, *encoded.input_ids)


def counted(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields read from JSON, the counters as such."""
    return {name: Counter(value) if name in Part.COUNTERS else value for name, value in raw.items()}


def merge(parts: list[Part]) -> dict[str, Any]:
    """Sums of all counts, for the ledger."""
    total = Part().as_json()
    for part in parts:
        for item in fields(Part):
            value = getattr(part, item.name)
            if isinstance(value, Counter):
                total[item.name] = Counter(total[item.name]) + value
            elif isinstance(value, dict):
                total[item.name] = {key: total[item.name][key] + value[key] for key in value}
            elif item.name == "max_token_id":
                total[item.name] = max(total[item.name], value)
            elif isinstance(value, int):
                total[item.name] += value
    return total


def text_hash(document: object) -> int:
    """Of what a conversation says; equal conversations fall into one split, whatever else their rows hold."""
    if isinstance(document, Conversation):
        said: Any = [
            (m["role"], m["content"], m.get("reasoning_content"), m.get("tool_calls")) for m in document.messages
        ]
    else:
        said = document.text if isinstance(document, Text) else document.input_ids  # type: ignore[attr-defined]
    text = json.dumps(said, ensure_ascii=False, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def split_of(said: int, heldout_ratio: float) -> str:
    """A pure function of the text."""
    return "heldout" if said < heldout_ratio * 2**64 else "train"


def copies_of(said: int, weight: float) -> int:
    """How often a conversation stands in an epoch: the weight, a fraction of one decided by the text."""
    share = int.from_bytes(hashlib.sha256(said.to_bytes(8, "big")).digest()[:8], "big") / 2**64
    return int(weight) + (share < weight - int(weight))


@dataclass(frozen=True)
class Chunk:
    """Rows of one source that are encoded together."""

    index: int
    weight: float
    heldout: bool
    rows: list[RawRow]


@dataclass(frozen=True)
class ChunkEncoder:
    """Encodes chunks into a folder."""

    encoder: Encoder
    heldout_ratio: float
    folder: Path

    def __call__(self, chunk: Chunk) -> Part:
        """Write the chunk's files; only reads them if an earlier run has written them."""
        done = self.folder / "done" / f"{chunk.index:08d}.json"
        if done.is_file():
            return Part(**counted(json.loads(done.read_text())))
        part = self._encode(chunk)
        partial = done.with_suffix(".partial")
        partial.write_text(json.dumps(part.as_json()))
        os.replace(partial, done)
        return part

    def _encode(self, chunk: Chunk) -> Part:
        name = f"{chunk.index:08d}"
        part, digest = Part(), hashlib.sha256()
        said_by_row: dict[str, list[int]] = {split: [] for split in SPLITS}
        documents: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
        kept, dropped = [], []
        for raw in chunk.rows:
            part.rows_in += 1
            row = parse(raw)
            try:
                if row.row is None:
                    raise Refused(str(row.problem))
                document = as_document(row.row)
                said = text_hash(document)
                split = "heldout" if chunk.heldout else split_of(said, self.heldout_ratio)
                copies = copies_of(said, chunk.weight) if split == "train" else 1
                if not copies:
                    raise Refused(LEFT_OUT)
                encoded = self.encoder(document)
            except Refused as refused:
                part.dropped[refused.args[0]] += 1
                dropped.append({"file": raw.file, "line": raw.line, "reason": refused.args[0]})
                continue
            generated_by = document.generated_by if isinstance(document, Conversation) else None
            part.add(split, encoded, generated_by)
            digest.update(json.dumps([split, copies, encoded.input_ids, encoded.loss_mask]).encode())
            said_by_row[split].append(said)
            documents[split].append(
                {"input_ids": encoded.input_ids, "loss_mask": encoded.loss_mask, "length": len(encoded.input_ids),
                 "supervised": sum(encoded.loss_mask), "copies": copies, "source": f"{raw.file}:{raw.line}"}
            )  # fmt: skip
            if split == "heldout":
                kept.append(row.row)
        part.digest = digest.hexdigest()
        for split, rows in documents.items():
            write_documents(self.folder / split / f"{name}.arrow", rows)
            np.save(self.folder / "texts" / f"{name}.{split}.npy", np.array(said_by_row[split], dtype=np.uint64))
        for folder, rows in (("heldout_rows", kept), ("dropped", dropped)):
            lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
            (self.folder / folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        return part


def write_documents(path: Path, documents: Iterable[dict[str, Any]]) -> None:
    """An Arrow file of documents, also of none."""
    with ArrowWriter(features=FEATURES, path=str(path)) as writer:
        for document in documents:
            writer.write(document)
        writer.finalize()
