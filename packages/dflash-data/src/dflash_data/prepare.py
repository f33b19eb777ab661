"""From sources to a tokenized dataset with a ledger.

Rows are read in order and cut into chunks; workers encode chunks and write them, each with its part of the ledger. A
chunk is written before it is called done, so a stopped preparation continues where it was, and the folder appears under
its name only when it is complete. What becomes of a row depends on the row and the recipe alone, never on the workers.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dflash_data.chunks import LEFT_OUT, SPLITS, Chunk, ChunkEncoder, Part, counted, merge
from dflash_data.encoder import Encoder
from dflash_data.sources import RawRow, read_raw
from dflash_model.errors import UserError

HELDOUT = "heldout.jsonl"  # the held-out conversations as they came: prompts for tools/evaluate.py
DROPPED = "dropped.jsonl"
FORMAT = 9
CHUNK_ROWS, CHUNK_BYTES = 1000, 8 << 20


@dataclass(frozen=True)
class Source:
    """One file, folder or hub name.

    Attributes:
        path: where it is.
        weight: how often its conversations stand in one epoch; a fraction is a share of them, chosen by their text.
        max_rows: rows read at most; 0 for all.
        heldout: whether all of it is held out.
    """

    path: Path
    weight: float = 1.0
    max_rows: int = 0
    heldout: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What decides a prepared dataset beside its sources and the tokenizer.

    Attributes:
        max_length: longest document.
        heldout_ratio: share of conversations held out.
        options: passed to the chat template.
        too_long: ``turn``, ``cut`` or ``drop`` (see ``Encoder``).
        turns: ``all`` or ``last``.
        reasoning: whether reasoning carries loss.
        max_bad_rows: more dropped rows than this are an error; None for any number.
    """

    max_length: int
    heldout_ratio: float
    options: dict[str, Any] = field(default_factory=dict)
    too_long: str = "turn"
    turns: str = "all"
    reasoning: bool = True
    max_bad_rows: int | None = None


