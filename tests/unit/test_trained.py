"""A drafter trained by the product's own step, drafting: what training measured is what decoding gets.

Three independent loops go through the same rounds: ours with its caches, the replay without decoding, z-lab's.
"""

import time

import dflash.model as reference
import pytest
import torch
from transformers import Qwen3Config

from conftest import Hold
from dflash_model import generate
from dflash_model.config import FULL, SLIDING
from dflash_model.layout import to_published
from dflash_model.taps import context_features
from dflash_train.acceptance import Rounds
from dflash_train.evaluate import evaluate_text
from support.trained import PROMPTS, TEXT, draft_step, overfitted

LAYOUTS = [(FULL, FULL), (SLIDING, FULL)]
HALF = 30  # steps after which some proposals are right and some are not


@pytest.mark.parametrize("layers", LAYOUTS)
def test_a_drafter_that_knows_the_text_is_accepted(layers: tuple[str, ...]) -> None:
    """Training accuracy above 0.97 must show as nearly whole blocks; a shift by one would leave 1.0."""
    target, drafter, accuracy = overfitted("qwen3", layers, steps=100)
    assert accuracy > 0.97
    drafts = [generate(drafter, target, prompt, max_new_tokens=TEXT) for prompt in PROMPTS]
    tokens, rounds = sum(sum(out.committed) for out in drafts), sum(len(out.committed) for out in drafts)
    assert tokens / rounds >= 0.8 * drafter.config.block_size


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("layers", LAYOUTS)
def test_replay_equals_the_loop(family: str, layers: tuple[str, ...], hold: Hold) -> None:
    """Every round: where it began, what was accepted, what was committed, and where the text ended."""
    target, drafter, _ = overfitted(family, layers, steps=HALF)
    step, lengths = draft_step(drafter, target), set()
    for prompt in PROMPTS:
        for limit in (TEXT, TEXT + 13, 2):
            out = generate(drafter, target, prompt, max_new_tokens=limit)
            ids, mask = prompt + out.token_ids, [False] * len(prompt) + [True] * len(out.token_ids)
            context = context_features(target, ids, drafter.config.target_layer_ids)
            loop, replayed = Rounds.of(out, len(prompt)), evaluate_text(step, context, ids, mask)
            for name in ("context", "accepted", "committed", "last"):
                different = sum(a != b for a, b in zip(getattr(loop, name), getattr(replayed, name), strict=True))
                hold(f"rounds of the replay, {family}", "the cached drafting loop, rounds that differ", different, 0)
            lengths |= set(out.committed)
    assert len(lengths) > 4  # rejections after several lengths were met


@pytest.mark.parametrize("layers", LAYOUTS)
def test_rounds_equal_the_references(layers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, hold: Hold) -> None:
    """The same tokens in the same rounds as z-lab's ``dflash_generate``.

    Except in the last block: z-lab shortens it to what is left of the text (dflash 0.1.0, model.py line 229), which
    changes its proposals; servers draft it whole.
    """
    monkeypatch.setattr(reference, "_cuda_time", time.perf_counter)
    target, drafter, _ = overfitted("qwen3", layers, steps=HALF)
    theirs = reference.DFlashDraftModel(Qwen3Config(**to_published(drafter.config))).eval()
    theirs.load_state_dict(drafter.state_dict())
    for prompt in PROMPTS:
        out = generate(drafter, target, prompt, max_new_tokens=TEXT)
        expected = reference.dflash_generate(theirs, target, torch.tensor([prompt]), TEXT, None, return_stats=True)
        assert expected.output_ids[0, len(prompt) :].tolist() == out.token_ids
        done = 1
        for ours, other in zip(out.committed, expected.acceptance_lengths, strict=False):
            if TEXT - done < drafter.config.block_size:
                break
            hold("rounds of generate, qwen3", "z-lab's dflash_generate, rounds that differ", ours != other, 0)
            done += ours
        assert done > TEXT // 2


def test_statistics_add_up() -> None:
    target, drafter, _ = overfitted("qwen3", (FULL, FULL), steps=HALF)
    out = generate(drafter, target, PROMPTS[0], max_new_tokens=TEXT)
    assert len(out.token_ids) == TEXT == 1 + sum(out.committed)
    assert out.target_forwards == 1 + len(out.committed)
    assert all(c in (a, a + 1) for a, c in zip(out.accepted, out.committed, strict=True))
    assert 0 < out.draft_seconds + out.verify_seconds <= out.decode_seconds
    hybrid, drafter, _ = overfitted("qwen3_5", (FULL, FULL), steps=HALF)
    out = generate(drafter, hybrid, PROMPTS[0], max_new_tokens=TEXT)
    rejected = sum(a < drafter.config.block_size - 1 for a in out.accepted[:-1])
    assert out.target_forwards == 1 + len(out.committed) + rejected  # states are replayed once per rejection (CPU)
