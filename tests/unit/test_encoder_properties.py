"""Random conversations in every family: what carries loss is what the family's rules say, or a named refusal.

The rules are written here once more, in Python, without templates, frames or searching: a conversation to its pieces.
"""

import json
import unicodedata
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from dflash_data.conversation import Conversation, Refused
from dflash_data.encoder import Encoded, Encoder
from support.templates import FAMILIES, family_tokenizer

Message = dict[str, Any]

PROFILE = settings(
    derandomize=True, max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
NAMES = [*FAMILIES, "llama2", "llama2_always"]
NAMES.remove("channels")  # its turns end in three ways; by value in test_encoder.py
OFF = {"enable_thinking": False}
CASES = [*((name, {}) for name in NAMES), ("qwen3", OFF), ("qwen35", OFF)]
WITH_TOOLS = ("chatml", "qwen3", "qwen35", "llama3")
STRICT = ("gemma", "llama2", "llama2_always")


class Unusable(Exception):
    """The family cannot render it."""


@dataclass
class Turn:
    """Where an assistant turn ends, whether all its words are shown, and where its block of reasoning ends."""

    end: int
    complete: bool
    block_end: int


@dataclass
class Page:
    text: str = ""
    turns: dict[int, Turn] = field(default_factory=dict)

    def put(self, *texts: str) -> None:
        self.text += "".join(texts)

    def turn(self, index: int, *texts: str, block: str = "", complete: bool = True) -> None:
        self.put(block)
        block_end = len(self.text) if block else 0
        self.put(*texts)
        self.turns[index] = Turn(len(self.text), complete, block_end)


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def calls_of(message: Message) -> list[tuple[str, dict[str, str]]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]


def inner_block(content: str) -> str:
    """A block of reasoning that stands in the content, as it stands there."""
    return content[: content.index("</think>") + len("</think>")] if "</think>" in content else ""


def split_block(message: Message) -> tuple[str, str]:
    """Reasoning and answer, taken out of the content if they stand there."""
    thought, said = message.get("reasoning_content", ""), message["content"]
    if not thought and "</think>" in said:
        thought, said = said.split("</think>")
        thought, said = thought.split("<think>")[-1].strip("\n"), said.lstrip("\n")
    return thought, said


def unclosed(message: Message) -> bool:
    """Whether an answer is reasoning that was cut: behind an empty block it is not what was written."""
    return split_block(message)[1].strip().startswith("<think>")


def last_question(messages: list[Message]) -> int:
    return max(index for index, message in enumerate(messages) if message["role"] == "user")


def functions(page: Page, messages: list[Message], tools: list[Any] | None, *, system_last: bool = False) -> None:
    if tools:
        system = messages[0]["content"] if messages[0]["role"] == "system" else ""
        listed = "Functions:" + "".join("\n" + as_json(tool) for tool in tools)
        if system_last:
            page.put("<|im_start|>system\n", listed, "\n\n" + system.strip() if messages[0]["role"] == "system" else "")
        else:
            page.put("<|im_start|>system\n", system + "\n\n" if messages[0]["role"] == "system" else "", listed)
        page.put("<|im_end|>\n")


def chatml(messages: list[Message], tools: list[Any] | None, ask: bool, options: dict[str, Any]) -> Page:
    page = Page()
    functions(page, messages, tools)
    for index, message in enumerate(messages):
        if index == 0 and tools and message["role"] == "system":
            continue
        page.put("<|im_start|>", message["role"], "\n")
        if message["role"] != "assistant":
            page.put(message["content"], "<|im_end|>\n")
            continue
        said = message["content"]
        block = inner_block(said)
        texts = [said.removeprefix(block)]
        for number, (name, arguments) in enumerate(calls_of(message)):
            texts += ["\n"] if said or number else []
            texts += ["<tool_call>\n", as_json({"name": name, "arguments": arguments}), "\n</tool_call>"]
        page.turn(index, *texts, "<|im_end|>", block=block, complete="reasoning_content" not in message)
        page.put("\n")
    page.put("<|im_start|>assistant\n" if ask else "")
    return page


def qwen3(messages: list[Message], tools: list[Any] | None, ask: bool, options: dict[str, Any]) -> Page:
    page, question = Page(), last_question(messages)
    functions(page, messages, tools)
    for index, message in enumerate(messages):
        role, said = message["role"], message["content"]
        if role == "tool":
            first = messages[index - 1]["role"] != "tool"
            final = index + 1 == len(messages) or messages[index + 1]["role"] != "tool"
            page.put("<|im_start|>user" if first else "", f"\n<tool_response>\n{said}\n</tool_response>")
            page.put("<|im_end|>\n" if final else "")
        elif role != "assistant":
            page.put("" if index == 0 and tools and role == "system" else f"<|im_start|>{role}\n{said}<|im_end|>\n")
        else:
            thought, said = split_block(message)
            final = index + 1 == len(messages)
            page.put("<|im_start|>assistant\n")
            block, shown = "", said
            if index > question and (final or thought):
                block, shown = "<think>\n" + thought.strip("\n") + "\n</think>\n\n", said.lstrip("\n")
            texts = [shown]
            for number, (name, arguments) in enumerate(calls_of(message)):
                texts += ["\n"] if said or number else []
                texts += [f'<tool_call>\n{{"name": "{name}", "arguments": {as_json(arguments)}}}\n</tool_call>']
            page.turn(index, *texts, "<|im_end|>", block=block, complete=bool(block) or not thought.strip())
            page.put("\n")
    if ask:
        page.put("<|im_start|>assistant\n", "" if options.get("enable_thinking", True) else "<think>\n\n</think>\n\n")
    return page


def qwen35(messages: list[Message], tools: list[Any] | None, ask: bool, options: dict[str, Any]) -> Page:
    page, question = Page(), last_question(messages)
    functions(page, messages, tools, system_last=True)
    for index, message in enumerate(messages):
        role, said = message["role"], message["content"].strip()
        if role == "tool":
            first = messages[index - 1]["role"] != "tool"
            final = index + 1 == len(messages) or messages[index + 1]["role"] != "tool"
            page.put("<|im_start|>user" if first else "", f"\n<tool_response>\n{said}\n</tool_response>")
            page.put("<|im_end|>\n" if final else "")
        elif role != "assistant":
            page.put("" if index == 0 and tools and role == "system" else f"<|im_start|>{role}\n{said}<|im_end|>\n")
        else:
            thought, said = split_block({**message, "content": said})
            page.put("<|im_start|>assistant\n")
            block = "<think>\n" + thought.strip() + "\n</think>\n\n" if index > question else ""
            texts = [said]
            for number, (name, arguments) in enumerate(calls_of(message)):
                texts += ["\n"] if number else ["\n\n"] if said else []
                texts += [f"<tool_call>\n<function={name}>\n"]
                texts += [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
                texts += ["</function>\n</tool_call>"]
            page.turn(index, *texts, "<|im_end|>", block=block, complete=bool(block) or not thought.strip())
            page.put("\n")
    if ask:
        page.put("<|im_start|>assistant\n<think>\n", "" if options.get("enable_thinking", True) else "\n</think>\n\n")
    return page


def llama3(messages: list[Message], tools: list[Any] | None, ask: bool, options: dict[str, Any]) -> Page:
    def header(role: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

    page = Page("<|begin_of_text|>")
    if tools:
        page.put(header("system"), "Functions:", *("\n" + as_json(tool) for tool in tools), "<|eot_id|>")
    for index, message in enumerate(messages):
        said, calls = message["content"].strip(), calls_of(message)
        page.put(header("ipython" if message["role"] == "tool" else message["role"]))
        if len(calls) > 1:
            raise Unusable("Only one call at a time!")
        if message["role"] != "assistant":
            page.put(said, "<|eot_id|>")
        elif calls:
            name, arguments = calls[0]
            call = f'{{"name": "{name}", "parameters": {as_json(arguments)}}}'
            # The content is not shown. One that begins as every call does cannot be told from it.
            complete = call.startswith(said) and "reasoning_content" not in message
            page.turn(index, call, "<|eot_id|>", complete=complete)
        else:
            block = inner_block(said)
            shown = "reasoning_content" not in message
            page.turn(index, said.removeprefix(block), "<|eot_id|>", block=block, complete=shown)
    page.put(header("assistant") if ask else "")
    return page


def alternating(messages: list[Message]) -> tuple[str, list[Message], int]:
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    rest = messages[system is not None :]
    if any(message["role"] != ("user", "assistant")[number % 2] for number, message in enumerate(rest)):
        raise Unusable("Conversation roles must alternate user/assistant/user/assistant/...")
    return system or "", rest, int(system is not None)


def gemma(messages: list[Message], tools: list[Any] | None, ask: bool, options: dict[str, Any]) -> Page:
    system, rest, offset = alternating(messages)
    page, lead = Page("<bos>"), system.strip() + "\n\n" if offset else ""
    for number, message in enumerate(rest):
        said = message["content"].strip()
        if message["role"] == "user":
            page.put("<start_of_turn>user\n", lead if number == 0 else "", said, "<end_of_turn>\n")
            continue
        page.put("<start_of_turn>model\n")
        block = inner_block(said)
        shown = "reasoning_content" not in message
        page.turn(number + offset, said.removeprefix(block), "<end_of_turn>", block=block, complete=shown)
        page.put("\n")
    page.put("<start_of_turn>model\n" if ask else "")
    return page


def llama2(messages: list[Message], tools: list[Any] | None, ask: bool, options: dict[str, Any]) -> Page:
    system, rest, offset = alternating(messages)
    page, lead = Page(), f"<<SYS>>\n{system}\n<</SYS>>\n\n" if offset else ""
    for number, message in enumerate(rest):
        said = message["content"].strip()
        if message["role"] == "user":
            page.put("<s>[INST] ", lead if number == 0 else "", said, " [/INST]")
            continue
        block = inner_block(said)
        shown = "reasoning_content" not in message
        block, said = " " + block if block else "", ("" if block else " ") + said.removeprefix(block)
        page.turn(number + offset, said, " </s>", block=block, complete=shown)
    return page


def marked(messages: list[Message], tools: list[Any] | None, ask: bool, options: dict[str, Any]) -> Page:
    return chatml(messages, None, ask, options)


def two_ends(messages: list[Message], tools: list[Any] | None, ask: bool, options: dict[str, Any]) -> Page:
    page = Page()
    for index, message in enumerate(messages):
        said = message["content"]
        page.put(f"<|{message['role']}|>\n")
        if message["role"] == "assistant":
            block = inner_block(said)
            shown = "reasoning_content" not in message
            page.turn(index, said.removeprefix(block), "<|end|>", block=block, complete=shown)
        else:
            page.put(said, "<|end|>")
        page.put("\n")
    page.put("<|assistant|>\n" if ask else "<|endoftext|>")
    return page


RULES = {
    "chatml": chatml, "qwen3": qwen3, "qwen35": qwen35, "llama3": llama3, "gemma": gemma, "llama2": llama2,
    "llama2_always": llama2, "marked": marked, "marked_words": marked, "two_ends": two_ends,
}  # fmt: skip
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
        elif not turn.complete or (turn.block_end > begin and unclosed(message)):
            reason = "the rendered assistant turn differs from its text"
        else:
            if not encode.reasoning and turn.block_end > begin:
                begin = turn.end - len(page.text[turn.block_end : turn.end].lstrip())
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
