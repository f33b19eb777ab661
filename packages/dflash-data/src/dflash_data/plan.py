"""The packing plan: which documents form which row, and which row is pack k.

A pure function of the document lengths, ``seq_len`` and the seed, so every rank computes it for itself and the k-th
pack of a run needs no state but k. Documents are packed once (best fit, longest first), so an epoch has the same
number of rows every time; only the order of the rows changes with the epoch.
"""

from bisect import bisect_left, insort
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def pack_documents(lengths: NDArray[np.int64], seq_len: int, seed: int) -> list[list[int]]:
    """Fill rows of ``seq_len`` tokens: each document, longest first, goes to the fullest row that still takes it.

    Equal lengths are shuffled by the seed, so that neighbours in the source do not end up in one row.
    """
    shuffled = np.random.default_rng((seed, 0)).permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # free tokens -> rows with that much room
    rooms: list[int] = []  # the keys of open_rows, sorted
    for document in order.tolist():
        length = int(lengths[document])
        assert 0 < length <= seq_len, f"document {document} has {length} tokens; rows have {seq_len}"
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), seq_len
            rows.append([])
        else:
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[at]
        rows[row].append(document)
        left = room - length
        if left not in open_rows:
            open_rows[left] = []
            insort(rooms, left)
        open_rows[left].append(row)
    return rows


class PackPlan:
    """Rows of documents, and the row behind each pack number.

    Attributes:
        rows: document indices by row.
        fill: share of the rows' tokens that are document tokens.
    """

    def __init__(self, lengths: NDArray[np.int64], seq_len: int, seed: int) -> None:
        self.rows = pack_documents(lengths, seq_len, seed)
        self.fill = float(lengths.sum()) / (len(self.rows) * seq_len) if self.rows else 0.0
        self._seed = seed

    def __len__(self) -> int:
        """Rows, that is packs in one epoch."""
        return len(self.rows)

    def documents(self, number: int) -> list[int]:
        """Documents of pack ``number``: row ``number mod rows`` of epoch ``number div rows``."""
        epoch, index = divmod(number, len(self.rows))
        return self.rows[_order(self._seed, epoch, len(self.rows))[index]]


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_rows: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, 1 + epoch)).permutation(num_rows)
