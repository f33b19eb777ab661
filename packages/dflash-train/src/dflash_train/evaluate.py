"""Acceptance length on held-out rows, without decoding.

The target's text is known, so speculative decoding can be replayed: draft at the first response token, count how many
proposals match the text, move on by that many and one, draft again. All anchors of a row are drafted in a few packed
forwards; then the walk is arithmetic. If the responses are the target's own greedy output this is exactly the number
that greedy decoding would reach (up to the target's numerics); otherwise it is teacher-forced and called so.

Source: DFlash paper section 5 (acceptance length, the target's own token included).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_data.packs import HiddenPack, make_blocks
from dflash_model.blocks import anchor_candidates
from dflash_train.step import DraftStep


@dataclass(frozen=True)
class Acceptance:
    """Tokens and draft rounds per prompt."""

    tokens: NDArray[np.int64]
    rounds: NDArray[np.int64]

    @property
    def pooled(self) -> float:
        """All tokens over all rounds; what servers report."""
        return float(self.tokens.sum() / max(self.rounds.sum(), 1))

    @property
    def mean(self) -> float:
        """Mean of the prompts' own acceptance lengths; what papers report."""
        return float((self.tokens / np.maximum(self.rounds, 1)).mean()) if len(self.tokens) else float("nan")

    def interval(self, *, level: float = 0.95, resamples: int = 2000) -> tuple[float, float]:
        """Bootstrap interval of the pooled length over prompts (fixed seed)."""
        rng = np.random.default_rng(0)
        picks = rng.integers(0, len(self.tokens), (resamples, len(self.tokens)))
        pooled = self.tokens[picks].sum(1) / np.maximum(self.rounds[picks].sum(1), 1)
        low, high = np.quantile(pooled, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)


def replay(run_S: NDArray[np.int64], candidate_S: NDArray[np.bool_]) -> tuple[int, int]:
    """Walk one document.

    Args:
        run_S: at each anchor, how many of its proposals match the text in a row.
        candidate_S: where a block may start; a stretch of these is a response without its last token.

    Returns:
        Tokens committed and rounds. Each stretch begins with a token from the prefill, which counts as neither; the
        last round is cut at the end of the response.
    """
    tokens = rounds = 0
    edges = np.flatnonzero(np.diff(np.concatenate(([False], candidate_S, [False])).astype(np.int8)))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        at = begin
        while at < end:
            committed = min(int(run_S[at]) + 1, end - at)
            tokens, rounds, at = tokens + committed, rounds + 1, at + committed
    return tokens, rounds


def evaluate_pack(step: DraftStep, pack: HiddenPack, num_chunks: int) -> list[tuple[int, int]]:
    """Tokens and rounds of every document of a held-out pack.

    Args:
        step: the drafter to evaluate.
        pack: a held-out pack; its own anchors are ignored.
        num_chunks: forwards to run, the same on all ranks: each holds as many anchors as a training pack.
    """
    config = step.drafter.config
    ids, doc = pack.host["input_ids_S"].numpy(), pack.host["doc_S"].numpy()
    mask = pack.host["loss_mask_S"].numpy().astype(np.bool_)
    candidates = anchor_candidates(mask, doc)
    num_anchors = len(pack.host["anchor_A"])
    run_S = np.zeros(len(ids), dtype=np.int64)
    for chunk in range(num_chunks):
        anchors = candidates[chunk * num_anchors : (chunk + 1) * num_anchors]
        blocks = make_blocks(ids, mask, doc, anchors, num_anchors, config.block_size, gamma=1.0)
        device = pack.tensors["context_SE"].device
        rows_R = blocks["weight_AK"].flatten().nonzero()[:, 0]
        tensors = {**pack.tensors, **{name: tensor.to(device) for name, tensor in blocks.items()}}
        choice_R = step.choices(tensors, rows_R.to(device)).cpu()
        right_AK = torch.zeros_like(blocks["label_AK"], dtype=torch.int64)
        right_AK.view(-1)[rows_R] = (choice_R == blocks["label_AK"].flatten()[rows_R]).long()
        run_S[anchors] = right_AK[: len(anchors), 1:].cumprod(-1).sum(-1).numpy()
    candidate_S = np.zeros(len(ids), dtype=np.bool_)
    candidate_S[candidates] = True
    return [replay(run_S[doc == number], candidate_S[doc == number]) for number in range(int(doc.max()) + 1)]
