"""Sampled drafting has the target's distribution; the tests fail when the acceptance rule is wrong."""

from collections.abc import Callable

import dflash.model as reference
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from conftest import Hold
from dflash_model import DFlash2Config, DrafterConfig, Sampling, UserError, generate
from dflash_model.config import FULL
from dflash_model.sampling import draw, reject
from support.tiny import tiny_drafter

RIGHT, WRONG = 4.0, 8.0  # bounds on the normalised chi-square statistic: mean 0, standard deviation 1 if right

Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def surprise(counts: torch.Tensor, p: torch.Tensor) -> float:
    """Chi-square statistic of counts against probabilities, as standard deviations above its mean."""
    counts, expected = counts.double().flatten(), p.double().flatten() * counts.sum()
    rare = expected < 5  # their sum is one cell
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None])).clamp_min(1e-3)
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("top_k", [0, 1, 5])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_distribution_equals_the_references(temperature: float, top_k: int, top_p: float, hold: Hold) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 3
    ours = Sampling(temperature=temperature, top_k=top_k, top_p=top_p).probabilities(logits)
    theirs = reference._sampling_probs(logits[None], temperature, top_p, top_k)[0]
    hold("temperature, top-k, top-p", "z-lab dflash 0.1.0", float((ours - theirs).abs().max()), 1e-6)
    assert ((ours > 0).sum(-1) == (theirs > 0).sum(-1)).all()


def wrong_claims_uniform(proposal, q, p, generator):  # noqa: ANN001, ANN201
    """Proposals are drawn from q, the rule is told otherwise."""
    return reject(proposal, torch.full_like(q, 1 / q.shape[-1]), p, generator)


def wrong_no_residual(proposal, q, p, generator):  # noqa: ANN001, ANN201
    """After a rejection the next token is drawn from p itself."""
    accepted, _ = reject(proposal, q, p, generator)
    return accepted, draw(p[accepted][None], generator)[0]


def wrong_argmax(proposal, q, p, generator):  # noqa: ANN001, ANN201
    """The greedy rule at a temperature."""
    accepted = (proposal == p[:-1].argmax(-1)).long().cumprod(0).sum()
    return accepted, draw(p[accepted][None], generator)[0]


RULES = [(reject, True), (wrong_claims_uniform, False), (wrong_no_residual, False), (wrong_argmax, False)]


@pytest.mark.parametrize(("rule", "right"), RULES)
def test_every_committed_token_has_the_targets_distribution(rule: Rule, right: bool) -> None:
    """Two proposals and three fixed rows of p: the i-th committed token must follow row i, whatever q is."""
    generator = torch.Generator().manual_seed(1)
    p = (torch.randn(3, 6, generator=generator) * 1.5).softmax(-1)
    q = (torch.randn(2, 6, generator=generator) * 1.5).softmax(-1)
    counts = torch.zeros(3, 6)
    for _ in range(4000):
        proposal = draw(q, generator)
        accepted, following = rule(proposal, q, p, generator)
        for index, token in enumerate([*proposal[:accepted].tolist(), int(following)]):
            counts[index, token] += 1
    worst = max(surprise(counts[row], p[row]) for row in range(3))
    if right:
        assert counts[2].sum() > 300  # both proposals accepted often enough to say something
    assert worst < RIGHT if right else worst > WRONG, worst


def micro_target() -> PreTrainedModel:
    """Eight tokens and a distribution far from uniform, so that a few hundred texts tell right from wrong."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20 if parameter.dim() > 1 else 1)
    return model


SELECTOR = DFlash2Config(conv_kernel_size=2, conv_group_size=4, selector_rank=6, selector_top_k=4)


@pytest.mark.parametrize("dflash2", [None, SELECTOR], ids=["dflash", "dflash2"])
@pytest.mark.parametrize(("rule", "right"), [RULES[0], RULES[2]])
def test_sampled_text_has_the_targets_distribution(
    rule: Rule, right: bool, dflash2: DFlash2Config | None, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    """The joint distribution of the second and third token of 800 drafted texts, against all prefixes enumerated.

    A selector proposes from four of the eight tokens, the target keeps seven: either has tokens the other never has.
    """
    target, prompt, sampling = micro_target(), [3, 1, 4], Sampling(temperature=1.3, top_k=7, top_p=0.97)
    config = DrafterConfig(
        hidden_size=16, intermediate_size=20, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, vocab_size=8,
        num_target_layers=2, target_layer_ids=(0,), block_size=3, mask_token_id=7, layer_types=(FULL,),
        dflash2=dflash2,
    )  # fmt: skip
    drafter = tiny_drafter(config)
    prefixes = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    ids = torch.cat((torch.tensor(prompt).expand(64, -1), prefixes), dim=1)
    with torch.no_grad():
        p_BSV = sampling.probabilities(target(input_ids=ids).logits[:, -3:]).view(8, 8, 3, 8)
    joint = torch.einsum("a,ab,abc->bc", p_BSV[0, 0, 0], p_BSV[:, 0, 1], p_BSV[:, :, 2])
    monkeypatch.setattr("dflash_model.decoding.reject", rule)
    counts, accepted = torch.zeros(8, 8), 0
    for seed in range(800):
        out = generate(drafter, target, prompt, max_new_tokens=3, sampling=_seeded(sampling, seed))
        counts[out.token_ids[1], out.token_ids[2]] += 1
        accepted += sum(out.accepted)
    assert accepted > 100
    if right:
        hold(f"sampled text, {config.kind}, 64 token pairs", "target, chi-square in sd", surprise(counts, joint), RIGHT)
    else:
        assert surprise(counts, joint) > WRONG


def _seeded(sampling: Sampling, seed: int) -> Sampling:
    return Sampling(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=seed)


def test_a_seed_decides_the_text() -> None:
    target, texts = micro_target(), set()
    for seed in (1, 1, 2):
        out = generate(None, target, [1, 2], max_new_tokens=20, sampling=Sampling(temperature=1.0, seed=seed))
        texts.add(tuple(out.token_ids))
    assert len(texts) == 2


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_what_is_no_distribution_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(wrong))} is "):
        Sampling(**wrong)  # type: ignore[arg-type]
