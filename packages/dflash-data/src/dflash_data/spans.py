"""Where the turns of a conversation lie in its rendered text.

A turn begins where the conversation rendered up to it, with a generation prompt, ends; that must begin the whole text.
It ends at the template's end-of-turn token, and between the two must stand the row's own words and nothing but what the
template puts around them (``Frame``). Generation markers can only narrow that.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from dflash_data.conversation import Conversation, Message, Refused
from dflash_data.frame import ANSWER, QUESTION, THOUGHT, Frame
from dflash_model.errors import UserError

MARKERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
NO_CONTROL = ("<think>", "</think>")  # some tokenizers call them special; they stand in the middle of a turn
NO_REASONING, NO_CALLS = "the chat template does not show reasoning", "the chat template does not show tool calls"
LONGEST_REASON = 100
ASKED, ANSWERED = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}


@dataclass(frozen=True)
class Span:
    """Characters of the rendered text with loss, and the token that ends their turn; empty if a limit ended it."""

    begin: int
    end: int
    token: str


@dataclass(frozen=True)
class Renderer:
    """Applies a chat template.

    Attributes:
        tokenizer: the target's own.
        options: passed to the template.
    """

    tokenizer: PreTrainedTokenizerBase
    options: dict[str, Any]

    @cached_property
    def controls(self) -> re.Pattern[str]:
        """The special tokens, and those that the template puts around turns; where one begins another, the longer."""
        known, shown = self.tokenizer.added_tokens_decoder.values(), self._plain
        added = [token.content for token in known if token.special or token.content in shown]
        tokens = {*added, *self.tokenizer.all_special_tokens}.difference(NO_CONTROL)  # the latter alone lack most
        return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)")

    @cached_property
    def _plain(self) -> str:
        """A plain conversation as the template shows it; empty if it cannot."""
        turns = [ASKED, ANSWERED, ASKED]
        if not self.tokenizer.chat_template:
            return ""
        try:
            return self._render(turns, Conversation(turns))
        except (Refused, UserError):  # a row that needs the template meets the same error and reports it
            return ""

    def prompt(self, conversation: Conversation) -> str:
        """What the target is to answer with the last turn."""
        return self._render(conversation.messages[:-1], conversation, add_generation_prompt=True)

    def spans(self, conversation: Conversation, *, only_last: bool, reasoning: bool) -> tuple[str, list[Span]]:
        """The rendered conversation, which ends with an assistant turn, and its parts with loss.

        Raises:
            Refused: the last turn has none.
            UserError: the tokenizer has no chat template, or one that is no template.
        """
        messages = conversation.messages
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        text, marks = self._render_marked(conversation, len(turns))
        names = [call["function"]["name"] for message in messages for call in message.get("tool_calls", [])]
        if not all(name in text for name in names):  # the answers would follow a turn without words
            raise Refused(NO_CALLS)
        spans: list[Span] = []
        for index, mark in zip(turns, marks, strict=True):
            last = index == turns[-1]
            if only_last and not last:
                continue
            try:
                span = self._span(text, conversation, index, mark, reasoning=reasoning)
            except Refused:
                if last:
                    raise
                continue
            spans = [*(earlier for earlier in spans if earlier.end <= span.begin), span]
        return text if conversation.ended else text[: spans[-1].end], spans

    def _span(
        self, text: str, conversation: Conversation, index: int, mark: tuple[int, int] | None, *, reasoning: bool
    ) -> Span:
        """The part of an assistant turn that carries loss.

        Raises:
            Refused: the target would not write the turn there, or the template has changed it.
        """
        messages, message, frame = conversation.messages, conversation.messages[index], self._frame(conversation)
        if not any((message["content"].strip(), message.get("reasoning_content"), message.get("tool_calls"))):
            raise Refused("the assistant turn is empty")
        prompt = self._render(messages[:index], conversation, add_generation_prompt=True)
        if not text.startswith(prompt):
            if text.startswith(self._render(messages[:index], conversation)):
                raise Refused("the assistant turn does not begin as the generation prompt does")
            raise Refused("the chat template rewrites earlier turns")
        begin = start = len(prompt)
        for control in self._ends(text, begin, conversation, index):
            words = text[begin : control.start()]
            places = frame.places(words, message)
            if places is not None:
                break
        else:
            hides = message.get("reasoning_content") and frame.opening is None
            raise Refused(NO_REASONING if hides else "the rendered assistant turn differs from its text")
        words_at, answer_at = places
        start += words_at if reasoning else answer_at
        if mark is not None:  # the template's author may have left out more, but nothing of the prompt is generated
            if mark[0] > control.start() or mark[1] < begin:
                raise Refused("the chat template's generation marks miss the assistant turn")
            start = max(start, mark[0])
        elif frame.headless:
            raise Refused("the chat template has no generation prompt")
        if index == len(messages) - 1 and not conversation.ended:  # a limit ended that turn, not the target
            return Span(start, begin + frame.cut_at(words, message), "")
        return Span(start, control.end(), control.group())

    def _ends(self, text: str, begin: int, conversation: Conversation, index: int) -> list[re.Match[str]]:
        """Tokens that may end a turn.

        No text spells one, so it is the first control token, if that is the one by which the template ends turns.
        Otherwise the template puts some inside the turn, or ends it with another, and it must be known how far the turn
        reaches: to the end of the conversation rendered up to and with it.
        """
        end, first = self._frame(conversation).end, self.controls.search(text, begin)
        if first is None or not end:
            raise Refused("the chat template ends the assistant turn with no special token")
        if first.group() == end:
            return [first]
        upto = self._render(conversation.messages[: index + 1], conversation)
        length, found = len(upto.rstrip()), list(self.controls.finditer(upto, begin))
        found = [control for control in found if control.group() == end or control.end() == length]
        if not any(text.startswith(upto[: control.end()]) for control in found):
            raise Refused("the chat template rewrites earlier turns")
        return [control for control in found if text.startswith(upto[: control.end()])]

    @cached_property
    def _frames(self) -> dict[str, Frame]:
        return {}  # by template: a tokenizer may have another for conversations with tools

    def _frame(self, conversation: Conversation) -> Frame:
        """What the template puts around the words of a turn, read from a conversation with known words."""
        template = self._template(conversation)
        if template not in self._frames:
            prompt, _ = self._apply(template, [ASKED], None, add_generation_prompt=True)
            answered, _ = self._apply(template, [ASKED, ANSWERED], None)
            reasoned, _ = self._apply(template, [ASKED, ANSWERED | {"reasoning_content": THOUGHT}], None)
            followed, _ = self._apply(template, [ASKED, ANSWERED, ASKED], None)
            end, tail = self._end(answered.partition(ANSWER)[2], followed.partition(ANSWER)[2])
            frame = Frame.seen(prompt, answered, reasoned, end, tail)
            headless = self._opens_turn(frame.empty) and prompt == self._apply(template, [ASKED], None)[0]
            self._frames[template] = replace(frame, headless=headless)
        return self._frames[template]

    def _opens_turn(self, text: str) -> bool:
        """Whether a control token in a text is followed by a name at once, as in ``<|im_start|>assistant``."""
        return any(text[control.end() : control.end() + 1].isalpha() for control in self.controls.finditer(text))

    def _end(self, after: str, followed: str) -> tuple[str, str]:
        """The token that ends a turn, and what stands before it.

        Some templates close a part of the turn first; some end the whole conversation behind the turn, or begin the
        next. So it is the last token that stands behind the words of a last turn and of an earlier one and does not
        open a turn, or the end-of-text token among them. In some templates they share none.
        """
        found = list(self.controls.finditer(after))
        shared = [control for control in found if followed.startswith(after[: control.end()])]
        shared = [control for control in shared if not after[control.end() : control.end() + 1].isalpha()]
        named = [control for control in shared if control.group() == self.tokenizer.eos_token]
        end = next(iter([*named, *shared[::-1], *found]), None)
        if end is None or after[: found[0].start()].strip():  # words of the template's own are nobody's answer
            return end.group() if end else "", ""
        return end.group(), after[: end.start()]

    def _template(self, conversation: Conversation) -> str:
        if not self.tokenizer.chat_template:
            raise UserError("the target's tokenizer has no chat template; conversations need one")
        try:
            return str(self.tokenizer.get_chat_template(tools=cast(Any, conversation.tools)))
        except ValueError as error:
            raise UserError(f"the target's chat template cannot be chosen: {error}") from error

    def _render(
        self, messages: list[Message], conversation: Conversation, *, add_generation_prompt: bool = False
    ) -> str:
        template, tools = self._template(conversation), conversation.tools
        return self._apply(template, messages, tools, add_generation_prompt=add_generation_prompt)[0]

    def _render_marked(self, conversation: Conversation, turns: int) -> tuple[str, list[tuple[int, int] | None]]:
        """The rendered conversation, and what the template marks as generated of each assistant turn."""
        template = self._template(conversation)
        marked = MARKERS.search(template) is not None
        text, marks = self._apply(template, conversation.messages, conversation.tools, marked=marked)
        if marked and len(marks) != turns:
            raise Refused("the chat template marks another number of turns than there are")
        return text, [*marks] if marked else [None] * turns

    def _apply(
        self, template: str, messages: list[Message], tools: list[dict[str, Any]] | None, *,
        add_generation_prompt: bool = False, marked: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:  # fmt: skip
        render = cast(Callable[..., Any], render_jinja_template)
        # gpt-oss templates call reasoning ``thinking``; transformers 5.24 passes both names, 5.17 does not.
        messages = [
            message | {"thinking": message["reasoning_content"]} if message.get("reasoning_content") else message
            for message in messages
        ]
        try:
            texts, marks = render(
                [messages], tools=tools, chat_template=template, add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=marked, **(self.tokenizer.special_tokens_map | self.options),
            )  # fmt: skip
        except TemplateSyntaxError as error:
            raise UserError(f"the target's chat template is not valid: {error}") from error
        except (TemplateError, TypeError, ValueError) as error:  # it raised one, or cannot use what the row holds
            reason = " ".join(str(error).split())
            raise Refused(f"the chat template refuses it: {reason[:LONGEST_REASON]}") from error
        return texts[0], marks[0] if marked else []
