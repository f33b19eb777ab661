"""Drafting changes the speed, never the text; and the loop really accepts what a good drafter proposes."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, JambaConfig, LlamaConfig, PreTrainedModel

from conftest import Hold
from dflash_model import DFlash2Config, Drafter, UserError, generate
from dflash_model.attention import without_cudnn
from dflash_model.compare import first_divergence
from dflash_model.config import FULL, SLIDING
from dflash_model.decoding import AGAIN_BLOCKS, _TextEnd
from dflash_model.taps import text_config
from dflash_train.evaluate import replay
from support.tiny import DENSE, DFLASH2, FAMILIES, tiny_config, tiny_drafter, tiny_target
from support.tokenizer import byte_fallback_tokenizer, chat_tokenizer

STATEFUL = ("qwen3_5", "qwen3_5_moe", "qwen3_5_vl")


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
        seen = inputs.context_BSE.shape[1]
        cache.extend(0, (torch.zeros(1, 1, seen, 1),) * 2, seen)
        return torch.stack(hidden)[None]


@pytest.mark.parametrize(
    ("family", "again_blocks"),
    [("qwen3", 0), ("llama", 0), ("gemma3", 0), ("qwen3_5", 0), ("qwen3_5", 1), ("qwen3_5", 4)],
)
@pytest.mark.parametrize("wrong_every", [3, 10**6])
def test_oracle_drafts_are_accepted_and_the_text_is_the_targets(
    family: str, wrong_every: int, again_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partial and full acceptance, on hybrid targets too; acceptance equals the replay's arithmetic."""
    monkeypatch.setitem(AGAIN_BLOCKS, "cpu", again_blocks)
    target = tiny_target(family)
    with torch.no_grad():  # 64 hidden sizes cannot tell 131 tokens apart: let the model use 60 of them
        target.get_output_embeddings().weight[60:] = 0
    prompt, count = [3, 17, 5, 90, 41], 40
    expected = library_greedy(target, prompt, count)
    config = tiny_config((FULL,), num_target_layers=target.config.num_hidden_layers)
    drafter = tiny_drafter(config)
    oracle = Oracle(prompt + expected, target.get_output_embeddings().weight.detach(), wrong_every)
    monkeypatch.setattr(drafter, "forward", oracle.forward)
    result = generate(drafter, target, prompt, max_new_tokens=count)
    assert result.token_ids == expected
    positions = torch.arange(len(prompt), len(prompt) + count)
    wrong = positions % wrong_every == 0
    run = torch.tensor([next((k for k in range(7) if i + 1 + k < count and wrong[i + 1 + k]), 7) for i in range(count)])
    candidates = torch.arange(count) < count - 1
    assert result.committed == replay(run.numpy(), candidates.numpy()).committed.tolist()
    assert result.acceptance_length > (2.0 if wrong_every == 3 else 7.0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("layers", "dflash2"), [((FULL, FULL), None), ((SLIDING, FULL), None), ((SLIDING, FULL), DFLASH2)]
)
def test_any_drafter_leaves_the_text_alone(
    family: str, layers: tuple[str, ...], dflash2: DFlash2Config | None, hold: Hold
) -> None:
    target = tiny_target(family)
    num_layers = text_config(target.config).num_hidden_layers
    drafter = tiny_drafter(tiny_config(layers, num_target_layers=num_layers, dflash2=dflash2))
    for prompt in ([1], [7, 7, 7, 30], list(range(50, 70))):
        expected = library_greedy(target, prompt, 30)
        streamed: list[int] = []
        result = generate(drafter, target, prompt, max_new_tokens=30, on_tokens=streamed.extend)
        plain = generate(None, target, prompt, max_new_tokens=30).token_ids
        different = sum(a != b or b != c for a, b, c in zip(result.token_ids, plain, expected, strict=True))
        hold(
            f"greedy text, {drafter.config.kind} on {family}",
            "transformers' generate, tokens that differ",
            different,
            0,
        )
        assert streamed == expected
        rejected = sum(accepted < 7 for accepted in result.accepted[:-1]) if family in STATEFUL else 0
        assert result.target_forwards == 1 + len(result.committed) + rejected


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


def test_stop_strings_end_the_text_with_the_token_that_completes_them() -> None:
    """Against decoding every prefix of the text; with a drafter and without."""
    target, prompt, tokenizer = tiny_target("qwen3"), [3, 17, 5], chat_tokenizer()
    expected = library_greedy(target, prompt, 30)
    drafter = tiny_drafter(tiny_config())
    for begin, end in ((4, 6), (11, 14), (20, 21)):
        stop = tokenizer.decode(expected[begin:end])
        kept = next(n for n in range(1, 31) if stop in tokenizer.decode(expected[:n]))
        for who in (drafter, None):
            streamed: list[int] = []
            out = generate(
                who, target, prompt, max_new_tokens=30, stop_strings=["never", stop], tokenizer=tokenizer,
                on_tokens=streamed.extend,
            )  # fmt: skip
            assert out.token_ids == expected[:kept] == streamed
            assert out.stopped_by == "string"
    with pytest.raises(UserError, match="needs tokenizer"):
        generate(None, target, prompt, max_new_tokens=3, stop_strings=["a"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_target_layers": 5}, "the drafter has num_target_layers 5, the target has 6"),
        ({"vocab_size": 140}, "the drafter has vocab_size 140, the target has 131"),
        ({"hidden_size": 32}, "the drafter has hidden_size 32, the target has 64"),
    ],
)
def test_a_drafter_for_another_target_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(Drafter(tiny_config(**change)), tiny_target("qwen3"), [1], max_new_tokens=2)


