"""A prepared dataset, opened for training."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets, disable_progress_bars
from numpy.typing import NDArray

from dflash_data.prepare import Ledger, read_ledger
from dflash_model.errors import UserError


@dataclass(frozen=True)
class Documents:
    """One split: documents by index, their lengths up front.

    Attributes:
        rows: the stored documents.
        row_of: index of the stored document; one of a weighted source stands here several times.
        lengths: tokens of each document.
        supervised: those of them that carry loss.
    """

    rows: Dataset
    row_of: NDArray[np.int64]
    lengths: NDArray[np.int64]
    supervised: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row_of)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Token ids and loss mask of one document."""
        table = cast(pa.Table, self.rows[int(self.row_of[index])])  # the split is opened in Arrow format
        ids, mask = (table.column(name)[0].values for name in ("input_ids", "loss_mask"))
        return ids.to_numpy(), mask.to_numpy(zero_copy_only=False)

    def source(self, index: int) -> str:
        """File and line that a document came from."""
        return cast(pa.Table, self.rows[int(self.row_of[index])]).column("source")[0].as_py()


@dataclass(frozen=True)
class PreparedData:
    """Both splits and their ledger."""

    train: Documents
    heldout: Documents
    ledger: Ledger


def open_prepared(folder: Path, *, seq_len: int, vocab_size: int) -> PreparedData:
    """Open what ``tools/prepare.py`` wrote.

    Raises:
        UserError: there is nothing there, it is empty, a document is longer than a row, or it was made for another
            vocabulary.
    """
    ledger = read_ledger(folder)
    if ledger is None:
        raise UserError(
            f"data.path is {folder}; there is no prepared dataset there (make one: python tools/prepare.py config=…"
            f" data.path={folder} data.sources=…)"
        )
    if ledger.max_token_id >= vocab_size:
        raise UserError(
            f"data.path is {folder}; it holds token id {ledger.max_token_id}, the target's vocabulary ends at"
            f" {vocab_size - 1}: prepare it with this target's tokenizer"
        )
    disable_progress_bars()
    train, heldout = (_open(folder / split) for split in ("train", "heldout"))
    if not len(train):
        raise UserError(f"data.path is {folder}; its training split has no rows")
    longest = int(max(split.lengths.max(initial=0) for split in (train, heldout)))
    if longest > seq_len:
        raise UserError(
            f"data.seq_len is {seq_len}; the dataset at {folder} was prepared with documents of up to {longest}"
            f" tokens: prepare it again with data.seq_len={seq_len}"
        )
    return PreparedData(train, heldout, ledger)


def _open(folder: Path) -> Documents:
    """Memory-mapped: only what is asked for is read."""
    rows = concatenate_datasets([Dataset.from_file(str(path)) for path in sorted(folder.glob("*.arrow"))])
    columns = {name: rows.data.column(name).to_numpy() for name in ("length", "supervised", "copies")}
    row_of = np.repeat(np.arange(len(rows)), columns["copies"])
    lengths, supervised = (columns[name].astype(np.int64)[row_of] for name in ("length", "supervised"))
    return Documents(rows.with_format("arrow"), row_of, lengths, supervised)
