"""What a row is read as, in every spelling, and the reasons under which rows are refused."""

import json
from typing import Any

import pytest

from dflash_data.conversation import Conversation, Message, Refused, Text, Tokens, as_document

HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello."}
CALL = {"type": "function", "function": {"name": "get_time", "arguments": {"city": "Oslo"}}}
TOOLS = [{"type": "function", "function": {"name": "get_time"}}]


def read(row: dict[str, Any]) -> Conversation:
    document = as_document(row)
    assert isinstance(document, Conversation)
    return document


def answered(**turn: object) -> Message:
    """The assistant turn as read, behind a user turn."""
    return read({"messages": [HI, {"role": "assistant", **turn}]}).messages[1]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [HI, HELLO]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
        {"conversations": [{"from": "user", "value": "Hi"}, {"from": "bot", "value": "Hello."}]},
        {"conversations": [HI, HELLO]},
        {"messages": [HI, {"role": "model", "content": "Hello."}]},
        {"prompt": "Hi", "response": "Hello."},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, HELLO]},
        {"messages": [HI, {"role": "assistant", "content": [{"type": "text", "text": t} for t in ("Hel", "lo.")]}]},
        {"messages": None, "conversations": [HI, HELLO], "input_ids": None, "text": None},
        {"messages": [HI | {"tool_calls": None, "name": None}, HELLO | {"reasoning_content": None, "value": None}]},
    ],
)
def test_one_conversation_in_many_spellings(row: dict[str, Any]) -> None:
    assert read(row) == Conversation([HI, HELLO])


def test_other_roles_of_sharegpt() -> None:
    turns = [
        {"from": "system", "value": "Be brief."}, {"from": "human", "value": "Time?"},
        {"from": "function_call", "value": '{"name": "get_time", "arguments": "{\\"city\\": \\"Oslo\\"}"}'},
        {"from": "observation", "value": "14:05"}, {"from": "gpt", "value": "Five past two."},
    ]  # fmt: skip
    found = read({"conversations": turns, "tools": json.dumps(TOOLS)})
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.messages[2] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert found.tools == TOOLS
    assert read({"messages": [{"role": "developer", "content": "x"}, HI, HELLO]}).messages[0]["role"] == "system"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_three_names(name: str) -> None:
    assert answered(content="Yes.", **{name: "Hm."}) == HELLO | {"content": "Yes.", "reasoning_content": "Hm."}


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {"function": {"name": "get_time", "arguments": '{"city": "Oslo"}'}},
        {"name": "get_time", "arguments": {"city": "Oslo"}},
        {"type": "function", "function": {"name": "get_time", "arguments": ' {"city":"Oslo"}'}, "id": None},
    ],
)
def test_a_call_is_read_from_objects_and_from_json(call: object) -> None:
    assert answered(content=None, tool_calls=[call]) == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_the_ids_of_calls_are_kept() -> None:
    turns = [HI, {"role": "assistant", "tool_calls": [CALL | {"id": "c1", "index": 0}]},
             {"role": "tool", "content": "14:05", "tool_call_id": "c1", "name": "get_time"}, HELLO]  # fmt: skip
    _, called, told, _ = read({"messages": turns}).messages
    assert called["tool_calls"] == [CALL | {"id": "c1"}]
    assert told == {"role": "tool", "content": "14:05", "name": "get_time", "tool_call_id": "c1"}


def test_what_the_row_says_about_its_last_turn() -> None:
    assert read({"messages": [HI, HELLO], "finish_reason": "length", "generated_by": "m"}) == Conversation(
        [HI, HELLO], ended=False, generated_by="m"
    )
    assert read({"messages": [HI, HELLO], "finish_reason": "stop"}).ended
    assert read({"messages": [HI, HELLO], "finish_reason": None}).ended


def test_reasoning_that_a_limit_ended_has_no_content() -> None:
    assert answered(content=None, reasoning_content="Hm") == HELLO | {"content": "", "reasoning_content": "Hm"}


@pytest.mark.parametrize("text", ["one\u2028line\u0085only", "👩‍👩‍👧‍👦 e\u0301", "", "\ufeff", "\0"])
def test_text_is_taken_as_it_is(text: str) -> None:
    assert as_document({"text": text}) == Text(text)
    assert answered(content=text + ".")["content"] == text + "."


def test_tokens_made_elsewhere() -> None:
    assert as_document({"input_ids": [5, 6], "loss_mask": [0, 1]}) == Tokens([5, 6], [False, True])
    assert as_document({"input_ids": [5, 6]}) == Tokens([5, 6], [True, True])
    assert as_document({"input_ids": [5], "messages": [HI]}) == Tokens([5], [True])


