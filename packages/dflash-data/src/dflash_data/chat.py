"""Conversations to tokens and loss masks, by the target's own chat template.

The loss covers exactly what the target would generate: each assistant turn's text and the token that ends it. The
span of a turn is found by rendering the conversation up to the turn with a generation prompt, and up to and with the
turn; both must be prefixes of the whole conversation's tokens, and the span must decode to the turn's text. A
conversation for which that does not hold is refused by name, never masked by guess.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash_model.errors import UserError

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """A tokenizer by folder or hub name.

    Raises:
        UserError: there is none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"no tokenizer at {source}: {str(error).splitlines()[0]}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, generation_prompt: bool, **options: object
) -> list[int]:
    """Tokens of a conversation by the chat template."""
    apply = cast(Callable[..., list[int]], tokenizer.apply_chat_template)
    return apply(messages, add_generation_prompt=generation_prompt, tokenize=True, return_dict=False, **options)


class Refused(Exception):
    """A conversation that cannot be used; ``args[0]`` is the reason under which it is counted."""


class Rewritten(Refused):
    """A turn that the template renders differently once others follow."""


@dataclass(frozen=True)
class Encoded:
    """One document: token ids and which of them carry loss."""

    input_ids: list[int]
    loss_mask: list[bool]
    cut: bool


@dataclass(frozen=True)
class ChatEncoder:
    """Applies one tokenizer's chat template.

    Attributes:
        tokenizer: the target's own.
        options: passed to the template, for example ``enable_thinking=False``.
        max_length: longer conversations are cut at the end.
    """

    tokenizer: PreTrainedTokenizerBase
    options: dict[str, Any]
    max_length: int

    def __call__(self, messages: list[Message], *, ended: bool = True, last_turn_only: bool = False) -> Encoded:
        """Encode one conversation.

        Some templates render a turn differently once another follows (they drop its reasoning). Such an earlier turn
        carries no loss: the target would not see itself write it. The last turn must be exact.

        Args:
            messages: turns with ``role`` and ``content``.
            ended: whether the target itself ended the last turn; if not, its end-of-turn token carries no loss.
            last_turn_only: leave all assistant turns but the last without loss.

        Raises:
            Refused: the reason, in a few words.
        """
        check_messages(messages)
        controls = self.tokenizer.all_special_tokens
        if any(control in message["content"] for message in messages for control in controls):
            raise Refused("content holds a control token")  # it would be tokenized as a real one
        ids = self._render(messages)
        mask = [False] * len(ids)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        for index in turns[-1:] if last_turn_only else turns:
            try:
                begin, end = self._turn_span(messages, index, ids)
            except Rewritten:
                if index == turns[-1]:
                    raise
                continue
            if index == len(messages) - 1 and not ended:
                end -= 1
            mask[begin:end] = [True] * (end - begin)
        cut = len(ids) > self.max_length
        ids, mask = ids[: self.max_length], mask[: self.max_length]
        if not any(a and b for a, b in pairwise(mask)):
            raise Refused("fewer than two supervised tokens in a row")
        return Encoded(ids, mask, cut)

    def _render(self, messages: list[Message], *, generation_prompt: bool = False) -> list[int]:
        return render(self.tokenizer, messages, generation_prompt=generation_prompt, **self.options)

    def _turn_span(self, messages: list[Message], index: int, ids: list[int]) -> tuple[int, int]:
        """First and one-past-last token of an assistant turn, its end-of-turn token included."""
        before = self._render(messages[:index], generation_prompt=True)
        upto = self._render(messages[: index + 1])
        if ids[: len(before)] != before or ids[: len(upto)] != upto:
            raise Rewritten("the chat template rewrites earlier turns")
        special = set(self.tokenizer.all_special_ids)
        end = next((i for i in range(len(upto), len(before), -1) if upto[i - 1] in special), None)
        if end is None:
            raise Refused("the chat template ends the assistant turn with no special token")
        if str(self.tokenizer.decode(upto[len(before) : end - 1])).strip() != messages[index]["content"].strip():
            raise Refused("the rendered assistant turn differs from its text")
        return len(before), end


def check_messages(messages: list[Message]) -> None:
    """Refuse what is no conversation, or has nothing to learn from.

    Raises:
        Refused: the reason.
    """
    if not messages:
        raise Refused("no messages")
    for message in messages:
        if message.get("role") not in ROLES:
            raise Refused(f"unknown role {message.get('role')!r}")
        if not isinstance(message.get("content"), str):
            raise Refused("content is not text")
        if any("\ud800" <= character <= "\udfff" for character in message["content"]):
            raise Refused("content is not valid Unicode")  # a lone surrogate parses as JSON and cannot be encoded
    if messages[0]["role"] == "assistant":
        raise Refused("starts with the assistant")
    if not any(message["role"] == "user" for message in messages):
        raise Refused("no user turn")
    if not any(message["role"] == "assistant" for message in messages):
        raise Refused("no assistant turn")
