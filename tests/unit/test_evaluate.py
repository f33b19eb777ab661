"""Replay arithmetic and training metrics against hand counts."""

import numpy as np
import pytest
import torch

from dflash_train.acceptance import Acceptance
from dflash_train.evaluate import replay
from dflash_train.step import Tally


def test_replay_by_hand() -> None:
    """Two responses. First: anchors 1..5 for tokens 2..6; second: anchor 9 for token 10."""
    candidate = np.zeros(12, dtype=bool)
    candidate[1:6], candidate[9] = True, True
    run = np.array([0, 2, 9, 9, 0, 1, 9, 9, 9, 1, 9, 9])
    # at 1: 2 match + 1 = 3 -> at 4: 0 + 1 -> at 5: 1 + 1 cut to 1, end. At 9: 1 + 1 cut to 1.
    rounds = replay(run, candidate)
    assert rounds.committed.tolist() == [3, 1, 1, 1]
    assert rounds.accepted.tolist() == [2, 0, 1, 1]
    assert rounds.context.tolist() == [2, 5, 6, 10]
    assert rounds.last.tolist() == [False, False, True, True]


def test_replay_commits_every_token_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        candidate = rng.random(60) < 0.7
        rounds = replay(rng.integers(0, 8, 60), candidate)
        assert rounds.tokens == candidate.sum()
        assert ((rounds.committed == rounds.accepted + 1) | rounds.last).all()
        slow = replay(np.zeros(60, dtype=np.int64), candidate)
        assert slow.committed.tolist() == [1] * rounds.tokens


def test_pooled_and_mean_differ_as_they_should() -> None:
    acceptance = Acceptance(np.array([8, 800]), np.array([8, 200]))
    assert acceptance.pooled == pytest.approx(808 / 208)
    assert acceptance.mean == pytest.approx(2.5)
    low, high = acceptance.interval()
    assert 1.0 <= low < acceptance.pooled < high <= 4.0


def test_slot_metrics_by_hand() -> None:
    """Three blocks of four slots; the second has two supervised slots, the third none."""
    tally = Tally(4, torch.device("cpu"))
    supervised = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]]).bool()
    right = torch.tensor([[0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]]).bool()
    tally.add(torch.tensor(6.0), torch.tensor(4.0), right, supervised)
    values = Tally.read(tally.sums.tolist(), 4)
    assert values["loss"] == 1.5
    assert values["acc"] == pytest.approx(4 / 5)
    assert values["streak"] == pytest.approx((1 + 2) / 2)
    assert [values[f"acc_{slot}"] for slot in (1, 2, 3)] == [1.0, 0.5, 1.0]
    assert [values[f"acc_given_prefix_{slot}"] for slot in (1, 2, 3)] == [1.0, 0.5, 0.0]