@dataclass
class Ledger(Part):
    """Where every input row went: ``rows_in == train + heldout + sum(dropped.values())``.

    Attributes:
        settings: sources, tokenizer and recipe; equal settings give an equal dataset.
        fingerprint: of the content of both splits.
        duplicates: conversations whose text stood in an earlier row too.
        in_both_splits: held-out texts that are trained on too; only sources that are held out as a whole can do that.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    duplicates: int = 0
    in_both_splits: int = 0

    def write(self, folder: Path) -> None:
        """Write ``ledger.json``."""
        (folder / "ledger.json").write_text(json.dumps(self.as_json(), indent=2, sort_keys=True) + "\n")


def read_ledger(folder: Path) -> Ledger | None:
    """The ledger of a prepared dataset, or None where there is none.

    Raises:
        UserError: an older version of this project wrote it.
    """
    path = folder / "ledger.json"
    if not path.is_file():
        return None
    raw = json.loads(path.read_text())
    if raw.keys() != Ledger().as_json().keys():
        raise UserError(f"data.path is {folder}; another version prepared it: remove it and prepare it again")
    return Ledger(**counted(raw))


def settings_of(sources: list[Source], tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> dict[str, Any]:
    """What decides the result; a prepared folder with equal settings is reused.

    A source counts as unchanged while size and time of change are the same: hashing would read all of it.
    """
    return {
        "format": FORMAT,
        "sources": [
            [str(source.path), source.weight, source.max_rows, source.heldout, *_version(source.path)]
            for source in sources
        ],
        "chat_template": hashlib.sha256(json.dumps(tokenizer.chat_template).encode()).hexdigest(),
        "tokenizer": hashlib.sha256(_tokenizer_text(tokenizer).encode()).hexdigest(),
        "recipe": {name: value for name, value in asdict(recipe).items() if name != "max_bad_rows"},
    }


def _version(path: Path) -> list[int]:
    file = path / "state.json" if path.is_dir() else path
    return [file.stat().st_size, file.stat().st_mtime_ns] if file.is_file() else []


def _tokenizer_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """What decides how a tokenizer cuts text: all of it where it is a fast one, else its vocabulary."""
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer.backend_tokenizer.to_str()
    return json.dumps(tokenizer.get_vocab(), sort_keys=True)


def prepare(
    sources: list[Source], out: Path, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, *, workers: int
) -> tuple[Ledger, bool]:
    """Tokenize ``sources`` into ``out``.

    Args:
        sources: what to read, in order.
        out: folder of the dataset; an unfinished one continues beside it.
        tokenizer: the target's.
        recipe: how to read it.
        workers: processes that encode; 1 does it in this one.

    Returns:
        The ledger, and whether it was reused from an earlier run with equal inputs and settings.

    Raises:
        UserError: the tokenizer has no chat template, ``out`` holds something else, no row could be used, or more were
            dropped than ``max_bad_rows``.
    """
    if not tokenizer.chat_template:
        raise UserError("the target's tokenizer has no chat template; conversations need one")
    settings = settings_of(sources, tokenizer, recipe)
    known = read_ledger(out)
    if known is not None and known.settings == settings:
        _check_bad_rows(known, recipe.max_bad_rows)
        return known, True
    out = out.absolute()
    if known is None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"data.path is {out}; it exists and is no prepared dataset: choose a folder of its own")
    work = _open_work(out.with_name(out.name + ".partial"), settings)
    encoder = Encoder(
        tokenizer=tokenizer, options=recipe.options, max_length=recipe.max_length, too_long=recipe.too_long,
        turns=recipe.turns, reasoning=recipe.reasoning,
    )  # fmt: skip
    parts = _encode_all(sources, ChunkEncoder(encoder, recipe.heldout_ratio, work), recipe.max_bad_rows, workers)
    ledger = Ledger(**merge(parts), settings=settings)
    if not ledger.rows["train"]:
        shutil.rmtree(work)
        raise UserError(f"data.sources: none of {ledger.rows_in} rows can be trained on ({reasons(ledger)})")
    ledger.fingerprint = hashlib.sha256("".join(part.digest for part in parts).encode()).hexdigest()
    trained, heldout = (
        np.concatenate([np.load(path) for path in sorted((work / "texts").glob(f"*.{split}.npy"))]) for split in SPLITS
    )
    ledger.duplicates = len(trained) + len(heldout) - len(np.union1d(trained, heldout))
    ledger.in_both_splits = len(np.intersect1d(trained, heldout))
    for name, folder in ((HELDOUT, "heldout_rows"), (DROPPED, "dropped")):
        with (work / name).open("wb") as file:
            for path in sorted((work / folder).iterdir()):
                file.write(path.read_bytes())
        shutil.rmtree(work / folder)
    for name in ("texts", "done"):
        shutil.rmtree(work / name)
    (work / "settings.json").unlink()
    ledger.write(work)
    shutil.rmtree(out, ignore_errors=True)
    work.rename(out)
    return ledger, False


def _open_work(work: Path, settings: dict[str, Any]) -> Path:
    """The folder of an unfinished preparation: continued if it was the same one, else begun anew."""
    path, text = work / "settings.json", json.dumps(settings, sort_keys=True)
    if not path.is_file() or path.read_text() != text:
        shutil.rmtree(work, ignore_errors=True)
        for name in ("train", "heldout", "texts", "heldout_rows", "dropped", "done"):
            (work / name).mkdir(parents=True)
        path.write_text(text)
    return work


def reasons(ledger: Ledger, most: int = 3) -> str:
    """Why rows were dropped, the commonest reasons first."""
    if not ledger.rows_in:
        return "the sources are empty"
    named = [f"{reason}: {count}" for reason, count in ledger.dropped.most_common(most)]
    if ledger.rows["heldout"]:
        named.append(f"held out by data.heldout_ratio: {ledger.rows['heldout']}")
    return ", ".join(named)


def _chunks(sources: list[Source]) -> Iterator[Chunk]:
    """Rows in groups of about equal work; the same groups every time."""
    index = 0
    for source in sources:
        rows: list[RawRow] = []
        size = 0
        for number, row in enumerate(read_raw([source.path])):
            if source.max_rows and number == source.max_rows:
                break
            rows.append(row)
            size += len(row.content) if isinstance(row.content, bytes) else 1000
            if len(rows) == CHUNK_ROWS or size > CHUNK_BYTES:
                yield Chunk(index, source.weight, source.heldout, rows)
                index, rows, size = index + 1, [], 0
        if rows:
            yield Chunk(index, source.weight, source.heldout, rows)
            index += 1


def _encode_all(sources: list[Source], encode: ChunkEncoder, max_bad_rows: int | None, workers: int) -> list[Part]:
    """Encode every chunk that is not done, in order; shows rows and tokens a second."""
    parts: list[Part] = []
    rows, tokens, dropped = 0, 0, Counter[str]()
    with tqdm(unit="row", desc="tokenizing") as bar:
        for part in _results(encode, _chunks(sources), workers):
            parts.append(part)
            rows += part.rows_in
            tokens, dropped = tokens + sum(part.tokens.values()), dropped + part.dropped
            bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-3) / 1e3:.0f} ktok/s", refresh=False)
            bar.update(part.rows_in)
            _check_bad_rows(Ledger(rows_in=rows, dropped=dropped), max_bad_rows)
    return parts


def _check_bad_rows(ledger: Ledger, most: int | None) -> None:
    """Raise if more were dropped than may be; those that a weight leaves out are not bad."""
    bad = ledger.dropped.total() - ledger.dropped[LEFT_OUT]
    if most is not None and bad > most:
        dropped = Counter({reason: count for reason, count in ledger.dropped.items() if reason != LEFT_OUT})
        raise UserError(
            f"data.max_bad_rows is {most}; {bad} of the first {ledger.rows_in} rows were dropped"
            f" ({reasons(Ledger(rows_in=ledger.rows_in, dropped=dropped))})"
        )


_worker_encode: ChunkEncoder  # in a worker process


def _adopt(encode: ChunkEncoder, parent: int) -> None:
    """Set a worker up; it leaves when the process that started it was killed."""
    global _worker_encode
    _worker_encode = encode

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(chunk: Chunk) -> Part:
    return _worker_encode(chunk)


def _results(encode: ChunkEncoder, chunks: Iterator[Chunk], workers: int) -> Iterator[Part]:
    """Parts in the order of their chunks; at most two chunks a worker are read ahead."""
    if workers == 1:
        yield from map(encode, chunks)
        return
    context = multiprocessing.get_context("fork")  # inherits the tokenizer, and imports nothing again
    with ProcessPoolExecutor(workers, context, _adopt, (encode, os.getpid())) as pool:
        pending: deque[Future[Part]] = deque()
        try:
            for chunk in chunks:
                pending.append(pool.submit(_work, chunk))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
