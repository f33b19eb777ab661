"""Acceptance length and speed of a running SGLang or vLLM server, by its own counts.

Acceptance length is tokens per verification round, the target's own token included, as in class Acceptance: the token
that comes from the prefill counts as neither. Names as read in the servers' sources, not tried on live servers:

- vLLM: counters and 1 + accepted / drafts in `vllm/v1/spec_decode/metrics.py` (SpecDecodingProm), ``owned_by`` in
  `entrypoints/openai/engine/protocol.py`. A last round that runs past the end of the answer counts whole (Acceptance
  cuts it). ``--disable-log-stats`` leaves /metrics without data: a maintainer in vllm issue 11987.
- SGLang, `python/sglang/srt`: ``return_meta_info``, ``choices[].meta_info``, ``owned_by`` in
  `entrypoints/openai/protocol.py`; ``spec_verify_ct`` in `managers/tokenizer_manager.py` or, by version,
  `spec_decoding_meta.py`; counters of finished requests in `observability/metrics_collector.py`;
  ``avg_spec_accept_length`` in `managers/scheduler_components/internal_state.py`, its sums are not exposed; both info
  paths in `entrypoints/http_server.py`. SGLang's own ``spec_accept_length`` counts the prefill's token in (pull request
  3152), so it is larger; the gauge of that name spans the last logging interval only and is not used.
- ``meta_info`` on top of the answer: where `dflash/benchmark.py` (PyPI dflash 0.1.0) looks; found in no SGLang source.
  Which releases lack ``return_meta_info`` or ``sglang:spec_verify_calls_total`` was not traced.
"""

import http.client
import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dflash_model.errors import UserError

