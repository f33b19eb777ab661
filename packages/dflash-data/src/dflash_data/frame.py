"""What a chat template puts around the words of an assistant turn."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dflash_data.conversation import Message

QUESTION, THOUGHT, ANSWER = "1618033988", "2718281828", "3141592653"  # no template changes the case of digits
OPEN, CLOSE = "<think>", "</think>"
BLANKS = re.compile(r"\s*")


@dataclass(frozen=True)
class Frame:
    """What stands around the words of a turn behind its generation prompt.

    Attributes:
        end: the token that ends a turn; empty if there is none.
        empty: before the words of a last turn without reasoning; in some templates an empty block of reasoning.
        opening: before reasoning; None if the template leaves reasoning out.
        closing: between reasoning and answer.
        tail: between answer and ``end``.
        opened: whether the generation prompt opens a block of reasoning.
        headless: whether there is no generation prompt: the target would write the turn's header itself.
    """

    end: str
    empty: str
    opening: str | None
    closing: str
    tail: str
    opened: bool
    headless: bool = False

    @classmethod
    def seen(cls, prompt: str, answered: str, reasoned: str, end: str, tail: str) -> "Frame":
        """Read it from a generation prompt, and from that turn with ANSWER and with THOUGHT and ANSWER."""
        empty, opening, closing = "", None, ""
        if answered.startswith(prompt):
            empty = answered[len(prompt) :].partition(ANSWER)[0]
        if reasoned.startswith(prompt) and THOUGHT in reasoned[len(prompt) :]:
            opening, _, behind = reasoned[len(prompt) :].partition(THOUGHT)
            closing = behind.partition(ANSWER)[0]
        return cls(end, empty, opening, closing, tail, opened=prompt.rstrip().endswith(OPEN))

    def places(self, words: str, message: Message) -> tuple[int, int] | None:
        """Where in a rendered turn the message's own words begin, and where its answer does, behind any reasoning.

        An empty block of reasoning that only the template wrote is nobody's words: the target would reason there, or
        find the block in its prompt. Templates trim, so blanks are compared nowhere but inside the answer.

        Returns:
            None if the turn is not the message's.
        """
        _, answer, _ = _parts(message)
        names = [call["function"]["name"] for call in message.get("tool_calls", [])]
        for front, own in self._fronts(message):
            at = _skip(words, front)
            # Reasoning that was cut has no end by which to tell it: a block of it behind another one was never written.
            if at is None or (CLOSE in front and answer.startswith(OPEN)):
                continue
            if self._says(words[at:].strip(), answer, names):
                behind = at + self._blanks(words, at) if CLOSE in front or message.get("reasoning_content") else 0
                return 0 if own else behind, behind
        return None

    def _blanks(self, words: str, at: int) -> int:
        """How many of the blanks behind a block of reasoning are the template's; further ones are the answer's own."""
        own = {front[len(front.rstrip()) :] for front in (self.closing, self.empty)}
        return max((len(blanks) for blanks in own if words.startswith(blanks, at)), default=0)

    def _fronts(self, message: Message) -> Iterator[tuple[str, bool]]:
        """What may stand before an answer, and whether it is more than the template's empty block of reasoning."""
        reasoning, _, written = _parts(message)
        if written:
            yield written, True
        if written and self.opened:
            yield written.partition(OPEN)[2], True
        if written and CLOSE not in self.empty:
            yield self.empty + written, True
        if not reasoning:
            yield self.empty, bool(written) or CLOSE not in self.empty
            yield "", True
        elif self.opening is not None:
            yield self.opening + reasoning + self.closing, True
            if message.get("tool_calls"):
                yield self.opening + reasoning, True  # some close it otherwise before a call

    def cut_at(self, words: str, message: Message) -> int:
        """Where a turn ends that a limit cut: behind its words, or behind its reasoning if it got no further."""
        reasoning, answer, written = _parts(message)
        if answer or message.get("tool_calls"):
            return len(words.removesuffix(self.tail))
        behind = None if written else _skip(words, (self.opening or "") + reasoning)
        return len(words.rstrip()) if behind is None else behind

    def _says(self, words: str, answer: str, names: list[str]) -> bool:
        """Whether a text is the answer; with calls, whether it begins with it and then names the functions, in order.

        How calls are written differs by template.
        """
        tail = self.tail.strip()
        if not names:
            return words.endswith(tail) and words.removesuffix(tail).rstrip() == answer
        if not words.startswith(answer):
            return False
        at = len(answer)
        for name in names:
            found = words.find(name, at)
            if found < 0:
                return False
            at = found + len(name)
        return True


def _parts(message: Message) -> tuple[str, str, str]:
    """Reasoning and answer of a message, and how its content writes the reasoning, if it does.

    Many rows have the reasoning inside the content. Some templates take it out and write it their way, others leave it.
    """
    content, reasoning = message["content"].strip(), message.get("reasoning_content", "").strip()
    thought, close, answer = content.partition(CLOSE)
    lead, _, inner = thought.rpartition(OPEN)
    if reasoning or not close or CLOSE in answer or lead.strip():
        return reasoning, content, ""
    return inner.strip(), answer.strip(), thought + close


def _skip(words: str, front: str) -> int | None:
    """Where in a text another one that begins it ends, whatever blanks there are; None if it does not begin it."""
    at = 0
    for piece in front.split():
        at = BLANKS.match(words, at).end()  # type: ignore[union-attr] - it matches anything
        if not words.startswith(piece, at):
            return None
        at += len(piece)
    return at
