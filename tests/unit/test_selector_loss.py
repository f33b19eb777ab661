"""The selector's term of the loss, through the product's own step, against dense fp64 references."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from conftest import Hold
from dflash_data.ends import FrozenEnds
from dflash_data.packs import HiddenPack
from dflash_model import Drafter, Sampling, generate
from dflash_model.config import FULL, SLIDING
from dflash_train.loss import frozen_head_candidates, frozen_head_loss, selector_loss
from dflash_train.step import DraftStep, Objective, Tally, draft_inputs
from support.tiny import DFLASH2, tiny_config, tiny_drafter, tiny_target
from support.trained import as_pack

ALPHA, TOP_K = 0.7, 40  # so many candidates that an untaught drafter has some labels among them


def dense(logits_RV: Tensor, edges_RV: Tensor, label_R: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy among the likeliest tokens only: everything else is masked in the whole rows.

    Returns losses (0 where the label is masked), where it is not, and the choices.
    """
    rank_RV = logits_RV.detach().argsort(-1, descending=True).argsort(-1)
    score_RV = (logits_RV + edges_RV).masked_fill(rank_RV >= top_k, -torch.inf)
    among_R = rank_RV.gather(1, label_R[:, None])[:, 0] < top_k
    loss_R = torch.zeros(len(label_R), dtype=torch.float64)
    loss_R[among_R] = F.cross_entropy(score_RV[among_R], label_R[among_R], reduction="none")
    return loss_R, among_R, score_RV.argmax(-1)


@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.4, None), (2.5, 4.0)])
@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 2e-6), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_candidates_give_their_gradient_back(
    chunk_rows: int, dtype: torch.dtype, tolerance: float, multiplier: float, softcap: float | None, hold: Hold
) -> None:
    """23 rows beside cross-entropy over all tokens; some labels are among the six candidates, some are not."""
    torch.manual_seed(0)
    hidden, head = torch.randn(23, 16).to(dtype), torch.randn(37, 16).to(dtype)
    edges, weight = torch.randn(23, 37, dtype=torch.float64), torch.rand(23)
    label = torch.where(torch.arange(23) % 3 > 0, (hidden @ head.T).topk(4).indices[:, 2], torch.randint(0, 37, (23,)))

    reference = hidden.to(torch.float64, copy=True).requires_grad_()
    logits = reference @ head.double().T * multiplier
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    expected, expected_among, expected_choice = dense(logits, edges, label, 6)
    (weight * (F.cross_entropy(logits, label, reduction="none") + ALPHA * expected)).sum().backward()

    mine = hidden.clone().requires_grad_()
    rows = frozen_head_loss(mine, head, label, chunk_rows, multiplier=multiplier, softcap=softcap, top_k=6)
    score = rows.unary_RJ + edges.gather(1, rows.candidate_RJ).float()
    loss, among = selector_loss(score, rows.candidate_RJ, label)
    (weight * (rows.loss_R + ALPHA * loss)).sum().backward()
    assert 10 < among.sum() < 23
    assert reference.grad is not None
    assert mine.grad is not None
    name = f"selector loss, {str(dtype).removeprefix('torch.')}{', capped logits' if softcap else ''}"
    worst = (loss.double() - expected).detach().norm() / expected.detach().norm()
    hold(name, "dense in float64, relative", float(worst), tolerance)
    error = (mine.grad.double() - reference.grad).norm() / reference.grad.norm()
    hold(f"gradient of {name}", "dense in float64, relative", float(error), tolerance)
    if dtype is not torch.bfloat16:
        assert torch.equal(among, expected_among)
        assert torch.equal(rows.candidate_RJ.gather(1, score.argmax(-1, keepdim=True))[:, 0], expected_choice)
        config = tiny_config(output_multiplier=multiplier, final_logit_softcapping=softcap)
        candidate, unary = frozen_head_candidates(config, hidden, head, chunk_rows, 6)
        assert torch.equal(candidate.sort().values, rows.candidate_RJ.sort().values)
        torch.testing.assert_close(unary.sort().values, rows.unary_RJ.sort().values, rtol=1e-6, atol=1e-6)


def case(kind: str) -> tuple[Drafter, FrozenEnds, HiddenPack]:
    """A drafter in float64, its target's ends, and a text of the target."""
    target = tiny_target("gemma3", torch.float64)  # its weights are far from small
    config = tiny_config((SLIDING, FULL), dflash2=replace(DFLASH2, selector_top_k=TOP_K), input_embedding_scale=8.0)
    drafter = tiny_drafter(config, torch.float64)
    text = generate(None, target, [3, 17, 5], max_new_tokens=30, sampling=Sampling(temperature=1.0, seed=0)).token_ids
    pack = as_pack(target, drafter, [3, 17, 5], text)
    norm = torch.nn.Identity() if kind != "ce" else None
    if norm is not None:
        state = torch.randn(len(pack.tensors["context_SE"]), 64, dtype=torch.float64)
        pack.tensors["context_SE"] = torch.cat((pack.tensors["context_SE"], state), dim=1)
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    return drafter, FrozenEnds(embed.weight.detach(), head.weight.detach(), norm), pack


