"""What a row of a source is: a conversation, plain text, or tokens; in whichever of the usual spellings.

Nothing here depends on a model. What cannot be used is refused with a few words, under which it is counted.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
SPELLINGS = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "developer": "system",
             "function": "tool", "observation": "tool", "function_call": "assistant"}  # fmt: skip
REASONING = ("reasoning_content", "reasoning", "thinking")
NAMES = (("role", "from"), ("content", "value"))  # OpenAI's and ShareGPT's
SEEN_OR_HEARD = ("image", "audio", "video")
LONGEST_ROLE = 30


class Refused(Exception):
    """A row that cannot be used; ``args[0]`` is the reason under which it is counted."""


@dataclass(frozen=True)
class Conversation:
    """Turns, and what the row says about them.

    Attributes:
        messages: ``role``, ``content`` (text), and where present ``reasoning_content``, ``tool_calls``, ``name``,
            ``tool_call_id``.
        tools: definitions for the chat template.
        ended: whether the last turn was ended by who wrote it, rather than by a limit.
        generated_by: the model that wrote the last turn, if the row says so.
        template_options: what its chat template was given then, if the row says so.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    ended: bool = True
    generated_by: str | None = None
    template_options: dict[str, Any] | None = None


@dataclass(frozen=True)
class Text:
    """Plain text; all of it is supervised."""

    text: str


@dataclass(frozen=True)
class Tokens:
    """Tokens and their loss mask, made elsewhere."""

    input_ids: list[int]
    loss_mask: list[bool]


def as_document(row: dict[str, Any]) -> Conversation | Text | Tokens:
    """Read a row.

    Raises:
        Refused: it is none of the known kinds, or not well formed.
    """
    if row.get("input_ids") is not None:
        return _tokens(row)
    if any(row.get(kind) or row.get(kind + "s") for kind in SEEN_OR_HEARD):
        raise Refused("image, audio or video")
    if row.get("messages") is not None:
        turns = row["messages"]
    elif row.get("conversations") is not None:
        turns = row["conversations"]
    elif isinstance(row.get("prompt"), str) and isinstance(row.get("response"), str):
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
    elif isinstance(row.get("text"), str):
        _check_unicode(row["text"])
        return Text(row["text"])
    else:
        raise Refused("none of messages, conversations, prompt and response, text, input_ids")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise Refused("messages is not a list of turns")
    messages = [_message(turn) for turn in turns]
    _check_turns(messages)
    if row.get("system") and messages[0]["role"] != "system":
        raise Refused("system is not among the turns")  # left out, it would change what is said
    tools = _tools(row.get("tools"))
    _check_unicode(json.dumps([messages, tools], ensure_ascii=False, default=str))
    sampling = _maybe_json(row.get("sampling"))
    options = _maybe_json(sampling.get("template_options")) if isinstance(sampling, dict) else None
    return Conversation(
        messages, tools, ended=row.get("finish_reason") != "length", generated_by=row.get("generated_by"),
        template_options=options if isinstance(options, dict) else None,
    )  # fmt: skip


def _tokens(row: dict[str, Any]) -> Tokens:
    ids, mask = row["input_ids"], row.get("loss_mask")
    mask = [1] * len(ids) if mask is None and isinstance(ids, list) else mask
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise Refused("input_ids is not a list of token ids")
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(flag in (0, 1) for flag in mask):
        raise Refused("loss_mask is not one 0 or 1 for each token")
    return Tokens(ids, [bool(flag) for flag in mask])


def _message(turn: dict[str, Any]) -> Message:
    spelled, content = (turn.get(name) if turn.get(name) is not None else turn.get(other) for name, other in NAMES)
    role = SPELLINGS.get(spelled, spelled) if isinstance(spelled, str) else spelled
    if role not in ROLES:
        raise Refused(f"unknown role {repr(spelled)[:LONGEST_ROLE]}")
    message: Message = {"role": role}
    calls = turn.get("tool_calls") or ()
    if spelled == "function_call":  # ShareGPT has a call as JSON where others have text
        called = _maybe_json(content)
        content, calls = None, called if isinstance(called, list) else [called]
    message["content"] = _content(content)
    thoughts = [turn[name] for name in REASONING if turn.get(name)]
    if thoughts:
        if not isinstance(thoughts[0], str):
            raise Refused("reasoning is not text")
        message["reasoning_content"] = thoughts[0]
    if calls:
        message["tool_calls"] = [_tool_call(call) for call in _listed(calls)]
    for name in ("name", "tool_call_id"):
        if turn.get(name):
            message[name] = turn[name]
    if message["content"] is None:
        if not message.get("tool_calls") and not thoughts:
            raise Refused("content is not text")
        message["content"] = ""  # servers say null beside calls, and where a limit ended the reasoning
    return message


def _content(content: object) -> str | None:
    """Text of a string or of a list of text parts."""
    if isinstance(content, str):
        return content
    if content is None:
        return None
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and any(word in kind for word in SEEN_OR_HEARD):
            raise Refused("image, audio or video")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise Refused("content is not text")
        texts.append(part["text"])
    return "".join(texts)


def _tool_call(call: Any) -> dict[str, Any]:  # noqa: ANN401 - a JSON value
    """A call with its arguments as an object, as templates expect them."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Refused("a tool call has no function name")
    arguments = _maybe_json(function.get("arguments"))
    if not isinstance(arguments, dict):
        raise Refused("a tool call's arguments are no object")
    known = {"id": call["id"]} if call.get("id") else {}
    return {**known, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: object) -> list[dict[str, Any]] | None:
    tools = _maybe_json(tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused("tools is not a list of definitions")
    return tools


def _listed(value: object) -> Iterable[Any]:
    if not isinstance(value, list):
        raise Refused("tool_calls is not a list")
    return value


def _maybe_json(value: Any) -> Any:  # noqa: ANN401 - a JSON value
    """An object that some data sets store as its JSON text (Parquet has one type for a column)."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _check_unicode(text: str) -> None:
    """A lone surrogate parses as JSON and cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused("not valid Unicode") from error


def _check_turns(messages: list[Message]) -> None:
    if not messages:
        raise Refused("no messages")
    first = next((message for message in messages if message["role"] != "system"), messages[0])
    if first["role"] != "user":
        raise Refused("starts with the assistant" if first["role"] == "assistant" else "no user turn")
    if not any(message["role"] == "assistant" for message in messages):
        raise Refused("no assistant turn")
