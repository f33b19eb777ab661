"""On a GPU: drafted greedy text is the target's, states of hybrid targets ride along, sampling and times work."""

import pytest
import torch

from dflash_model import Sampling, generate
from dflash_model.config import FULL, SLIDING
from dflash_model.taps import text_config
from support.tiny import FAMILIES, tiny_config, tiny_drafter, tiny_target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_targets(family: str) -> None:
    target = tiny_target(family).cuda()
    config = tiny_config((SLIDING, FULL), num_target_layers=text_config(target.config).num_hidden_layers)
    drafter = tiny_drafter(config).cuda()
    for prompt in ([1], [7, 7, 7, 30], list(range(50, 70))):
        expected = target.generate(
            torch.tensor([prompt], device="cuda"), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(prompt) :].tolist()
        out = generate(drafter, target, prompt, max_new_tokens=30)
        assert out.token_ids == expected == generate(None, target, prompt, max_new_tokens=30).token_ids
        assert 0 < out.draft_seconds + out.verify_seconds <= out.decode_seconds * 1.01
        if family.startswith("qwen3_5"):  # owed tokens ride along: far fewer forwards than two a round
            assert out.target_forwards < 1 + 1.5 * len(out.committed)


def test_sampled_text_depends_on_the_seed_alone() -> None:
    target, drafter = tiny_target("qwen3").cuda(), tiny_drafter(tiny_config()).cuda()
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=4)
    one, two = (generate(drafter, target, [1, 2, 3], max_new_tokens=40, sampling=sampling) for _ in range(2))
    assert one.token_ids == two.token_ids
    assert len(set(one.token_ids)) > 5