@pytest.mark.parametrize("kind", ["ce", "kl"])
@pytest.mark.parametrize("selector_weight", [ALPHA, 0.0])
def test_the_step_equals_dense(kind: str, selector_weight: float, hold: Hold) -> None:
    """Total loss and the gradients of all parameters; what stands before a slot is the text's own token."""
    drafter, ends, pack = case(kind)
    step = DraftStep(
        drafter, ends, torch.float64, chunk_rows=9, sparse=False,
        objective=Objective(kind, selector_weight=selector_weight),
    )  # fmt: skip
    tally = Tally.of(drafter.config, torch.device("cpu"))
    total, weight_sum = step.loss(pack, tally)
    mine = torch.autograd.grad(total, list(drafter.parameters()), allow_unused=True)

    selector, fields = drafter.candidate_selector, pack.tensors
    assert selector is not None
    hidden_QD = drafter(draft_inputs(fields, ends, drafter.config, torch.float64, sparse=False))[0]
    expected, selected, among_weight, right = torch.zeros(()).double(), 0.0, 0.0, 0
    for block, anchor in enumerate(fields["anchor_A"].tolist()):
        for slot in range(1, 8):
            weight = float(fields["weight_AK"][block, slot])
            if weight == 0:
                continue
            hidden_D, label = hidden_QD[8 * block + slot], fields["label_AK"][block, slot].long()
            before = int(fields["input_ids_S"][anchor + slot - 1])
            logits_V = ends.head_VD @ hidden_D
            seen_F = selector.predecessor_codebook[before] * (selector.hidden_projection.weight @ hidden_D)
            own, among, choice = dense(logits_V[None], (selector.successor_codebook @ seen_F)[None], label[None], TOP_K)
            base = F.cross_entropy(logits_V, label)
            if kind == "kl":
                p = (ends.head_VD @ fields["context_SE"][anchor + slot - 1, -64:]).softmax(-1)
                base = (p * (p.log() - logits_V.log_softmax(-1))).sum()
            expected = expected + weight * (base + selector_weight * own[0])
            selected, among_weight = selected + weight * float(own.detach()), among_weight + weight * float(among)
            right += int(choice == label)
    theirs = torch.autograd.grad(expected, list(drafter.parameters()), allow_unused=True)
    hold(
        f"loss of a DFlash2 step, {kind}",
        "dense in float64, relative",
        float((total / expected - 1).abs().detach()),
        2e-6,
    )
    for (name, _), one, other in zip(drafter.named_parameters(), mine, theirs, strict=True):
        assert one is not None
        assert other is not None
        error = float((one - other).norm() / other.norm().clamp_min(1e-12))
        hold(f"gradients of a DFlash2 step, {kind}", "dense in float64, relative", error, 5e-6)
        assert other.norm() > 0 or (selector_weight == 0 and "selector" in name), name

    tally.commit(torch.tensor(True))
    values = Tally.read(tally.sums.tolist(), 8)
    assert 0.05 < values["selector_missed"] < 0.95
    assert values["selector_missed"] == pytest.approx(1 - among_weight / float(weight_sum))
    assert values["selector_loss"] == pytest.approx(selected / among_weight, rel=1e-5)
    assert values["acc"] == pytest.approx(right / int((fields["weight_AK"] > 0).sum()))
    base_sum = float(expected.detach()) - selector_weight * selected
    assert values["loss"] == pytest.approx(base_sum / float(weight_sum), rel=1e-5)


def test_no_rows_keep_the_graph() -> None:
    """A rank whose pack teaches nothing still takes part in the reduction of every gradient."""
    hidden = torch.randn(0, 16, requires_grad=True)
    rows = frozen_head_loss(hidden, torch.randn(37, 16), torch.zeros(0).long(), 8, top_k=6)
    loss, among = selector_loss(rows.unary_RJ, rows.candidate_RJ, torch.zeros(0).long())
    (rows.loss_R.sum() + loss.sum()).backward()
    assert (loss.shape, among.shape, hidden.grad is not None) == ((0,), (0,), True)
    drafter, ends, pack = case("ce")
    pack.host["weight_AK"].zero_()
    total, _ = DraftStep(drafter, ends, torch.float64, 9, sparse=False).loss(
        pack, Tally.of(drafter.config, torch.device("cpu"))
    )
    total.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in drafter.parameters())