@pytest.mark.parametrize(("prompt", "limit"), [([], 3), ([1], 0)])
def test_empty_prompts_and_limits_are_refused(prompt: list[int], limit: int) -> None:
    with pytest.raises(UserError, match="both must be 1 or more"):
        generate(None, tiny_target("qwen3"), prompt, max_new_tokens=limit)


def test_divergence_names_the_first_difference_and_its_margin() -> None:
    target, prompt = tiny_target("qwen3"), [3, 17, 5]
    text = library_greedy(target, prompt, 6)
    other = [*text[:3], (text[3] + 1) % 131, *text[4:]]
    assert first_divergence(target, prompt, text, list(text)) is None
    found = first_divergence(target, prompt, text, other)
    with torch.no_grad():
        logits = target(input_ids=torch.tensor([prompt + text[:3]])).logits[0, -1]
    assert found is not None
    assert (found.position, found.tokens) == (3, (text[3], other[3]))
    assert found.margin == pytest.approx(float(logits[text[3]] - logits[other[3]]), abs=1e-5)
    shorter = first_divergence(target, prompt, text, text[:4])
    assert shorter is not None
    assert (shorter.position, shorter.tokens, shorter.margin) == (4, (text[4], None), None)


@pytest.mark.parametrize("stop", ["🦙", "字", "b漢"])
def test_stop_strings_are_found_between_bytes(stop: str) -> None:
    """Token by token, against decoding every prefix."""
    tokenizer, text = byte_fallback_tokenizer(), "a漢字b漢a字🦙漢字🦙"
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = next(n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n]))
    ends = _TextEnd(set(), [stop], tokenizer)
    assert ends.find([], ids) == (expected, "string")
    assert ends.find(ids[:3], ids[3:]) == (expected - 3, "string")


def test_prompts_and_stops_of_other_types() -> None:
    target, prompt = tiny_target("qwen3"), [3, 17, 5]
    expected = library_greedy(target, prompt, 12)
    for ids in (torch.tensor(prompt), torch.tensor([prompt]), tuple(prompt)):
        out = generate(None, target, ids, max_new_tokens=12, stop_token_ids=torch.tensor(expected[5:6]))
        assert out.token_ids == expected[: expected.index(expected[5]) + 1]
    for wrong in ([prompt], torch.zeros(2, 3, dtype=torch.long), "text"):
        with pytest.raises(UserError, match="must be the token ids of one sequence"):
            generate(None, target, wrong, max_new_tokens=2)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="stop_strings is 'stop'; it takes a list"):
        generate(None, target, prompt, max_new_tokens=2, stop_strings="stop", tokenizer=chat_tokenizer())


def test_a_target_whose_blocks_are_not_its_single_steps_is_refused() -> None:
    """Jamba's state layers compute a block after a cache differently in transformers; plain decoding still works."""
    torch.manual_seed(0)
    config = JambaConfig(
        vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, num_experts=2, use_mamba_kernels=False,
        mamba_d_state=4, pad_token_id=0,
    )  # fmt: skip
    target = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # with transformers' own small weights the state hardly matters
        for parameter in target.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    drafter = tiny_drafter(tiny_config(num_target_layers=4, target_layer_ids=(0, 1, 2)))
    with pytest.raises(UserError, match=r"model_type is jamba; .* logits of a block of tokens differ"):
        generate(drafter, target, [1, 2, 3], max_new_tokens=4)
    assert len(generate(None, target, [1, 2, 3], max_new_tokens=4).token_ids) == 4


def test_moving_rotary_frequencies_are_refused_where_they_move() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(**DENSE, max_position_embeddings=32, rope_parameters=rope)
    target, drafter = AutoModelForCausalLM.from_config(config).eval(), tiny_drafter(tiny_config())
    assert len(generate(drafter, target, [1, 2, 3], max_new_tokens=21).token_ids) == 21  # 3 + 21 + a block of 8: 32
    with pytest.raises(UserError, match=r"rope_type is dynamic; its text can be drafted up to 32 positions"):
        generate(drafter, target, [1, 2, 3], max_new_tokens=22)


def test_texts_grow_without_cudnns_attention() -> None:
    """The flag is the process's: it is off while a call runs, and as it was when the last of overlapping ones ends."""
    default, seen = torch.backends.cuda.cudnn_sdp_enabled(), []
    generate(
        None, tiny_target("qwen3"), [1, 2], max_new_tokens=3,
        on_tokens=lambda _: seen.append(torch.backends.cuda.cudnn_sdp_enabled()),
    )  # fmt: skip
    assert seen == [False] * 3
    assert torch.backends.cuda.cudnn_sdp_enabled() == default
    for before in (not default, default):
        torch.backends.cuda.enable_cudnn_sdp(before)
        with ExitStack() as first:
            first.enter_context(without_cudnn)
            second = ExitStack()
            second.enter_context(without_cudnn)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        second.close()
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
