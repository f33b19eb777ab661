"""What a chat template puts around the words of an assistant turn."""

from dataclasses import dataclass

from dflash_data.conversation import Message

QUESTION, THOUGHT, ANSWER = "1618033988", "2718281828", "3141592653"  # no template changes the case of digits
OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Frame:
    """What stands around the words of a turn behind its generation prompt.

    Attributes:
        end: the token that ends a turn; empty if there is none.
        empty: before the words of a last turn without reasoning; in some templates an empty block of reasoning.
        opening: before reasoning; None if the template leaves reasoning out.
        closing: between reasoning and answer.
    """

    end: str
    empty: str
    opening: str | None
    closing: str

    @classmethod
    def seen(cls, prompt: str, answered: str, reasoned: str, end: str) -> "Frame":
        """Read it from a generation prompt, and from that turn with ANSWER and with THOUGHT and ANSWER."""
        empty, opening, closing = "", None, CLOSE
        if answered.startswith(prompt):
            empty = answered[len(prompt) :].partition(ANSWER)[0]
        if reasoned.startswith(prompt) and THOUGHT in reasoned[len(prompt) :]:
            opening, _, behind = reasoned[len(prompt) :].partition(THOUGHT)
            closing = behind.partition(ANSWER)[0]
        return cls(end, empty, opening, closing)

    def answer_at(self, words: str, message: Message) -> int | None:
        """Where in a rendered turn the answer begins, behind any reasoning; None if the turn is not the message's."""
        reasoning, answer, before = _parts(message)
        names = [call["function"]["name"] for call in message.get("tool_calls", [])]
        if names:
            return self._calls_at(words, reasoning, [answer, *names])
        said = words.rstrip()
        if not said.endswith(answer):
            return None
        front = said[: len(said) - len(answer)]
        if front.strip() and answer.startswith(OPEN):
            return None  # reasoning that was cut, behind another block of it
        known = [before] if before else []
        if not reasoning:
            known += ["", self.empty]
        elif self.opening is not None:
            known.append(self.opening + reasoning + self.closing)
        if _squeeze(front) not in map(_squeeze, known):
            return None
        return len(words) - len(words[len(front) :].lstrip()) if front.strip() else 0

    def _calls_at(self, words: str, reasoning: str, parts: list[str]) -> int | None:
        """How calls are written differs by template; they must name the functions, in order, behind the answer."""
        at = self._reasoning_ends(words, reasoning)
        if at is None:
            return None
        rest = words[at:].lstrip()
        mark = (self.closing if reasoning else self.empty).strip()
        if mark and rest.startswith(mark):
            at = len(words) - len(rest.removeprefix(mark).lstrip())
        begin = at
        for part in parts:
            found = words.find(part, at)
            if found < 0:
                return None
            at = found + len(part)
        return begin

    def _reasoning_ends(self, words: str, reasoning: str) -> int | None:
        begin = words.lstrip()
        opening = next((o for o in ((self.opening or "").strip(), OPEN) if o and begin.startswith(o)), "")
        found = words.find(reasoning, words.index(opening) + len(opening))  # its own mark may spell the reasoning
        return None if found < 0 else found + len(reasoning)

    def cut_at(self, words: str, message: Message) -> int:
        """Where a turn ends that a limit cut: behind its words, or behind its reasoning if it got no further."""
        reasoning, answer, _ = _parts(message)
        if answer or message.get("tool_calls"):
            return len(words)
        return self._reasoning_ends(words, reasoning) or len(words)


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


def _squeeze(text: str) -> str:
    """Without blanks: templates trim them."""
    return "".join(text.split())
