"""What carries loss, as text, and the reason of a refusal."""

from typing import Any

import pytest

from dflash_data.conversation import Conversation, Message, Refused, Text, Tokens
from dflash_data.encoder import Encoded, Encoder
from support.templates import family_tokenizer

OFF = {"enable_thinking": False}
K_TIME = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "get_time", "arguments": {"city": "Oslo"}}}]}  # fmt: skip
CALL = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo"}}\n</tool_call>'


def encoder(name: str = "chatml", template: str | None = None, **settings: Any) -> Encoder:
    tokenizer = family_tokenizer(name)
    if template is not None:
        tokenizer.chat_template = template
    return Encoder(tokenizer=tokenizer, **{"options": {}, "max_length": 10_000, **settings})


def talk(*texts: str) -> list[Message]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def masked_in(encode: Encoder, document: Conversation | Text | Tokens | list[Message]) -> list[str]:
    """The runs of tokens with loss, as text."""
    return runs(encode, encode(Conversation(document) if isinstance(document, list) else document))


def runs(encode: Encoder, encoded: Encoded) -> list[str]:
    assert len(encoded.input_ids) == len(encoded.loss_mask)
    found: list[list[int]] = []
    for i, (token, carries) in enumerate(zip(encoded.input_ids, encoded.loss_mask, strict=True)):
        if carries and not (i and encoded.loss_mask[i - 1]):
            found.append([])
        if carries:
            found[-1].append(token)
    return [str(encode.tokenizer.decode(ids)) for ids in found]


def refusal(encode: Encoder, document: Conversation | Text | Tokens | list[Message]) -> str:
    with pytest.raises(Refused) as caught:
        encode(Conversation(document) if isinstance(document, list) else document)
    return str(caught.value.args[0])
