"""Acceptance length of known texts, without decoding.

The target's text is known, so speculative decoding can be replayed: draft at the first response token, count how many
proposals match the text, move on by that many and one, draft again. All anchors of a row are drafted in a few packed
forwards; then the walk is arithmetic. If the responses are the target's own greedy output this is exactly the number
that greedy decoding would reach (up to the target's numerics); otherwise it is teacher-forced and called so.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_data.packs import PAD_DOCUMENT, HiddenPack, make_blocks
from dflash_model.blocks import anchor_candidates
from dflash_model.mask import TILE
from dflash_train.acceptance import Rounds
from dflash_train.step import DraftStep


def replay(run_S: NDArray[np.int64], candidate_S: NDArray[np.bool_]) -> Rounds:
    """Walk one document.

    Args:
        run_S: at each anchor, how many of its proposals match the text in a row.
        candidate_S: where a block may start; a stretch of these is a response without its last token.

    Returns:
        Its rounds. Each stretch begins with a token from the prefill, which belongs to none; the last round of a
        stretch is cut at the end of the response.
    """
    rows: list[tuple[int, int, int, bool]] = []
    edges = np.flatnonzero(np.diff(np.concatenate(([False], candidate_S, [False])).astype(np.int8)))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        at = begin
        while at < end:
            accepted = min(int(run_S[at]), end - at)
            committed = min(accepted + 1, end - at)
            rows.append((at + 1, accepted, committed, at + committed == end))
            at += committed
    context, accepted_R, committed_R, last = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return Rounds(context, accepted_R, committed_R, last.astype(np.bool_))


def evaluate_pack(step: DraftStep, pack: HiddenPack, num_chunks: int) -> list[Rounds]:
    """Rounds of every document of a held-out pack.

    Args:
        step: the drafter to evaluate.
        pack: a held-out pack; its own anchors are ignored.
        num_chunks: forwards to run, the same on all ranks: each holds as many anchors as a training pack.
    """
    ids, doc = pack.host["input_ids_S"].numpy(), pack.host["doc_S"].numpy()
    mask = pack.host["loss_mask_S"].numpy().astype(np.bool_)
    return _replay_row(step, pack.tensors, (ids, mask, doc), len(pack.host["anchor_A"]), num_chunks)


def evaluate_text(step: DraftStep, context_SE: Tensor, token_ids: Sequence[int], loss_mask: Sequence[bool]) -> Rounds:
    """Rounds of one document.

    Args:
        step: the drafter to evaluate.
        context_SE: context features of the tokens; those of the last one are not used.
        token_ids: its tokens, stop tokens included.
        loss_mask: which of them the target wrote.
    """
    length = len(token_ids)
    width = -(-length // TILE) * TILE
    ids, doc = np.zeros(width, dtype=np.int32), np.full(width, PAD_DOCUMENT, dtype=np.int32)
    ids[:length], doc[:length] = token_ids, 0
    mask = np.zeros(width, dtype=np.bool_)
    mask[:length] = loss_mask
    device = context_SE.device
    tensors = {
        "context_SE": torch.cat((context_SE, context_SE.new_zeros(width - len(context_SE), context_SE.shape[1]))),
        "input_ids_S": torch.from_numpy(ids).to(device),
        "position_S": torch.arange(width, dtype=torch.int32, device=device),
    }
    num_chunks = -(-int(mask.sum()) // TILE)
    return _replay_row(step, tensors, (ids, mask, doc), TILE, num_chunks)[0]


def _replay_row(
    step: DraftStep,
    tensors: dict[str, Tensor],
    row: tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int32]],
    num_anchors: int,
    num_chunks: int,
) -> list[Rounds]:
    """Draft at every candidate of a row, ``num_anchors`` at a time, then walk each document."""
    ids, mask, doc = row
    block_size, device = step.drafter.config.block_size, tensors["context_SE"].device
    candidates = anchor_candidates(mask, doc)
    run_S = np.zeros(len(ids), dtype=np.int64)
    for chunk in range(num_chunks):
        anchors = candidates[chunk * num_anchors : (chunk + 1) * num_anchors]
        blocks = make_blocks(ids, mask, doc, anchors, num_anchors, block_size, gamma=1.0)
        rows_R = blocks["weight_AK"].flatten().nonzero()[:, 0]
        choice_R = step.choices(
            {**tensors, **{name: tensor.to(device) for name, tensor in blocks.items()}}, rows_R.to(device)
        ).cpu()
        right_AK = torch.zeros_like(blocks["label_AK"], dtype=torch.int64)
        right_AK.view(-1)[rows_R] = (choice_R == blocks["label_AK"].flatten()[rows_R]).long()
        run_S[anchors] = right_AK[: len(anchors), 1:].cumprod(-1).sum(-1).numpy()
    candidate_S = np.zeros(len(ids), dtype=np.bool_)
    candidate_S[candidates] = True
    return [replay(run_S[doc == number], candidate_S[doc == number]) for number in range(int(doc.max()) + 1)]
