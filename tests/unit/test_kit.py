"""Rows that broke other people's preparation, by value: what carries loss, or the reason why the row is dropped."""

from typing import Any

import pytest

from dflash_data.chat import load_tokenizer
from dflash_data.conversation import Refused, as_document
from dflash_data.encoder import Encoder
from dflash_model import UserError
from support.templates import family_tokenizer


def ask(question: Any, answer: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]}


CLOCK = {"name": "get_time", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = {"type": "function", "function": {"name": "get_time", "arguments": {"city": "Oslo"}}}
KIT: dict[str, dict[str, Any]] = {
    "K1": ask("Name a colour.", "Blue is a colour that many people name first."),
    "K3": {"messages": []},
    "K4": {"messages": [{"role": "assistant", "content": "Hello, what is it?"}, *ask("Count.", "One.")["messages"]]},
    "K5": {"messages": [{"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Ready."}]},
    "K6": {"messages": [{"role": "user", "content": "First part."}, *ask("What is 2+2?", "It is 4.")["messages"]]},
    "K7": {"messages": [*ask("Two.", "Here is one.")["messages"], {"role": "assistant", "content": "And two."}]},
    "K8": {
        "tools": [{"type": "function", "function": CLOCK}],
        "messages": [
            *ask("What time is it in Oslo?", "", tool_calls=[CALL])["messages"],
            {"role": "tool", "content": "14:05"},
            {"role": "assistant", "content": "Five past two."},
        ],
    },
    "K9a": ask("Is 7 prime?", "Yes.", reasoning_content="7 has no divisor between 2 and 6."),
    "K9b": ask("Is 7 prime?", "<think>\n7 has no divisor between 2 and 6.\n</think>\n\nYes."),
    "K10": {
        "messages": ask("Is 7 prime?", "Yes.", reasoning_content="No divisor between 2 and 6.")["messages"]
        + ask("And 9?", "No.", reasoning_content="9 is 3 times 3.")["messages"]
    },
    "K11": {"messages": [{"role": "user", "content": "Name a colour."}, {"role": "mybot", "content": "Green."}]},
    "K12": ask("word " * 10_000, "Short answer."),
    "K13": ask([{"type": "text", "text": "Name a colour."}], [{"type": "text", "text": "Red."}]),
    "K14": ask("Lines?", "one\u2028two\u0085three"),
    "K15": ask("Half?", "half a pair \ud83d"),
    "K17": ask("Say hi with emoji.", "Hi 👩‍👩‍👧‍👦 café 你好 Z͑ñ!"),
    "K19": ask("Ready?", "OK."),
    "K20": ask("Ready?", ""),
    "image": ask([{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "What?"}], "A cat."),
    "control": ask("Say <|im_end|> please.", "No."),
}  # fmt: skip
THOUGHT = "<think>\n7 has no divisor between 2 and 6.\n</think>\n\nYes."
EXPECTED = {
    "K1": "Blue is a colour that many people name first.|",
    "K3": Refused("no messages"),
    "K4": Refused("starts with the assistant"),
    "K5": Refused("starts with the assistant"),
    "K6": "It is 4.|",
    "K7": "Here is one.|And two.|",
    "K8": '<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo"}}\n</tool_call>|Five past two.|',
    "K9b": THOUGHT + "|",
    "K11": Refused("unknown role 'mybot'"),
    "K12": Refused("the first answer begins beyond data.seq_len"),
    "K13": "Red.|",
    "K14": "one\u2028two\u0085three|",
    "K15": Refused("not valid Unicode"),
    "K17": "Hi 👩‍👩‍👧‍👦 café 你好 Z͑ñ!|",
    "K19": "OK.|",
    "K20": Refused("the assistant turn is empty"),
    "image": Refused("image, audio or video"),
    "control": Refused("content holds a control token"),
}
REASONING = {
    "K9a": THOUGHT + "|",
    "K9b": THOUGHT + "|",  # the same, however it is spelled
    "K10": "<think>\n9 is 3 times 3.\n</think>\n\nNo.|",  # the first is gone by then
}


def supervised(family: str, row: dict[str, Any], **options: Any) -> str:
    """What carries loss, an end-of-turn token as a bar."""
    tokenizer = family_tokenizer(family)
    encoded = Encoder(tokenizer=tokenizer, options=options, max_length=512)(as_document(row))
    ids = [token for token, carries in zip(encoded.input_ids, encoded.loss_mask, strict=True) if carries]
    return str(tokenizer.decode(ids)).replace("<|im_end|>", "|")


def check(family: str, name: str, expected: str | Refused, **options: Any) -> None:
    if isinstance(expected, Refused):
        with pytest.raises(Refused) as caught:
            supervised(family, KIT[name], **options)
        assert caught.value.args == expected.args
    else:
        assert supervised(family, KIT[name], **options) == expected


@pytest.mark.parametrize("name", EXPECTED)
def test_rows_of_the_kit(name: str) -> None:
    check("chatml", name, EXPECTED[name])


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_as_a_thinking_template_shows_it(name: str) -> None:
    check("qwen3", name, REASONING[name])


@pytest.mark.parametrize("name", ["K1", "K6", "K13", "K17", "K19"])
def test_without_thinking_the_answer_alone_carries_loss(name: str) -> None:
    """The empty block of reasoning stands in the prompt, as a server sends it."""
    check("qwen3", name, EXPECTED[name], enable_thinking=False)


def test_a_missing_tokenizer_is_named() -> None:
    with pytest.raises(UserError, match="no tokenizer at /nowhere/at/all"):
        load_tokenizer("/nowhere/at/all")
