"""What each family's template writes, once more in Python: no templates, no frames, no searching.

A conversation becomes a page that knows where its assistant turns end and whether all their words are shown.
"""

import json
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


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


def writes_block(message: Message) -> bool:
    """Whether a block of reasoning before the answer is the message's own, even an empty one."""
    return bool(split_block(message)[0].strip() or inner_block(message["content"]))


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


def wrapped(messages: list[Message], tools: list[Any] | None, ask: bool, options: dict[str, Any]) -> Page:
    page = Page()
    for index, message in enumerate(messages):
        said = message["content"]
        page.put(f"<|turn|>{message['role']}\n")
        if message["role"] == "assistant":
            block = inner_block(said)
            shown = "reasoning_content" not in message
            said = said.removeprefix(block)
            page.turn(index, said, "<|/text|><|end|>", block="<|text|>" + block, complete=shown)
        else:
            page.put("<|text|>", said, "<|/text|><|end|>")
    page.put("<|turn|>assistant\n")
    return page


RULES = {
    "chatml": chatml, "qwen3": qwen3, "qwen35": qwen35, "llama3": llama3, "gemma": gemma, "llama2": llama2,
    "llama2_always": llama2, "marked": marked, "marked_words": marked, "two_ends": two_ends,
    "wrapped": wrapped,
}  # fmt: skip