def test_a_system_text_that_is_among_the_turns_too_is_no_loss() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert read({"messages": [system, HI, HELLO], "system": "Be brief."}).messages == [system, HI, HELLO]


def turns(*messages: object) -> dict[str, Any]:
    return {"messages": list(messages)}


PAIR = "\ud83d"  # half of one
KINDS = "none of messages, conversations, prompt and response, text, input_ids"
PARTS = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
REFUSED = [
    ({}, KINDS),
    ({"prompt": "a"}, KINDS),
    ({"text": 5}, KINDS),
    (turns(), "no messages"),
    ({"messages": "Hi"}, "messages is not a list of turns"),
    (turns("Hi", "Hello"), "messages is not a list of turns"),
    (turns(HELLO, HI, HELLO), "starts with the assistant"),
    (turns({"role": "system", "content": "a"}, HELLO), "starts with the assistant"),
    (turns({"role": "system", "content": "a"}), "no user turn"),
    (turns({"role": "tool", "content": "a"}, HI, HELLO), "no user turn"),
    (turns(HI), "no assistant turn"),
    (turns(HI, {"role": "mybot", "content": "Green."}), "unknown role 'mybot'"),
    (turns({"content": "a"}, HELLO), "unknown role None"),
    (turns({"role": "a" * 99, "content": "a"}), "unknown role '" + "a" * 29),
    (turns(HI, {"role": "assistant", "content": None}), "content is not text"),
    (turns(HI, {"role": "assistant"}), "content is not text"),
    (turns({"role": "user", "content": 5}, HELLO), "content is not text"),
    (turns({"role": "user", "content": {"a": 1}}, HELLO), "content is not text"),
    (turns({"role": "user", "content": ["a"]}, HELLO), "content is not text"),
    (turns({"role": "user", "content": [{"type": "text", "text": 1}]}, HELLO), "content is not text"),
    (turns({"role": "user", "content": PARTS}, HELLO), "image, audio or video"),
    (turns({"role": "user", "content": [{"type": "input_audio"}]}, HELLO), "image, audio or video"),
    ({"conversations": [{"from": "human", "value": "<image>"}], "image": "a.png"}, "image, audio or video"),
    (turns(HI, HELLO) | {"images": ["a.png"]}, "image, audio or video"),
    (turns(HI, HELLO | {"reasoning_content": ["a"]}), "reasoning is not text"),
    (turns(HI, HELLO | {"tool_calls": {"name": "a"}}), "tool_calls is not a list"),
    (turns(HI, HELLO | {"tool_calls": ["a"]}), "a tool call has no function name"),
    (turns(HI, HELLO | {"tool_calls": [{"function": {"name": ""}}]}), "a tool call has no function name"),
    ({"conversations": [HI, {"from": "function_call", "value": "call it"}]}, "a tool call has no function name"),
    (turns(HI, HELLO | {"tool_calls": [{"name": "a"}]}), "a tool call's arguments are no object"),
    (turns(HI, HELLO | {"tool_calls": [{"name": "a", "arguments": "{"}]}), "a tool call's arguments are no object"),
    (turns(HI, HELLO) | {"tools": "get_time"}, "tools is not a list of definitions"),
    (turns(HI, HELLO) | {"tools": ["get_time"]}, "tools is not a list of definitions"),
    ({"conversations": [HI, HELLO], "system": "Be brief."}, "system is not among the turns"),
    ({"text": PAIR}, "not valid Unicode"),
    (turns(HI, {"role": "assistant", "content": f"a{PAIR}"}), "not valid Unicode"),
    (turns(HI, HELLO | {"reasoning": PAIR}), "not valid Unicode"),
    (turns(HI, HELLO | {"tool_calls": [{"name": "a", "arguments": '{"x": "\\ud83d"}'}]}), "not valid Unicode"),
    (turns(HI, HELLO) | {"tools": [{"name": PAIR}]}, "not valid Unicode"),
    ({"input_ids": "12"}, "input_ids is not a list of token ids"),
    ({"input_ids": [1, -1]}, "input_ids is not a list of token ids"),
    ({"input_ids": [1, True]}, "input_ids is not a list of token ids"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask is not one 0 or 1 for each token"),
    ({"input_ids": [1], "loss_mask": [2]}, "loss_mask is not one 0 or 1 for each token"),
]


@pytest.mark.parametrize(("row", "reason"), REFUSED)
def test_refusals_name_the_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused) as caught:
        as_document(row)
    assert caught.value.args == (reason,)
