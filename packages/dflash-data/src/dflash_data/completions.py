"""Chat completions of a running OpenAI-compatible server: one request with its retries, and many in flight.

Names as read in the servers' sources, not tried on live servers: SGLang `entrypoints/openai/protocol.py`, vLLM
`entrypoints/openai/chat_completion/protocol.py`. ``max_tokens``, ``chat_template_kwargs`` and ``finish_reason`` are the
same in both; reasoning is ``reasoning_content`` in SGLang and older vLLM, ``reasoning`` in newer.
"""

import http.client
import itertools
import json
import random
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from queue import SimpleQueue
from typing import Any, TypeVar
from urllib.parse import urlsplit

from dflash_model.errors import UserError

JsonObject = dict[str, Any]
Tag = TypeVar("Tag")
Sent = tuple[int, str | None, bytes]  # status, Retry-After, content

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
PROBE_SECONDS = 30.0  # a list of models takes no generation
ENDS = ("stop", "length", "tool_calls")  # other reasons (abort, content_filter, error) are not the model's own
REASONING = ("reasoning_content", "reasoning")
USAGE = ("prompt_tokens", "completion_tokens")


@dataclass(frozen=True)
class Completion:
    """An answer.

    Attributes:
        message: the assistant turn: ``role``, ``content``, and where given ``reasoning_content`` and ``tool_calls``.
        finish_reason: stop, length or tool_calls.
        usage: ``prompt_tokens`` and ``completion_tokens``; None where the server does not tell.
        retries: requests before the one that was answered.
        retokenized: the text is encoded to other tokens than were generated; a server does not show them.
    """

    message: JsonObject
    finish_reason: str
    usage: dict[str, int] | None
    retries: int = 0
    retokenized: bool = False


@dataclass(frozen=True)
class Failure:
    """Why there is no answer, after how many retries."""

    reason: str
    retries: int = 0


class Refused(Exception):
    """The same request would be answered in the same way; ``args[0]`` says how."""


class Unanswered(Exception):
    """The same request may be answered another time; ``args`` are the reason and what Retry-After says."""


@dataclass(frozen=True)
class ChatServer:
    """Requests to one server.

    Attributes:
        url: where it listens, without /v1.
        retries: further requests after one that failed for a reason that may pass.
        timeout_seconds: longest silence of the server; it is silent while it generates.
    """

    url: str
    retries: int
    timeout_seconds: float

    def __post_init__(self) -> None:
        """Refuse what cannot be asked.

        Raises:
            UserError: one sentence with the tool's key and what is allowed.
        """
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.rstrip("/").endswith("/v1"):
            raise UserError(f"server is {self.url!r}; it must be like http://127.0.0.1:8000, without /v1")
        if self.retries < 0:
            raise UserError(f"retries is {self.retries}; it must be 0 or more")
        if self.timeout_seconds <= 0:
            raise UserError(f"request_timeout_seconds is {self.timeout_seconds:g}; it must be above 0")

    def find_model(self, name: str | None) -> str:
        """The model to ask for.

        Raises:
            UserError: the server is unreachable, does not list its models, or not this one, or several without a name.
        """
        try:
            status, _, content = self._send("/v1/models", None, min(PROBE_SECONDS, self.timeout_seconds))
        except Unanswered as error:
            raise UserError(f"server is {self.url}; it cannot be reached: {error.args[0]}; is it up?") from error
        if status != 200:
            raise UserError(f"server is {self.url}; /v1/models answers {_status(status, content)}")
        try:
            served = [str(card["id"]) for card in json.loads(content)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"server is {self.url}; /v1/models is no list of models: {_start(content)}") from error
        if name is None and len(served) != 1:
            raise UserError(f"server_model is not set and {self.url} has {', '.join(served) or 'none'}; name one")
        if name is not None and name not in served:
            raise UserError(f"server_model is {name}; {self.url} has {', '.join(served) or 'none'}")
        return name or served[0]

    def complete(self, body: JsonObject, stopped: threading.Event) -> Completion | Failure:
        """Ask, and ask again with growing pauses while the reason may pass.

        Args:
            body: the request.
            stopped: set when nobody waits for the answer any more; ends a pause.
        """
        retries = 0
        while True:
            try:
                return self._ask(body, retries)
            except Refused as refused:
                return Failure(refused.args[0], retries)
            except Unanswered as unanswered:
                reason, retry_after = unanswered.args
            if retries == self.retries or stopped.wait(pause(retries, retry_after)):
                return Failure(reason, retries)
            retries += 1

    def _ask(self, body: JsonObject, retries: int) -> Completion:
        status, retry_after, content = self._send("/v1/chat/completions", body, self.timeout_seconds)
        if status in (408, 429) or status >= 500:
            raise Unanswered(_status(status, content), retry_after)
        if status != 200:
            raise Refused(_status(status, content))
        return read_completion(content, retries)

    def _send(self, path: str, body: JsonObject | None, timeout: float) -> Sent:
        """A POST of ``body``, or a GET. A connection of its own: a kept one may be closed while the request goes out.

        Raises:
            Unanswered: no connection, silence, or an answer that breaks off.
        """
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        try:
            with closing(kind(parts.netloc, timeout=timeout)) as connection:
                connection.request(method, parts.path.rstrip("/") + path, content, {"Content-Type": "application/json"})
                response = connection.getresponse()
                return response.status, response.getheader("Retry-After"), response.read()
        except TimeoutError as error:
            raise Unanswered(f"no answer within {timeout:g} s", None) from error
        except (OSError, http.client.HTTPException) as error:
            raise Unanswered(str(error) or type(error).__name__, None) from error


