"""A drafter trained by the product's own step, drafting: what training measured is what decoding gets.

Three independent loops go through the same rounds: ours with its caches, the replay without decoding, z-lab's.
"""

import time
from pathlib import Path

import dflash.model as reference
import pytest
import torch

from conftest import Hold
from dflash_model import DFlash2Config, Drafter, generate, load_drafter, save_drafter
from dflash_model.config import FULL, SLIDING
from dflash_model.taps import context_features
from dflash_train.acceptance import Rounds
from dflash_train.evaluate import evaluate_text
from support.tiny import DFLASH2
from support.trained import PROMPTS, TEXT, draft_step, overfitted

LAYOUTS = [((FULL, FULL), None), ((SLIDING, FULL), None), ((SLIDING, FULL), DFLASH2)]
each_layout = pytest.mark.parametrize(("layers", "dflash2"), LAYOUTS, ids=["full", "sliding", "dflash2"])
HALF = 30  # steps after which some proposals are right and some are not


@each_layout
def test_a_drafter_that_knows_the_text_is_accepted(layers: tuple[str, ...], dflash2: DFlash2Config | None) -> None:
    """Training accuracy above 0.97 must show as nearly whole blocks; a shift by one would leave 1.0."""
    target, drafter, accuracy = overfitted("qwen3", layers, 120, dflash2)
    assert accuracy > 0.97
    drafts = [generate(drafter, target, prompt, max_new_tokens=TEXT) for prompt in PROMPTS]
    tokens, rounds = sum(sum(out.committed) for out in drafts), sum(len(out.committed) for out in drafts)
    assert tokens / rounds >= 0.8 * drafter.config.block_size


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@each_layout
def test_replay_equals_the_loop(
    family: str, layers: tuple[str, ...], dflash2: DFlash2Config | None, hold: Hold
) -> None:
    """Every round: where it began, what was accepted, what was committed, and where the text ended."""
    target, drafter, _ = overfitted(family, layers, HALF, dflash2)
    step, lengths = draft_step(drafter, target), set()
    for prompt in PROMPTS:
        for limit in (TEXT, TEXT + 13, 2):
            out = generate(drafter, target, prompt, max_new_tokens=limit)
            ids, mask = prompt + out.token_ids, [False] * len(prompt) + [True] * len(out.token_ids)
            context = context_features(target, ids, drafter.config.target_layer_ids)
            loop, replayed = Rounds.of(out, len(prompt)), evaluate_text(step, context, ids, mask)
            for name in ("context", "accepted", "committed", "last"):
                different = sum(a != b for a, b in zip(getattr(loop, name), getattr(replayed, name), strict=True))
                hold(
                    f"rounds of the replay, {drafter.config.kind} on {family}",
                    "the cached drafting loop, rounds that differ",
                    different,
                    0,
                )
            lengths |= set(out.committed)
    assert len(lengths) > 4  # rejections after several lengths were met


@each_layout
def test_rounds_equal_the_references(
    layers: tuple[str, ...], dflash2: DFlash2Config | None, monkeypatch: pytest.MonkeyPatch, hold: Hold, tmp_path: Path
) -> None:
    """The same tokens in the same rounds as z-lab's ``dflash_generate``.

    Except in the last block: z-lab shortens it to what is left of the text (dflash 0.1.0, model.py line 229), which
    changes its proposals; servers draft it whole.
    """
    monkeypatch.setattr(reference, "_cuda_time", time.perf_counter)
    target, trained, _ = overfitted("qwen3", layers, HALF, dflash2)
    save_drafter(trained.state_dict(), trained.config, tmp_path)
    drafter = load_drafter(tmp_path, dtype=torch.float32)
    model = reference.DFlash2DraftModel if dflash2 else reference.DFlashDraftModel
    theirs = model.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for prompt in PROMPTS:
        out = generate(drafter, target, prompt, max_new_tokens=TEXT)
        expected = reference.dflash_generate(theirs, target, torch.tensor([prompt]), TEXT, None, return_stats=True)
        assert expected.output_ids[0, len(prompt) :].tolist() == out.token_ids
        done = 1
        for ours, other in zip(out.committed, expected.acceptance_lengths, strict=False):
            if TEXT - done < drafter.config.block_size:
                break
            hold(
                f"rounds of generate, {drafter.config.kind} on qwen3",
                "z-lab's dflash_generate, rounds that differ",
                ours != other,
                0,
            )
            done += ours
        assert done > TEXT // 2


def test_the_selector_decides() -> None:
    """Without it the same drafter, trained with it, is accepted less: what stood before a token says more about it."""
    target, drafter, _ = overfitted("qwen3", (SLIDING, FULL), HALF, DFLASH2)
    bare = Drafter(drafter.config).eval()
    bare.load_state_dict(drafter.state_dict())
    bare.candidate_selector = None
    rounds = [
        sum(len(generate(who, target, p, max_new_tokens=TEXT).committed) for p in PROMPTS) for who in (drafter, bare)
    ]
    assert rounds[0] < rounds[1]


def test_statistics_add_up() -> None:
    target, drafter, _ = overfitted("qwen3", (FULL, FULL), HALF, None)
    out = generate(drafter, target, PROMPTS[0], max_new_tokens=TEXT)
    assert len(out.token_ids) == TEXT == 1 + sum(out.committed)
    assert out.target_forwards == 1 + len(out.committed)
    assert all(c in (a, a + 1) for a, c in zip(out.accepted, out.committed, strict=True))
    assert 0 < out.draft_seconds + out.verify_seconds <= out.decode_seconds
    hybrid, drafter, _ = overfitted("qwen3_5", (FULL, FULL), HALF, None)
    out = generate(drafter, hybrid, PROMPTS[0], max_new_tokens=TEXT)
    rejected = sum(a < drafter.config.block_size - 1 for a in out.accepted[:-1])
    assert out.target_forwards == 1 + len(out.committed) + rejected  # states are replayed once per rejection (CPU)
