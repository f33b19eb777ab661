"""Documents to tokens and loss masks, by the target's own chat template.

The loss covers exactly what the target would generate: each assistant turn after its generation prompt, and the token
that ends it (``spans.py`` says where it lies in the rendered text). Its tokens follow exactly the tokens of its prompt,
which is what a server sends, and must read as the template rendered it. A row for which that does not hold is refused
by name.
"""

import json
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from dflash_data.conversation import Conversation, Refused, Text, Tokens
from dflash_data.spans import Renderer, Span
from dflash_model.errors import UserError

TOO_LONG = ("turn", "cut", "drop")
TURNS = ("all", "last")


@dataclass(frozen=True)
class Encoded:
    """One document: token ids, which of them carry loss, and whether it was cut to the longest length."""

    input_ids: list[int]
    loss_mask: list[bool]
    cut: bool


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Applies one tokenizer and its chat template.

    Attributes:
        tokenizer: the target's own.
        options: passed to the template, for example ``enable_thinking=False``.
        max_length: longest document.
        too_long: ``turn`` ends a longer one after the last answer that fits (inside the first, if none does), ``cut``
            at the longest length, ``drop`` refuses it.
        turns: ``all`` assistant turns carry loss, or the ``last``.
        reasoning: whether reasoning carries loss, with the marks around it.
    """

    tokenizer: PreTrainedTokenizerBase
    options: dict[str, Any]
    max_length: int
    too_long: str = "turn"
    turns: str = "all"
    reasoning: bool = True

    def __post_init__(self) -> None:
        for key, value, allowed in (("data.too_long", self.too_long, TOO_LONG), ("data.turns", self.turns, TURNS)):
            if value not in allowed:
                raise UserError(f"{key} is {value!r}; it must be one of {', '.join(allowed)}")

    def __call__(self, document: Conversation | Text | Tokens) -> Encoded:
        """Encode one document.

        An earlier turn carries no loss where the target would not see itself write it: the template drops its
        reasoning once another turn follows, or does not show it behind a generation prompt, or the tokenizer joins it
        with that prompt. The last turn must be exact; what follows it is left out, as nothing answers it. The last turn
        of a row that says ``generated_by`` is the only one with loss: earlier ones are somebody else's words.

        Raises:
            Refused: the reason, in a few words.
            UserError: the tokenizer has no chat template, or one that is no template.
        """
        if isinstance(document, Tokens):
            ids, mask = document.input_ids, document.loss_mask
        elif isinstance(document, Text):
            ids = self._text(document.text)
            mask = [True] * len(ids)
        else:
            ids, mask = self._conversation(document)
        cut = len(ids) > self.max_length
        if cut:
            length = self._cut_at(mask)
            ids, mask = ids[:length], mask[:length]
        if not any(a and b for a, b in pairwise(mask)):
            raise Refused("fewer than two supervised tokens in a row")
        return Encoded(ids, mask, cut)

    def _cut_at(self, mask: list[bool]) -> int:
        if self.too_long == "drop":
            raise Refused("longer than data.seq_len")
        if not any(mask[: self.max_length]):
            raise Refused("the first answer begins beyond data.seq_len")
        if self.too_long == "turn":
            ends = [i + 1 for i in range(self.max_length) if mask[i] and not mask[i + 1]]
            if ends:
                return ends[-1]
        return self.max_length

    def _text(self, text: str) -> list[int]:
        self._check_controls(text)
        ids, end = self._encode(text, special=True), self.tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, cast(int, end)]

    def _conversation(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        said = [conversation.messages, conversation.tools]
        self._check_controls(json.dumps(said, ensure_ascii=False, default=str))
        messages = conversation.messages
        length = max(index for index, message in enumerate(messages) if message["role"] == "assistant") + 1
        ended = conversation.ended or length < len(messages)
        answered = replace(conversation, messages=messages[:length], ended=ended)
        self._check_mode(answered)
        only_last = self.turns == "last" or conversation.generated_by is not None
        return self._tokenize(*self._renderer.spans(answered, only_last=only_last, reasoning=self.reasoning))

    def _check_mode(self, conversation: Conversation) -> None:
        """An answer counts under the options it was given under, such as thinking, or others that ask for the same."""
        given = conversation.template_options
        if given is None or given == self.options:
            return
        if Renderer(self.tokenizer, given).prompt(conversation) != self._renderer.prompt(conversation):
            raise Refused(f"answered under target.template_options {json.dumps(given, sort_keys=True)}")

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self.tokenizer, self.options)

    def _check_controls(self, text: str) -> None:
        """Text that spells a control token would be tokenized as one: a turn could end before its end."""
        if self._renderer.controls.search(text):
            raise Refused("content holds a control token")

    def _tokenize(self, text: str, spans: list[Span]) -> tuple[list[int], list[bool]]:
        """Tokens of each prompt and of the answer behind it.

        Nothing is joined across the special token that ends a turn. What follows one is tokenized behind one, as some
        tokenizers put a blank before the first word of all.
        """
        ids: list[int] = []
        mask: list[bool] = []
        at, lead = 0, ""
        for span in spans:
            prompt = self._encode_behind(lead, text[at : span.begin])
            both = self._encode_behind(lead, text[at : span.end])
            try:
                answer = self._answer(ids, prompt, both, text[span.begin : span.end], last=span is spans[-1])
            except Refused:
                if span is spans[-1]:
                    raise
                prompt, answer = both, []  # as a server sends it when a later turn is asked for
            ids += prompt + answer
            mask += [False] * len(prompt) + [True] * len(answer)
            at, lead = span.end, span.token
        rest = self._encode_behind(lead, text[at:]) if text[at:] else []
        return ids + rest, mask + [False] * len(rest)

    def _answer(self, ids: list[int], prompt: list[int], both: list[int], words: str, *, last: bool) -> list[int]:
        """Tokens of an answer behind ``ids`` and those of its prompt, as the target writes them.

        Tokenized at once, a prompt that ends with a line break and an answer that begins with one may share a token.
        That no server sends: before the last turn they are tokenized apart. An earlier one cannot carry loss then, as
        the prompts of later turns have the shared token.
        """
        joined = both[: len(prompt)] != prompt
        if joined and not last:
            raise Refused("the tokenizer joins a turn with its prompt")
        answer = self._encode(words) if joined else both[len(prompt) :]
        if (not joined and self._reads(answer, [], words)) or self._reads(answer, (ids + prompt)[-1:], words):
            return answer
        raise Refused("the tokenizer joins a turn with its prompt" if joined else "the tokenizer changes the text")

    def _reads(self, ids: list[int], before: list[int], words: str) -> bool:
        """Whether tokens read as a text, up to the Unicode composition that many tokenizers apply.

        Some decoders drop a blank at the start, so it may take the token before to see it.
        """
        decode = cast(Callable[..., str], self.tokenizer.decode)
        said = decode(before + ids, clean_up_tokenization_spaces=False)
        if before:
            said = said.removeprefix(decode(before, clean_up_tokenization_spaces=False))
        return said == words or unicodedata.normalize("NFC", said) == unicodedata.normalize("NFC", words)

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        return cast(list[int], self.tokenizer.encode(text, add_special_tokens=special))

    def _encode_behind(self, lead: str, text: str) -> list[int]:
        """Tokens of a text behind a special token, without that."""
        return self._encode(lead + text)[1 if lead else 0 :]
