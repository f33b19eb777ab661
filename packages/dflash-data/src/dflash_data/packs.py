"""Packs: one row of documents with its anchors, before and after the target has run; and their layout in bytes.

Legend: S tokens of the row, A anchors, K block size, E = taps * target width.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_data.dataset import PreparedData
from dflash_data.plan import PackPlan
from dflash_data.schedule import Stream, WorkItem
from dflash_model.blocks import first_of_document, label_blocks, sample_anchors

PAD_DOCUMENT = -1
TOKEN_FIELDS = (
    "input_ids_S",
    "position_S",
    "doc_S",
    "loss_mask_S",
    "anchor_A",
    "first_A",
    "label_AK",
    "weight_AK",
)
# What a target rank writes beside a pack: seconds of its main thread in this round (sending: in the one before), of its
# device in the forward (0 without a GPU), collated packs that waited, tokens that are no padding.
STATS = ("data_s", "forward_s", "agree_s", "send_s", "other_s", "device_s", "q_pre", "document_tokens", "busy")


@dataclass
class TokenPack:
    """A row before the target has seen it; CPU tensors.

    Attributes:
        item: its place in the job.
        input_ids_S: int32 token ids, 0 in the padded tail.
        position_S: int32, restarting in every document and in the tail.
        doc_S: int32 document number in the row, -1 in the tail.
        loss_mask_S: uint8, 1 where the target's own text stands.
        anchor_A: int32 anchors in ascending order; unused ones are 0 with first 0, so their context is empty.
        first_A: int32 first token of each anchor's document.
        label_AK: int32 token taught to each slot.
        weight_AK: fp32 loss weight of each slot, 0 where nothing is taught.
    """

    item: WorkItem
    input_ids_S: Tensor
    position_S: Tensor
    doc_S: Tensor
    loss_mask_S: Tensor
    anchor_A: Tensor
    first_A: Tensor
    label_AK: Tensor
    weight_AK: Tensor

    def document_lengths(self) -> list[int]:
        """Lengths of the documents in order, the padded tail as the last one."""
        starts = (self.position_S == 0).nonzero()[:, 0].tolist()
        return [b - a for a, b in zip(starts, [*starts[1:], len(self.position_S)], strict=True)]


def staged(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without waiting for what the device is doing.

    A copy from pageable memory would: the driver waits for the stream before it reads more than 64 KB. The page-locked
    copy comes from torch's cache of such memory, which keeps it until the transfer is through.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class PackLayout:
    """Where each field of a pack lies in one contiguous message.

    A pack is sent as one buffer of fixed size: one transfer to pinned memory, one message, one transfer back.
    """

    seq_len: int
    num_anchors: int
    block_size: int
    context_size: int
    context_dtype: torch.dtype

    def fields(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], int, int]]:
        """Name, type, shape, first and one-past-last byte of every field; each starts at a multiple of 64."""
        row, anchors, blocks = (self.seq_len,), (self.num_anchors,), (self.num_anchors, self.block_size)
        specs: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
            ("header", torch.int64, (3,)),
            ("stats", torch.float64, (len(STATS),)),
            ("input_ids_S", torch.int32, row),
            ("position_S", torch.int32, row),
            ("doc_S", torch.int32, row),
            ("loss_mask_S", torch.uint8, row),
            ("anchor_A", torch.int32, anchors),
            ("first_A", torch.int32, anchors),
            ("label_AK", torch.int32, blocks),
            ("weight_AK", torch.float32, blocks),
            ("context_SE", self.context_dtype, (self.seq_len, self.context_size)),
        ]
        offset = 0
        for name, dtype, shape in specs:
            size = int(np.prod(shape)) * dtype.itemsize
            yield name, dtype, shape, offset, offset + size
            offset = -(-(offset + size) // 64) * 64

    @property
    def num_bytes(self) -> int:
        """Size of one message."""
        return max(end for *_, end in self.fields())

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The fields of a pack as views into a uint8 buffer."""
        return {name: buffer[a:b].view(dtype).view(shape) for name, dtype, shape, a, b in self.fields()}

    def fill(self, views: dict[str, Tensor], pack: TokenPack, context_SE: Tensor, stats: dict[str, float]) -> None:
        """Write a pack into its views; the context is copied without waiting for the device."""
        item = pack.item
        views["header"].copy_(torch.tensor([item.index, item.stream, item.number]))
        views["stats"].copy_(torch.tensor([stats[name] for name in STATS], dtype=torch.float64))
        for name in TOKEN_FIELDS:
            views[name].copy_(getattr(pack, name))
        views["context_SE"].copy_(context_SE, non_blocking=True)


