"""Random conversations in every family: what carries loss is what the family's rules say, or a named refusal."""

import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from dflash_data.conversation import Conversation, Refused
from dflash_data.encoder import Encoded, Encoder
from dflash_data.spans import NO_REASONING
from support.rules import RULES, Message, Unusable, as_json, unclosed, writes_block
from support.templates import FAMILIES, family_tokenizer

PROFILE = settings(
    derandomize=True, max_examples=120, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
NAMES = [*FAMILIES, "llama2", "llama2_always"]
NAMES.remove("channels")  # its turns end in three ways; by value in test_spans.py
OFF = {"enable_thinking": False}
CASES = [*((name, {}) for name in NAMES), ("qwen3", OFF), ("qwen35", OFF)]
WITH_TOOLS = ("chatml", "qwen3", "qwen35", "llama3")
STRICT = ("gemma", "llama2", "llama2_always")
FRAGMENTS = [
    "\n", "\n\n", " ", "  ", "\t", ".", "a", "Paris",
    "👩‍👩‍👧‍👦", "é", "e\u0301", "\u0338", "\u0327", "漢字", "한", "\u2028", "\x85", "\u200b",
    "<|im_", "end|>", "<|", "|>", "<", "eot_id", "<end_of", "[/INST]", "[INST]", "</s",
    "user", "assistant\n", "3141592653",
    "<|im_end|", "tool_call>", "{%", "}}", "\\", '"', "{", "{{ x }}", "▁", "\r\n", "\0",
]  # fmt: skip
WORDS = st.one_of(
    st.sampled_from(["Yes.", "No.", "Paris", " Paris\n"]),
    st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join),
    st.text(max_size=12),
)
SAID = st.one_of(WORDS.filter(str.strip), WORDS.map(lambda text: text + "."), WORDS)
THOUGHTS = st.one_of(st.sampled_from(["Yes.", "think", "<think", "Yes. No.", "\nYes."]), WORDS.filter(str.strip))
CALLS = st.dictionaries(st.sampled_from(["city", "day"]), WORDS, max_size=2).map(
    lambda arguments: {"type": "function", "function": {"name": "get_time", "arguments": arguments}}
)
TOOL = {"type": "function", "function": {"name": "get_time", "description": "Tells the time: 漢"}}


@st.composite
def answers(draw: st.DrawFn) -> Message:
    message: Message = {"role": "assistant", "content": draw(SAID)}
    kind = draw(st.sampled_from(["plain", "plain", "reasoned", "inside"]))
    if kind == "reasoned":
        message["reasoning_content"] = draw(THOUGHTS)
    elif kind == "inside":
        thought = draw(THOUGHTS).strip()
        opened, lines = draw(st.sampled_from([("<think>\n", "\n"), ("<think>", ""), ("", "\n")]))
        message["content"] = f"{opened}{thought}{lines}</think>{lines}{lines}{message['content'].strip()}"
    return message


@st.composite
def conversations(draw: st.DrawFn, name: str) -> tuple[list[Message], list[Any] | None]:
    messages: list[Message] = []
    with_tools = name in WITH_TOOLS and draw(st.booleans())
    strange = 0 if name in STRICT and draw(st.integers(0, 4)) else 1  # most conversations alternate where they must
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(WORDS)})
    for _ in range(draw(st.integers(1, 3))):
        messages += [{"role": "user", "content": draw(WORDS)} for _ in range(1 + strange * draw(st.integers(0, 1)))]
        if with_tools and draw(st.booleans()):
            calls = draw(st.lists(CALLS, min_size=1, max_size=draw(st.sampled_from([1, 1, 2]))))
            messages.append({**draw(answers()), "tool_calls": calls})
            if draw(st.booleans()):
                messages[-1]["content"] = ""
            messages += [{"role": "tool", "content": draw(WORDS)} for _ in calls]
        messages += [draw(answers()) for _ in range(1 + strange * draw(st.sampled_from([0, 0, 0, 1])))]
    if draw(st.sampled_from([False, False, True])):
        messages.append({"role": "user", "content": draw(WORDS)})
    return messages, [TOOL] if with_tools else None


@cache
def encoder(name: str, *, thinking: bool, reasoning: bool) -> Encoder:
    options = {} if thinking else OFF
    return Encoder(tokenizer=family_tokenizer(name), options=options, max_length=10**6, reasoning=reasoning)


@dataclass
class Expected:
    text: str
    spans: list[tuple[int, int]]


