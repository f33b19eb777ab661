"""Acceptance lengths: what a round is, and how rounds become numbers.

A round is one draft and one verification. It commits the accepted proposals and one token of the target's own; the
first token of a text comes from the prefill and belongs to no round, and nothing after the end of a text is counted.

Source: DFlash paper section 5 (acceptance length, the target's own token included); averages as z-lab's
``benchmark.py`` (mean of requests) and as SGLang and vLLM report them (pooled over rounds).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_model import Generation

CONTEXT_EDGES = (0, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Rounds:
    """The rounds of one text, in order.

    Attributes:
        context: tokens known when the round began, the anchor included.
        accepted: proposals that became part of the text.
        committed: tokens added to the text: one more than accepted, unless the text ended with a proposal.
        last: whether the response ended with this round.
    """

    context: NDArray[np.int64]
    accepted: NDArray[np.int64]
    committed: NDArray[np.int64]
    last: NDArray[np.bool_]

    @classmethod
    def of(cls, generation: Generation, prompt_tokens: int) -> "Rounds":
        """The rounds of a drafted text."""
        committed = np.array(generation.committed, dtype=np.int64)
        before = np.concatenate(([0], committed.cumsum()))[: len(committed)]
        last = np.arange(len(committed)) == len(committed) - 1
        return cls(prompt_tokens + 1 + before, np.array(generation.accepted, dtype=np.int64), committed, last)

    @property
    def tokens(self) -> int:
        """Tokens committed in all rounds."""
        return int(self.committed.sum())

    def judged(self, block_size: int) -> NDArray[np.int64]:
        """Proposals of each round that were accepted or refused: those behind the end of the text are neither."""
        return np.where(self.last, np.minimum(self.committed, block_size - 1), block_size - 1)


@dataclass(frozen=True)
class Acceptance:
    """Tokens and draft rounds per prompt."""

    tokens: NDArray[np.int64]
    rounds: NDArray[np.int64]

    @classmethod
    def of(cls, texts: Sequence[Rounds]) -> "Acceptance":
        """Of several texts."""
        return cls(np.array([text.tokens for text in texts]), np.array([len(text.committed) for text in texts]))

    @property
    def pooled(self) -> float:
        """All tokens over all rounds; what servers report. NaN without a round."""
        return float(self.tokens.sum() / self.rounds.sum()) if self.rounds.sum() else float("nan")

    @property
    def mean(self) -> float:
        """Mean of the prompts' own acceptance lengths; what papers report. Texts without a round do not count."""
        some = self.rounds > 0
        return float((self.tokens[some] / self.rounds[some]).mean()) if some.any() else float("nan")

    def interval(self, *, level: float = 0.95, resamples: int = 2000) -> tuple[float, float]:
        """Bootstrap interval of the pooled length over prompts (fixed seed)."""
        rng = np.random.default_rng(0)
        picks = rng.integers(0, len(self.tokens), (resamples, len(self.tokens)))
        pooled = self.tokens[picks].sum(1) / np.maximum(self.rounds[picks].sum(1), 1)
        low, high = np.quantile(pooled, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)


def by_position(texts: Sequence[Rounds], block_size: int) -> list[dict[str, float | None]]:
    """For slot 1 to K - 1: in which share of the rounds it was accepted, and in which share given all before it.

    ``accepted`` is what vLLM calls the per-position acceptance rate; ``given_previous`` shows where drafts break. None
    where no round got so far.
    """
    accepted = np.concatenate([text.accepted for text in texts])
    judged = np.concatenate([text.judged(block_size) for text in texts])
    table = []
    for slot in range(1, block_size):
        rounds, survived = judged >= slot, accepted >= slot
        reached = rounds & (accepted >= slot - 1)
        table.append(
            {
                "slot": slot,
                "rounds": int(rounds.sum()),
                "accepted": float(survived[rounds].mean()) if rounds.any() else None,
                "given_previous": float(survived[reached].mean()) if reached.any() else None,
            }
        )
    return table


def by_context(texts: Sequence[Rounds]) -> list[dict[str, float]]:
    """Pooled acceptance length by how many tokens were known when a round began; empty ranges are left out."""
    context = np.concatenate([text.context for text in texts])
    committed = np.concatenate([text.committed for text in texts])
    table = []
    for low, high in zip(CONTEXT_EDGES, (*CONTEXT_EDGES[1:], np.inf), strict=True):
        inside = (context >= low) & (context < high)
        if inside.any():
            table.append({"from": low, "rounds": int(inside.sum()), "pooled": float(committed[inside].mean())})
    return table
