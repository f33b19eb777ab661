"""Replay arithmetic and training metrics against hand counts."""

import numpy as np
import pytest
import torch

from dflash_model import Generation
from dflash_train.acceptance import Acceptance, Rounds, by_context, by_position
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
    tally.commit(torch.tensor(True))
    tally.add(torch.tensor(float("nan")), torch.tensor(4.0), right, supervised)
    tally.commit(torch.tensor(False))
    values = Tally.read(tally.sums.tolist(), 4)
    assert values["loss"] == 1.5
    assert values["acc"] == pytest.approx(4 / 5)
    assert values["streak"] == pytest.approx((1 + 2) / 2)
    assert [values[f"acc_{slot}"] for slot in (1, 2, 3)] == [1.0, 0.5, 1.0]
    assert [values[f"acc_given_prefix_{slot}"] for slot in (1, 2, 3)] == [1.0, 0.5, 0.0]


def test_positions_and_context_by_hand() -> None:
    """Blocks of 4. Text one: rounds accept 2, 0, then 3 of 3 left; text two: one round, cut after 2 proposals."""
    one = Rounds(np.array([10, 13, 14]), np.array([2, 0, 3]), np.array([3, 1, 3]), np.array([False, False, True]))
    two = Rounds(np.array([600]), np.array([2]), np.array([2]), np.array([True]))
    table = by_position([one, two], 4)
    assert [row["rounds"] for row in table] == [4, 4, 3]  # the third proposal of text two lies behind its end
    assert [row["accepted"] for row in table] == [3 / 4, 3 / 4, 1 / 3]
    assert [row["given_previous"] for row in table] == [3 / 4, 1.0, 1 / 2]
    assert by_context([one, two]) == [
        {"from": 0, "rounds": 3, "pooled": 7 / 3},
        {"from": 512, "rounds": 1, "pooled": 2.0},
    ]
    nothing = Rounds(*(np.zeros(0, dtype=np.int64) for _ in range(3)), np.zeros(0, dtype=bool))
    assert by_position([nothing], 3)[0] == {"slot": 1, "rounds": 0, "accepted": None, "given_previous": None}


def test_rounds_of_a_generation_by_hand() -> None:
    out = Generation(token_ids=[5, 6, 7, 8, 9, 1], committed=[3, 2], accepted=[2, 2])
    rounds = Rounds.of(out, prompt_tokens=4)
    assert rounds.context.tolist() == [5, 8]
    assert rounds.last.tolist() == [False, True]
    assert Acceptance.of([rounds]).pooled == 2.5
