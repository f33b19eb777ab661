"""Anchors, labels and weights against hand counts."""

import math

import numpy as np
import pytest

from dflash_model.blocks import anchor_candidates, default_gamma, first_of_document, label_blocks, sample_anchors

IDS = np.arange(10, 22, dtype=np.int32)
DOC = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, -1, -1], dtype=np.int32)
#               .  S  S  S  S  .  S  S  .  S  (pad)
MASK = np.array([0, 1, 1, 1, 1, 0, 1, 1, 0, 1, 0, 0], dtype=bool)


def test_candidates_need_two_supervised_tokens_of_one_document() -> None:
    assert anchor_candidates(MASK, DOC).tolist() == [1, 2, 3, 6]


def test_labels_stop_at_the_document_and_at_a_gap() -> None:
    anchors = np.array([1, 3, 6], dtype=np.int32)
    labels, weights = label_blocks(IDS, MASK, DOC, anchors, block_size=5, gamma=4.0)
    decay = [0.0, 1.0, math.exp(-1 / 4), math.exp(-2 / 4), math.exp(-3 / 4)]
    assert labels.tolist() == [[0, 12, 13, 14, 0], [0, 14, 0, 0, 0], [0, 17, 0, 0, 0]]
    np.testing.assert_allclose(weights[0], [*decay[:4], 0.0], rtol=1e-6)
    np.testing.assert_allclose(weights[1], [0.0, 1.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(weights[2], [0.0, 1.0, 0.0, 0.0, 0.0])  # supervised again after the gap: not counted


def test_first_of_document() -> None:
    assert first_of_document(DOC, np.array([0, 4, 5, 9], dtype=np.int32)).tolist() == [0, 0, 5, 5]


def test_published_decay_lengths() -> None:
    assert [default_gamma(size) for size in (8, 10, 16)] == [4.0, 5.0, 7.0]
    assert default_gamma(4) == 2.0
    assert default_gamma(32) == 14.0
    weights = [sum(math.exp(-(k - 1) / default_gamma(size)) for k in range(1, size)) for size in (16, 10, 8)]
    assert weights == pytest.approx([6.63, 4.61, 3.74], abs=0.01)  # paper, appendix A.1


def test_anchors_are_a_uniform_draw_without_replacement() -> None:
    mask, doc = np.ones(41, dtype=bool), np.zeros(41, dtype=np.int32)
    counts = np.zeros(41)
    for seed in range(2000):
        anchors = sample_anchors(mask, doc, 10, np.random.default_rng(seed))
        assert len(set(anchors.tolist())) == 10
        assert sorted(anchors.tolist()) == anchors.tolist()
        counts[anchors] += 1
    assert counts[40] == 0  # the last token has nothing to predict
    # 40 candidates, each drawn with probability 1/4: 2000 draws give 500 +- 19; 5 sigma
    np.testing.assert_allclose(counts[:40], 500, atol=97)