JsonObject = dict[str, Any]
PROBE_SECONDS = 10.0
DRAFTS = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos"
TOKENS, REQUESTS, VERIFIED = "sglang:generation_tokens", "sglang:num_requests", "sglang:spec_verify_calls"
FLAGS = {
    "vllm": "start it with --speculative-config, and without --disable-log-stats",
    "sglang": "start it with --speculative-algorithm and --speculative-draft-model-path, and with --enable-metrics",
}
SERIES = re.compile(r"((?:vllm|sglang):\w+)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')


@dataclass(frozen=True)
class AnswerSettings:
    """How every answer is generated."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0  # 0: all tokens, and not sent
    top_p: float = 1.0
    seed: int | None = None
    template_options: JsonObject | None = None


@dataclass(frozen=True)
class Drafting:
    """What the server's counts say about its drafter."""

    acceptance_length: float
    rounds: int | None  # verification rounds behind it; None where the server only tells an average
    position_acceptance: list[float]  # share of rounds that accepted their 1st, 2nd, … proposal; vLLM only, else empty
    source: str  # the names that the acceptance length was read from, and how


@dataclass(frozen=True)
class ServerReport(Drafting):
    """What a server did with the conversations; tokens and speed are those of the answers that came."""

    url: str
    dialect: str
    model: str
    requests: int
    failed: int
    first_failure: str
    completion_tokens: int
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class Answer:
    """One request: tokens and verification rounds as the server tells them, or why there are none."""

    tokens: int = 0
    rounds: int = 0
    failure: str = ""


@dataclass(frozen=True)
class Counters:
    """Series of /metrics by name and position; other labels (engine, rank, model) only split what belongs together."""

    url: str
    values: dict[tuple[str, str], float]

    def since(self, before: "Counters", name: str, position: str = "") -> int:
        """Growth of a counter; one that was not there before began at 0. UserError if it shrank."""
        now, then = self.values.get((name, position), 0.0), before.values.get((name, position), 0.0)
        if now < then:
            change = f"{name} went from {then:g} to {now:g} during the measurement"
            raise UserError(f"server is {self.url}; {change}, so the server was restarted: measure again")
        return round(now - then)


@dataclass(frozen=True)
class Server:
    """Requests to one server, made directly: a proxy on the way would be part of the time."""

    url: str
    timeout_seconds: float

    def text(self, path: str, body: JsonObject | None = None, *, absent: str | None = None) -> str:
        """The answer to a GET, or to a POST of ``body``; ``absent``, if given, stands for HTTP status 404."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        try:
            with closing(kind(parts.netloc, timeout=self.timeout_seconds)) as connection:
                connection.request(method, parts.path + path, content, {"Content-Type": "application/json"})
                response = connection.getresponse()
                status, text = response.status, response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise UserError(
                f"server is {self.url}; {path} cannot be read there: {reason}; is the server up?"
            ) from error
        if status == 404 and absent is not None:
            return absent
        if status != 200:
            said = " ".join(text.split())[:200]
            raise UserError(f"server is {self.url}; {path} answers with HTTP status {status}, not 200: {said}")
        return text

    def parsed(self, path: str, body: JsonObject | None = None, *, absent: str | None = None) -> JsonObject:
        """The same for a JSON object."""
        text = self.text(path, body, absent=absent)
        try:
            found = json.loads(text)
        except json.JSONDecodeError:
            found = None
        if not isinstance(found, dict):
            raise UserError(f"server is {self.url}; {path} answers {text[:80]!r}, which is not a JSON object")
        return found

    def info(self) -> JsonObject:
        """SGLang's account of itself, empty if it gives none."""
        return self.parsed("/server_info", absent="{}") or self.parsed("/get_server_info", absent="{}")

    def counters(self) -> Counters:
        """The ``vllm:`` and ``sglang:`` series of /metrics; none if there is no such page."""
        values: dict[tuple[str, str], float] = {}
        for match in filter(None, map(SERIES.fullmatch, self.text("/metrics", absent="").splitlines())):
            position = POSITION.search(match[2] or "")
            # prometheus_client writes _total behind a counter's name, where the name does not have it already.
            key = (match[1].removesuffix("_total"), position[1] if position else "")
            values[key] = values.get(key, 0.0) + float(match[3])
        return Counters(self.url, values)


def measure_server(
    url: str,
    conversations: Sequence[list[JsonObject]],
    sampling: AnswerSettings,
    *,
    concurrency: int = 1,
    model: str | None = None,
    timeout_seconds: float = 600.0,
    on_done: Callable[[], object] = lambda: None,
) -> ServerReport:
    """Have a server answer conversations, and report what its drafter saved.

    Where the source is /metrics, requests of other clients during the measurement count too: measure an idle server.

    Args:
        url: where the server listens, without /v1.
        conversations: OpenAI messages, without the turn to be generated.
        sampling: how every answer is generated.
        concurrency: requests in flight.
        model: the name to ask for; None: the only one that the server has.
        timeout_seconds: longest wait for the server; a request that exceeds it has failed.
        on_done: called in this thread after each request.

    Raises:
        UserError: an argument is out of range, or the server is unreachable, neither SGLang nor vLLM, without counts of
            drafts, restarted meanwhile, or failed every request.
    """
    _check_arguments(url, len(conversations), sampling.max_new_tokens, concurrency, timeout_seconds)
    server = Server(url.rstrip("/"), timeout_seconds)
    probe = Server(server.url, min(timeout_seconds, PROBE_SECONDS))  # told soon when nobody answers
    before = probe.counters()
    dialect, model = _identify(probe, before, model)
    body: JsonObject = {"model": model, "max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature}
    optional = {"top_k": sampling.top_k, "seed": sampling.seed, "chat_template_kwargs": sampling.template_options}
    body |= {"top_p": sampling.top_p, **{key: value for key, value in optional.items() if value}}
    body |= {"return_meta_info": True} if dialect == "sglang" else {}
    began = time.perf_counter()
    answers = _ask_all(server, [body | {"messages": messages} for messages in conversations], concurrency, on_done)
    seconds = time.perf_counter() - began
    failures = [answer.failure for answer in answers if answer.failure]
    came = [answer for answer in answers if not answer.failure]
    if not came:
        raise UserError(f"all {len(answers)} requests failed, the first: {failures[0]}")
    drafting = _vllm(server, before) if dialect == "vllm" else _sglang(server, before, came)
    tokens = sum(answer.tokens for answer in came)
    return ServerReport(
        **vars(drafting),
        url=server.url,
        dialect=dialect,
        model=model,
        requests=len(answers),
        failed=len(failures),
        first_failure=failures[0] if failures else "",
        completion_tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
    )


def _check_arguments(url: str, conversations: int, tokens: int, concurrency: int, timeout: float) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.rstrip("/").endswith("/v1"):
        raise UserError(f"server is {url!r}; it must be like http://127.0.0.1:8000, without /v1")
    names = ("conversations", "max_new_tokens", "concurrency", "timeout_seconds")
    for name, value in zip(names, (conversations, tokens, concurrency, timeout), strict=True):
        if value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")


def _identify(server: Server, counters: Counters, model: str | None) -> tuple[str, str]:
    """Dialect and model, by what the server answers: who owns its models, or how its metrics are called."""
    cards = server.parsed("/v1/models").get("data") or []
    owners = {str(card.get("owned_by")) for card in cards}
    signs = owners | {name.partition(":")[0] for name, _ in counters.values}
    dialect = "vllm" if "vllm" in signs else "sglang"
    if dialect not in signs:
        found = f"models owned by {', '.join(sorted(owners)) or 'nobody'}, no vllm: or sglang: series on /metrics"
        raise UserError(f"server is {server.url}; it must be a vLLM or SGLang server, but has {found}")
    # Told before hours of requests. vLLM's counters are there from its start, SGLang's from its first request.
    if dialect == "vllm" and (DRAFTS, "") not in counters.values:
        raise UserError(f"server is {server.url} (vLLM); /metrics has no {DRAFTS}; {FLAGS['vllm']}")
    if dialect == "sglang" and not server.info().get("speculative_algorithm", "not told"):
        raise UserError(f"server is {server.url} (SGLang); speculative_algorithm is not set; {FLAGS['sglang']}")
    names = [model] if model else [str(card.get("id")) for card in cards]
    if len(names) != 1:
        raise UserError(f"model is not set and {server.url} has {', '.join(names) or 'none'}; name one")
    return dialect, names[0]


def _ask_all(server: Server, bodies: list[JsonObject], workers: int, on_done: Callable[[], object]) -> list[Answer]:
    pool = ThreadPoolExecutor(workers)
    try:
        futures = [pool.submit(_ask, server, body) for body in bodies]
        for _ in as_completed(futures):
            on_done()
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C waits for what is in flight, not for what is queued
    return [future.result() for future in futures]


def _ask(server: Server, body: JsonObject) -> Answer:
    """One request; what goes wrong is kept for the report, and the others go on."""
    try:
        found = server.parsed("/v1/chat/completions", body)
    except UserError as error:
        return Answer(failure=str(error))
    tokens = (found.get("usage") or {}).get("completion_tokens")
    if tokens is None:
        return Answer(failure=f"server is {server.url}; an answer has no usage.completion_tokens")
    choices = found.get("choices") or [{}]
    meta = choices[0].get("meta_info") or found.get("meta_info") or {}
    return Answer(tokens, meta.get("spec_verify_ct", 0))


def _vllm(server: Server, before: Counters) -> Drafting:
    after = server.counters()
    drafts, accepted = after.since(before, DRAFTS), after.since(before, ACCEPTED)
    if not drafts:
        raise UserError(f"server is {server.url} (vLLM); it verified no draft: {DRAFTS} stood still; {FLAGS['vllm']}")
    positions = sorted((place for name, place in after.values if name == ACCEPTED_AT), key=int)
    shares = [after.since(before, ACCEPTED_AT, place) / drafts for place in positions]
    return Drafting(1 + accepted / drafts, drafts, shares, f"1 + {ACCEPTED} / {DRAFTS}, growth on /metrics")


def _sglang(server: Server, before: Counters, answers: list[Answer]) -> Drafting:
    """By each answer's own count, else by the counters' growth, else the server's average: the source says which."""
    drafted = [answer for answer in answers if answer.tokens > 1]  # a single token is the prefill's: no round
    if not drafted:
        raise UserError(f"server is {server.url} (SGLang); no answer is longer than one token, so nothing was drafted")
    if all(answer.rounds for answer in drafted):
        rounds = sum(answer.rounds for answer in drafted)
        source = "(usage.completion_tokens - 1) / meta_info.spec_verify_ct, sums over the answers"
        return Drafting(sum(answer.tokens - 1 for answer in drafted) / rounds, rounds, [], source)
    after = server.counters()
    if rounds := after.since(before, VERIFIED):
        tokens = after.since(before, TOKENS) - after.since(before, REQUESTS)
        source = f"({TOKENS} - {REQUESTS}) / {VERIFIED}, growth on /metrics: not all answers have spec_verify_ct"
        return Drafting(tokens / rounds, rounds, [], source)
    states = server.info().get("internal_states") or []
    averages = [state["avg_spec_accept_length"] for state in states if state.get("avg_spec_accept_length")]
    lacking = f"not all answers have spec_verify_ct, no growth of {VERIFIED} on /metrics"
    if averages:
        source = f"avg_spec_accept_length of the server since its start, all requests included: {lacking}"
        return Drafting(sum(averages) / len(averages), None, [], source)
    raise UserError(f"server is {server.url} (SGLang); {lacking}, no avg_spec_accept_length; {FLAGS['sglang']}")
