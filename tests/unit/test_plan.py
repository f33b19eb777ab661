"""Packing and collation: every document once, and pack k depends on nothing but k."""

import numpy as np
import pytest
import torch

from dflash_data.dataset import PreparedData, open_prepared
from dflash_data.packs import Collator, TokenPack
from dflash_data.plan import PackPlan, pack_documents
from dflash_data.schedule import Stream, WorkItem
from dflash_data.synthetic import write_synthetic
from dflash_model.blocks import anchor_candidates

SEQ_LEN, ANCHORS, BLOCK = 256, 24, 8
FIELDS = [name for name in TokenPack.__dataclass_fields__ if name != "item"]


def random_lengths(count: int = 2000) -> np.ndarray:
    drawn = np.random.default_rng(5).lognormal(4.6, 0.8, count)
    return np.clip(drawn, 16, 512).astype(np.int64)


def test_packing_by_hand() -> None:
    """Longest first, each to the fullest row that takes it: 3 goes beside 7, not beside 6."""
    lengths = np.array([3, 6, 7, 4, 9], dtype=np.int64)
    assert pack_documents(lengths, 10, seed=0) == [[4], [2, 0], [1, 3]]


def test_packing_takes_every_document_once_and_fills_the_rows() -> None:
    lengths = random_lengths()
    rows = pack_documents(lengths, 512, seed=3)
    assert sorted(document for row in rows for document in row) == list(range(2000))
    assert max(int(lengths[row].sum()) for row in rows) <= 512
    plan = PackPlan(lengths, 512, seed=3)
    assert plan.rows == rows
    assert plan.fill == pytest.approx(lengths.sum() / (len(rows) * 512))
    assert plan.fill > 0.97


def test_packing_depends_on_the_seed_alone() -> None:
    lengths = random_lengths()
    assert pack_documents(lengths, 512, seed=3) == pack_documents(lengths.copy(), 512, seed=3)
    assert pack_documents(lengths, 512, seed=3) != pack_documents(lengths, 512, seed=4)


def test_packing_refuses_what_no_row_can_hold() -> None:
    with pytest.raises(AssertionError, match="document 1 has 513 tokens; rows have 512"):
        pack_documents(np.array([5, 513]), 512, seed=0)


def test_each_epoch_visits_each_row_once_in_its_own_order() -> None:
    plan = PackPlan(random_lengths(200), 512, seed=3)
    count = len(plan)
    epochs = [[plan.documents(epoch * count + index) for index in range(count)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(plan.rows)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert PackPlan(random_lengths(200), 512, seed=3).documents(2 * count + 5) == epochs[2][5]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    folder = tmp_path_factory.mktemp("synthetic") / "data"
    write_synthetic(folder, documents=40, max_length=96, vocab_size=131, seed=1)
    return open_prepared(folder, seq_len=SEQ_LEN, vocab_size=100_000)


def collator(data: PreparedData, seed: int = 7) -> Collator:
    return Collator(
        data, seq_len=SEQ_LEN, num_anchors=ANCHORS, block_size=BLOCK, gamma=4.0, seed=seed, heldout_limit=64
    )


def train(number: int, index: int = 0) -> WorkItem:
    return WorkItem(index, Stream.TRAIN, number)


def test_pack_k_is_a_function_of_k(data: PreparedData) -> None:
    """Two collators, opposite orders, other places in the sequence: equal tensors."""
    first, second = collator(data), collator(data)
    there = [first(train(number)) for number in range(30)]
    back = [second(train(number, index=99)) for number in reversed(range(30))][::-1]
    for a, b in zip(there, back, strict=True):
        for name in FIELDS:
            assert torch.equal(getattr(a, name), getattr(b, name)), name
    other = collator(data, seed=8)(train(0))
    assert not torch.equal(other.input_ids_S, there[0].input_ids_S)


def test_a_pack_holds_its_documents(data: PreparedData) -> None:
    make = collator(data)
    for number in range(len(make.train_plan)):
        pack, cursor = make(train(number)), 0
        for place, index in enumerate(make.train_plan.documents(number)):
            ids, mask = data.train[index]
            span = slice(cursor, cursor + len(ids))
            assert pack.input_ids_S[span].tolist() == ids.tolist()
            assert pack.loss_mask_S[span].tolist() == mask.astype(int).tolist()
            assert pack.position_S[span].tolist() == list(range(len(ids)))
            assert set(pack.doc_S[span].tolist()) == {place}
            cursor += len(ids)
        assert pack.doc_S[cursor:].eq(-1).all()
        assert pack.loss_mask_S[cursor:].eq(0).all()
        assert pack.position_S[cursor:].tolist() == list(range(SEQ_LEN - cursor))
        assert sum(pack.document_lengths()) == SEQ_LEN


def test_anchors_and_labels_point_into_the_pack(data: PreparedData) -> None:
    pack = collator(data)(train(3))
    anchors = pack.anchor_A.tolist()
    assert len(set(anchors)) == ANCHORS
    assert anchors == sorted(anchors)
    assert set(anchors) <= set(anchor_candidates(pack.loss_mask_S.bool().numpy(), pack.doc_S.numpy()).tolist())
    assert torch.equal(pack.first_A, pack.anchor_A - pack.position_S[pack.anchor_A.long()])
    taught = pack.weight_AK > 0
    assert taught[:, 1].all()
    assert not taught[:, 0].any()
    at = (pack.anchor_A[:, None] + torch.arange(BLOCK))[taught].long()
    assert torch.equal(pack.label_AK[taught], pack.input_ids_S[at])


def test_heldout_packs_have_no_anchors_and_padding_is_empty(data: PreparedData) -> None:
    make = collator(data)
    rows = len(make.heldout_plan)
    assert rows == 2  # five documents of at most 96 tokens
    for number in range(rows):
        documents = make.heldout_plan.documents(number)
        pack = make(WorkItem(0, Stream.HELDOUT, number))
        assert pack.input_ids_S[pack.doc_S >= 0].tolist() == [t for d in documents for t in data.heldout[d][0].tolist()]
        assert not pack.weight_AK.any()
    for item in (WorkItem(4, Stream.HELDOUT, rows), WorkItem(5, Stream.PADDING, 0)):
        pack = make(item)
        assert pack.item == item
        assert pack.doc_S.eq(-1).all()
        assert not any(getattr(pack, name).any() for name in ("input_ids_S", "loss_mask_S", "anchor_A", "weight_AK"))
        assert pack.document_lengths() == [SEQ_LEN]


def test_a_limited_heldout_set_is_no_choice_of_long_documents(data: PreparedData) -> None:
    """Best-fit rows are sorted by length; the first of them would be the longest documents."""
    lengths = random_lengths(2000)
    plan = PackPlan(lengths, 512, seed=3)
    some = [document for number in range(len(plan) // 4) for document in plan.documents(number)]
    assert abs(lengths[some].mean() - lengths.mean()) < 0.15 * lengths.mean()
