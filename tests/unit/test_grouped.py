"""Attention for decoding: the texts that transformers' own attention gives, for every family."""

import pytest
import torch

from dflash_data.grouped import NAME, grouped_attention, use_grouped_attention
from dflash_data.regenerate import decode_batch
from dflash_model import Sampling
from support.tiny import FAMILIES, tiny_target
from support.tokenizer import chat_tokenizer

PROMPTS = [[5, 9, 100], [7], [3, 77, 21, 8, 120, 64, 2, 90, 91, 92, 93, 94, 95, 96]]


@pytest.mark.parametrize("masked", ["bool", "float", "none"])
def test_one_query_equals_plain_arithmetic(masked: str) -> None:
    query, key, value = (torch.randn(3, heads, length, 8) for heads, length in ((6, 1), (2, 11), (2, 11)))
    seen = torch.rand(3, 1, 1, 13) < 0.6  # as a preallocated cache has it: longer than the keys
    seen[..., 0] = True
    added = torch.zeros(3, 1, 1, 13).masked_fill(~seen, -torch.inf)
    mask = {"bool": seen, "float": added, "none": None}[masked]
    out, _ = grouped_attention(torch.nn.Identity(), query, key, value, mask, scaling=0.3)
    wide = None if mask is None else mask.expand(3, 6, 1, 13)
    same, _ = grouped_attention(torch.nn.Identity(), query, key, value, wide, scaling=0.3)
    assert torch.equal(out, same)
    for head in range(6):
        scores = (query[:, head] @ key[:, head // 3].transpose(-1, -2)) * 0.3
        scores = scores if mask is None else scores + added[:, 0, :, :11]
        torch.testing.assert_close(out[:, :, head], scores.softmax(-1) @ value[:, head // 3])


def test_bf16_is_rounded_as_sdpa_rounds() -> None:
    """Sharp scores (a standard deviation of 16): rounded to bf16 they would be off by 3 %."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(4, heads, length, 128) for heads, length in ((6, 1), (2, 300), (2, 300)))
    query, key = query * 4, key * 4
    exact, _ = grouped_attention(torch.nn.Identity(), query, key, value, None)
    rounded = [tensor.to(torch.bfloat16) for tensor in (query, key, value)]
    found, _ = grouped_attention(torch.nn.Identity(), *rounded, None)
    plain = torch.nn.functional.scaled_dot_product_attention(*rounded, enable_gqa=True).transpose(1, 2)
    error, goal = ((out.float() - exact).norm() / exact.norm() for out in (found, plain))
    assert error < 1.2 * goal


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3_5_vl"])
def test_batches_say_what_the_model_says(family: str) -> None:
    """Prompts of three lengths in one batch, against each alone by the model's own attention and cache."""
    tokenizer, plain, grouped = chat_tokenizer(), tiny_target(family), tiny_target(family)
    use_grouped_attention(grouped)
    assert grouped.config._attn_implementation == NAME
    greedy = [Sampling()] * len(PROMPTS)
    found = decode_batch(grouped, tokenizer, PROMPTS, greedy, 20)
    for prompt, response in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        whole = plain.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        assert response == whole[0, len(prompt) :].tolist()