def pause(retries: int, retry_after: str | None) -> float:
    """Seconds before the next try: doubling, shortened at random so that many do not come back at once.

    Never less than Retry-After asks for: seconds, or a date (RFC 9110, 10.2.3). One that is neither says nothing.
    """
    backoff = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(retries, 10)) * random.uniform(0.5, 1)
    if retry_after is None:
        return backoff
    if retry_after.strip().isdecimal():
        return max(backoff, float(retry_after))
    try:
        return max(backoff, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return backoff


def read_completion(content: bytes, retries: int) -> Completion:
    """Read the body of an answer.

    Raises:
        Unanswered: it is no chat completion, or the server broke it off.
        Refused: it is empty.
    """
    try:
        found = json.loads(content)
        choice = found["choices"][0]
        said, reason = choice["message"], choice["finish_reason"]
        json.dumps(said, ensure_ascii=False).encode()  # a lone surrogate parses as JSON and cannot be written
        text, calls = said.get("content"), said.get("tool_calls")
        thoughts = next((said[name] for name in REASONING if said.get(name)), None)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Unanswered(f"the answer is no chat completion: {_start(content)}", None) from error
    if not isinstance(text, str | None) or not isinstance(thoughts, str | None) or not isinstance(calls, list | None):
        raise Unanswered(f"the answer's message is malformed: {_start(content)}", None)
    if reason not in ENDS:
        raise Unanswered(f"the answer's finish_reason is {reason!r}, not {', '.join(ENDS)}", None)
    if not text and not thoughts and not calls:
        raise Refused("the answer is empty")
    message: JsonObject = {"role": "assistant", "content": text or ""}  # null beside tool calls or reasoning
    message |= {"reasoning_content": thoughts} if thoughts else {}
    message |= {"tool_calls": calls} if calls else {}
    counts = found.get("usage")
    told = isinstance(counts, dict) and all(isinstance(counts.get(name), int) for name in USAGE)
    return Completion(message, reason, {name: counts[name] for name in USAGE} if told else None, retries)


def answer_all(
    server: ChatServer, requests: Iterable[tuple[Tag, JsonObject]], *, concurrency: int, patience: int
) -> Iterator[tuple[Tag, Completion | Failure]]:
    """Ask many times with ``concurrency`` requests in flight; yields in the order of the answers.

    No more requests are taken than are in flight. Failures before the first answer are held back: if there are
    ``patience`` of them, the server is at fault and not the requests, so none is blamed.

    Raises:
        UserError: the first ``patience`` requests all failed.
    """
    todo: SimpleQueue[tuple[Tag, JsonObject] | None] = SimpleQueue()
    done: SimpleQueue[tuple[Tag, Completion | Failure | Exception]] = SimpleQueue()
    stopped = threading.Event()

    def work() -> None:
        while (request := todo.get()) is not None:
            tag, body = request
            try:
                done.put((tag, server.complete(body, stopped)))
            except Exception as error:  # our own fault: raised again where the answer is awaited
                done.put((tag, error))

    # Daemons: whoever leaves (Ctrl-C, the server is down) does not wait for answers that nobody wants any more.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    try:
        yield from _held_back(_exchange(requests, todo, done, concurrency), server.url, patience)
    finally:
        stopped.set()
        for _ in threads:
            todo.put(None)


def _exchange(
    requests: Iterable[tuple[Tag, JsonObject]],
    todo: "SimpleQueue[tuple[Tag, JsonObject] | None]",
    done: "SimpleQueue[tuple[Tag, Completion | Failure | Exception]]",
    concurrency: int,
) -> Iterator[tuple[Tag, Completion | Failure]]:
    in_flight, left = 0, iter(requests)
    while True:
        for request in itertools.islice(left, concurrency - in_flight):
            todo.put(request)
            in_flight += 1
        if not in_flight:
            return
        tag, result = done.get()
        in_flight -= 1
        if isinstance(result, Exception):
            raise result
        yield tag, result


def _held_back(
    results: Iterator[tuple[Tag, Completion | Failure]], url: str, patience: int
) -> Iterator[tuple[Tag, Completion | Failure]]:
    held: list[tuple[Tag, Completion | Failure]] = []
    for tag, result in results:
        held.append((tag, result))
        if isinstance(result, Completion):
            break
        if len(held) == patience:
            raise UserError(f"server is {url}; the first {patience} requests all failed, the last: {result.reason}")
    yield from held
    yield from results


def _status(status: int, content: bytes) -> str:
    return f"HTTP status {status}: {' '.join(content.decode(errors='replace').split())[:200]}"


def _start(content: bytes) -> str:
    return repr(content[:80].decode(errors="replace"))
