"""A dataset that needs no text: short random documents to memorise, for debugging and tests."""

import shutil
from pathlib import Path

import numpy as np

from dflash_data.prepare import DatasetWriter, Ledger

PROMPT_SHARE = 0.25


def write_synthetic(folder: Path, *, documents: int, max_length: int, vocab_size: int, seed: int) -> None:
    """Write ``documents`` documents of random tokens; the first quarter of each carries no loss.

    Every eighth is held out and also stands in the training split: what is measured is memorising.
    """
    rng = np.random.default_rng((seed, 7))
    work = folder.with_name(folder.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    settings = {"documents": documents, "max_length": max_length, "vocab_size": vocab_size, "seed": seed}
    ledger = Ledger(settings, rows_in=documents, max_token_id=vocab_size - 2)
    writer = DatasetWriter(work)
    for number in range(documents):
        length = int(rng.integers(max_length // 4, max_length + 1))
        prompt = int(length * PROMPT_SHARE)
        ids = rng.integers(0, vocab_size - 1, length).tolist()  # the last id stays free for the mask token
        mask = [False] * prompt + [True] * (length - prompt)
        for split in ("train", "heldout") if number % 8 == 0 else ("train",):
            row = {
                "input_ids": ids,
                "loss_mask": mask,
                "length": length,
                "supervised": sum(mask),
                "source": f"synthetic:{number}",
            }
            writer.write(split, row)
            ledger.rows[split] += 1
            ledger.tokens[split] += length
            ledger.supervised_tokens[split] += sum(mask)
    ledger.fingerprint = writer.close()
    ledger.write(work)
    work.rename(folder)