def expectation(  # noqa: C901 - the rules of all families, one after the other
    name: str, encode: Encoder, messages: list[Message], tools: list[Any] | None
) -> Expected | str:
    """The rendered text and its parts with loss, or the reason of the refusal."""
    rules, options, tokenizer = RULES[name], encode.options, encode.tokenizer
    special = FAMILIES[name].special if name in FAMILIES else ("<s>", "</s>", "<unk>")
    if any(token in as_json(messages) for token in special):
        return "content holds a control token"
    last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
    messages = messages[: last + 1]
    try:
        page = rules(messages, tools, False, options)
    except Unusable as error:
        return f"the chat template refuses it: {error}"
    spans: list[tuple[int, int]] = []
    reason = ""
    for index, turn in page.turns.items():
        message, prompt = messages[index], rules(messages[:index], tools, True, options).text
        begin, reason = len(prompt), ""
        if not (message["content"].strip() or message.get("reasoning_content") or message.get("tool_calls")):
            reason = "the assistant turn is empty"
        elif not page.text.startswith(prompt):
            history = rules(messages[:index], tools, False, options).text
            kept = page.text.startswith(history)
            reason = "the assistant turn does not begin as the generation prompt does"
            reason = reason if kept else "the chat template rewrites earlier turns"
        elif not turn.complete or (turn.block_end > begin and unclosed(message) and name != "wrapped"):
            hides = message.get("reasoning_content") and name not in ("qwen3", "qwen35")
            reason = NO_REASONING if hides else "the rendered assistant turn differs from its text"
        else:
            shown = page.text[begin : turn.block_end]
            if "</think>" in shown and not (encode.reasoning and writes_block(message)):
                begin = turn.block_end
            before = tokenizer.encode(page.text[:begin], add_special_tokens=False)
            joined = tokenizer.encode(page.text[: turn.end], add_special_tokens=False)[: len(before)] != before
            if joined and index != last:
                reason = "the tokenizer joins a turn with its prompt"
            elif "llama2" in name and "▁" in page.text[begin : turn.end]:
                reason = "the tokenizer changes the text"
        if not reason:
            spans.append((begin, turn.end))
    return reason or Expected(page.text, spans)


def composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def check(name: str, encode: Encoder, encoded: Encoded, expected: Expected) -> None:
    tokenizer, ids, mask = encode.tokenizer, encoded.input_ids, encoded.loss_mask
    end = tokenizer.convert_tokens_to_ids("</s>" if "llama2" in name else FAMILIES[name].special[0])
    starts = [i for i, carries in enumerate(mask) if carries and not (i and mask[i - 1])]
    ends = [i + 1 for i, carries in enumerate(mask) if carries and mask[i + 1 : i + 2] != [True]]
    assert len(starts) == len(expected.spans)
    for start, stop, (begin, until) in zip(starts, ends, expected.spans, strict=True):
        assert ids[:start] == tokenizer.encode(expected.text[:begin], add_special_tokens=False), "the server's prompt"
        assert ids[stop - 1] == end
        assert end not in ids[start : stop - 1]
        said, words = tokenizer.decode(ids[start:stop]), expected.text[begin:until]
        if "llama2" in name and words.startswith(" "):
            said = " " + said  # its decoder takes off the first blank of all
        assert composed(said) == composed(words)
        if name not in ("qwen3", "qwen35"):
            assert said == words
    if "llama2" not in name:
        assert composed(tokenizer.decode(ids)) == composed(expected.text)


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name}{'-off' if off else ''}" for name, off in CASES])
def test_what_carries_loss_is_what_the_target_would_write(name: str, options: dict[str, Any]) -> None:
    @PROFILE
    @given(conversations(name), st.sampled_from([True, True, False]))
    def run(drawn: tuple[list[Message], list[Any] | None], reasoning: bool) -> None:
        messages, tools = drawn
        encode = encoder(name, thinking=not options, reasoning=reasoning)
        expected = expectation(name, encode, messages, tools)
        event("refused" if isinstance(expected, str) else f"{len(expected.spans)} turns")
        try:
            encoded = encode(Conversation(messages, tools))
        except Refused as refused:
            if refused.args[0] == "fewer than two supervised tokens in a row":
                assert not isinstance(expected, str)
                assert all(until - begin < 12 for begin, until in expected.spans)
            else:
                assert refused.args[0] == expected  # noqa: PT017 - a refusal is one of two right answers
            return
        assert not isinstance(expected, str), expected
        check(name, encode, encoded, expected)

    run()
