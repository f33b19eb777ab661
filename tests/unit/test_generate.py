"""Drafting changes the speed, never the text; and the loop really accepts what a good drafter proposes."""

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from dflash_model import generate
from dflash_model.config import FULL, SLIDING
from dflash_train.evaluate import replay
from support.tiny import tiny_config, tiny_drafter, tiny_target

FAMILIES = {"qwen3": 6, "llama": 6, "qwen3_5": 8}


def library_greedy(target: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Transformers' own greedy decoding."""
    out = target.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


class Oracle(nn.Module):
    """Stands for the drafter's layers: makes the frozen head choose the tokens of a known text.

    Wrong on purpose at every third position, so that rounds end in rejections of every length.
    """

    def __init__(self, text: list[int], head: torch.Tensor, wrong_every: int) -> None:
        super().__init__()
        self.text, self.rows, self.wrong_every = text, torch.linalg.pinv(head.double()).float(), wrong_every

    def forward(self, inputs, cache):  # noqa: ANN001, ANN201 - the drafter's own signature
        hidden = []
        for position in inputs.block_position_BQ[0].tolist():
            token = self.text[position] if position < len(self.text) else 0
            if position % self.wrong_every == 0:
                token = (token + 1) % 100
            hidden.append(self.rows[:, token])
        cache.extend(0, (torch.zeros(1, 1, inputs.context_BSE.shape[1], 1),) * 2)
        return torch.stack(hidden)[None]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrong_every", [3, 10**6])
def test_oracle_drafts_are_accepted_and_the_text_is_the_targets(
    family: str, wrong_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partial and full acceptance, on hybrid targets too; acceptance equals the replay's arithmetic."""
    target = tiny_target(family)
    with torch.no_grad():  # 64 hidden sizes cannot tell 131 tokens apart: let the model use 60 of them
        target.get_output_embeddings().weight[60:] = 0
    prompt, count = [3, 17, 5, 90, 41], 40
    expected = library_greedy(target, prompt, count)
    config = tiny_config((FULL,), num_target_layers=FAMILIES[family])
    drafter = tiny_drafter(config)
    oracle = Oracle(prompt + expected, target.get_output_embeddings().weight.detach(), wrong_every)
    monkeypatch.setattr(drafter, "forward", oracle.forward)
    result = generate(drafter, target, prompt, max_new_tokens=count)
    assert result.token_ids == expected
    positions = torch.arange(len(prompt), len(prompt) + count)
    wrong = positions % wrong_every == 0
    run = torch.tensor([next((k for k in range(7) if i + 1 + k < count and wrong[i + 1 + k]), 7) for i in range(count)])
    candidates = torch.arange(count) < count - 1
    assert (sum(result.committed), len(result.committed)) == replay(run.numpy(), candidates.numpy())
    assert result.acceptance_length > (2.0 if wrong_every == 3 else 7.0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [(FULL, FULL), (SLIDING, FULL)])
def test_any_drafter_leaves_the_text_alone(family: str, layers: tuple[str, ...]) -> None:
    target = tiny_target(family)
    drafter = tiny_drafter(tiny_config(layers, num_target_layers=FAMILIES[family]))
    for prompt in ([1], [7, 7, 7, 30], list(range(50, 70))):
        expected = library_greedy(target, prompt, 30)
        streamed: list[int] = []
        result = generate(drafter, target, prompt, max_new_tokens=30, on_tokens=streamed.extend)
        assert result.token_ids == expected == streamed
        assert generate(None, target, prompt, max_new_tokens=30).token_ids == expected


def test_stops_at_the_stop_token_and_counts_nothing_after_it() -> None:
    target, prompt = tiny_target("qwen3"), [3, 17, 5]
    expected = library_greedy(target, prompt, 30)
    stop = expected[11]
    first = expected.index(stop)
    result = generate(None, target, prompt, max_new_tokens=30, stop_token_ids=[stop])
    assert result.token_ids == expected[: first + 1]
    drafter = tiny_drafter(tiny_config())
    drafted = generate(drafter, target, prompt, max_new_tokens=30, stop_token_ids=[stop])
    assert drafted.token_ids == result.token_ids
    assert sum(drafted.committed) == first  # the first token comes from the prefill
