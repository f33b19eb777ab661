"""A dataset that needs no text: short random documents to memorise, for debugging and tests."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from dflash_data.chunks import SPLITS, write_documents
from dflash_data.encoder import Encoded
from dflash_data.prepare import Ledger

PROMPT_SHARE = 0.25


def write_synthetic(folder: Path, *, documents: int, max_length: int, vocab_size: int, seed: int) -> None:
    """Write ``documents`` documents of random tokens; the first quarter of each carries no loss.

    Every eighth is held out and also stands in the training split: what is measured is memorising.
    """
    rng = np.random.default_rng((seed, 7))
    work = folder.with_name(folder.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    settings = {"documents": documents, "max_length": max_length, "vocab_size": vocab_size, "seed": seed}
    ledger = Ledger(settings=settings, rows_in=documents, max_token_id=vocab_size - 2)
    digest = hashlib.sha256()
    splits: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for number in range(documents):
        length = int(rng.integers(max_length // 4, max_length + 1))
        prompt = int(length * PROMPT_SHARE)
        ids = rng.integers(0, vocab_size - 1, length).tolist()  # the last id stays free for the mask token
        mask = [False] * prompt + [True] * (length - prompt)
        for split in SPLITS if number % 8 == 0 else SPLITS[:1]:
            ledger.add(split, Encoded(ids, mask, cut=False), None)
            digest.update(json.dumps([split, ids, mask]).encode())
            splits[split].append(
                {"input_ids": ids, "loss_mask": mask, "length": length, "supervised": sum(mask), "copies": 1,
                 "source": f"synthetic:{number}"}
            )  # fmt: skip
    for split, rows in splits.items():
        (work / split).mkdir(parents=True)
        write_documents(work / split / "0.arrow", rows)
    ledger.fingerprint = digest.hexdigest()
    ledger.write(work)
    work.rename(folder)