@dataclass
class HiddenPack:
    """A pack with its context features, on the drafter's device.

    Attributes:
        item: its place in the job.
        tensors: the fields of ``PackLayout`` as views of one device buffer.
        host: the same token fields on the CPU.
        stats: what the target rank measured for this pack.
    """

    item: WorkItem
    tensors: dict[str, Tensor]
    host: dict[str, Tensor]
    stats: dict[str, float]

    @classmethod
    def from_views(cls, host: dict[str, Tensor], device: dict[str, Tensor]) -> "HiddenPack":
        """Read header and statistics from the host copy; the host fields are cloned, so its buffer may be reused."""
        index, stream, number = host["header"].tolist()
        stats = dict(zip(STATS, host["stats"].tolist(), strict=True))
        kept = {name: host[name].clone() for name in TOKEN_FIELDS}
        return cls(WorkItem(index, Stream(stream), number), device, kept, stats)


class Collator:
    """Makes the TokenPack of a work item: a pure function of data, plan, seed and number."""

    def __init__(
        self,
        data: PreparedData,
        *,
        seq_len: int,
        num_anchors: int,
        block_size: int,
        gamma: float,
        seed: int,
        heldout_limit: int,
    ) -> None:
        self.data, self.seed = data, seed
        self.seq_len, self.num_anchors, self.block_size, self.gamma = seq_len, num_anchors, block_size, gamma
        self.train_plan = PackPlan(data.train.lengths, seq_len, seed)
        # Shuffled too: best-fit rows are sorted by length, and a limit would keep the longest documents only.
        self.heldout_plan = PackPlan(data.heldout.lengths, seq_len, seed)
        self.num_heldout = min(heldout_limit, len(self.heldout_plan))

    def __call__(self, item: WorkItem) -> TokenPack:
        """Build the pack; padding, and held-out numbers past the limit, give an empty one."""
        ids, mask, doc, position = (np.zeros(self.seq_len, dtype=np.int32) for _ in range(4))
        doc[:] = PAD_DOCUMENT
        cursor = 0
        for number, (tokens, supervised) in enumerate(self._documents(item)):
            span = slice(cursor, cursor + len(tokens))
            ids[span], mask[span], doc[span], position[span] = tokens, supervised, number, np.arange(len(tokens))
            cursor += len(tokens)
        position[cursor:] = np.arange(self.seq_len - cursor)
        loss_mask = mask.astype(np.bool_)
        anchors = np.zeros(0, dtype=np.int32)
        if item.stream is Stream.TRAIN:
            rng = np.random.default_rng((self.seed, item.number))
            anchors = sample_anchors(loss_mask, doc, self.num_anchors, rng)
        blocks = make_blocks(ids, loss_mask, doc, anchors, self.num_anchors, self.block_size, self.gamma)
        return TokenPack(
            item,
            torch.from_numpy(ids),
            torch.from_numpy(position),
            torch.from_numpy(doc),
            torch.from_numpy(mask.astype(np.uint8)),
            **blocks,
        )

    def _documents(self, item: WorkItem) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        if item.stream is Stream.TRAIN:
            return (self.data.train[index] for index in self.train_plan.documents(item.number))
        if item.stream is Stream.HELDOUT and item.number < self.num_heldout:
            return (self.data.heldout[index] for index in self.heldout_plan.documents(item.number))
        return iter(())


def make_blocks(
    ids_S: NDArray[np.int32],
    loss_mask_S: NDArray[np.bool_],
    doc_S: NDArray[np.int32],
    anchors: NDArray[np.int32],
    num_anchors: int,
    block_size: int,
    gamma: float,
) -> dict[str, Tensor]:
    """Anchors, first tokens, labels and weights, padded to ``num_anchors`` blocks with empty ones."""
    count = len(anchors)
    anchor_A, first_A = np.zeros((2, num_anchors), dtype=np.int32)
    label_AK = np.zeros((num_anchors, block_size), dtype=np.int32)
    weight_AK = np.zeros((num_anchors, block_size), dtype=np.float32)
    if count:
        anchor_A[:count] = anchors
        first_A[:count] = first_of_document(doc_S, anchors)
        label_AK[:count], weight_AK[:count] = label_blocks(ids_S, loss_mask_S, doc_S, anchors, block_size, gamma)
    arrays = {"anchor_A": anchor_A, "first_A": first_A, "label_AK": label_AK, "weight_AK": weight_AK}
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
