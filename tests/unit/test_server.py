"""Measuring a server: lengths, shares and failures equal to hand counts, over real HTTP."""

import socket
from typing import Any

import pytest

from dflash_model import UserError
from dflash_train.server import AnswerSettings, ServerReport, measure_server
from support.stub_server import StubServer

# Rounds accept 3 0 2 | 1 | 0 0 | 4 4: 8 rounds accept 14 proposals, 9 + 3 + 3 + 11 = 26 tokens, 4 of them prefill's.
# Proposal 1 is accepted in 5 rounds (3 2 1 4 4), 2 in 4 (3 2 4 4), 3 in 3 (3 4 4), 4 in 2 (4 4).
TEXTS = ["3 0 2", "1", "0 0", "4 4"]
LENGTH, SHARES = 22 / 8, [5 / 8, 4 / 8, 3 / 8, 2 / 8]


def chats(texts: list[str]) -> list[list[dict[str, Any]]]:
    return [[{"role": "user", "content": text}] for text in texts]


def measure(server: StubServer, texts: list[str] = TEXTS, **settings: Any) -> ServerReport:
    return measure_server(server.url, chats(texts), AnswerSettings(max_new_tokens=16), **settings)


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_counts_of_this_measurement_only(dialect: str, concurrency: int) -> None:
    """16 requests on a server that has answered others and waits until ``concurrency`` of them are in flight."""
    done: list[None] = []
    with StubServer(dialect, together=concurrency) as server:
        for text in ("4 4 4 4", "0", "2 2 2"):
            server.answer(text)
        report = measure(server, TEXTS * 4, concurrency=concurrency, on_done=lambda: done.append(None))
    assert (report.dialect, report.model, report.url) == (dialect, "stub/model", server.url)
    assert (report.requests, report.failed, report.first_failure, len(done)) == (16, 0, "", 16)
    assert (report.completion_tokens, report.rounds, report.acceptance_length) == (4 * 26, 4 * 8, LENGTH)
    assert report.position_acceptance == (SHARES if dialect == "vllm" else [])
    assert report.tokens_per_second == report.completion_tokens / report.seconds
    assert ("growth on /metrics" if dialect == "vllm" else "meta_info.spec_verify_ct") in report.source


@pytest.mark.parametrize("concurrency", [1, 8])
def test_no_more_in_flight_than_asked(concurrency: int) -> None:
    """A server that waits for one more gets none."""
    told = f"all 18 requests failed, .*never {concurrency + 1} requests in flight"
    server = StubServer("vllm", together=concurrency + 1, patience=0.2)
    with server, pytest.raises(UserError, match=told):
        measure(server, ["1"] * 18, concurrency=concurrency)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_what_is_sent(dialect: str) -> None:
    sampling = AnswerSettings(7, 0.5, top_k=20, top_p=0.9, seed=3, template_options={"enable_thinking": False})
    with StubServer(dialect, models=("a", "b")) as server:
        assert measure_server(server.url + "/", chats(["1"]), sampling, model="b").model == "b"
        measure(server, ["1"], model="a")
        first, second = server.bodies
    own = {"return_meta_info": True} if dialect == "sglang" else {}
    options = {"chat_template_kwargs": {"enable_thinking": False}, "top_k": 20, "seed": 3}
    message = {"messages": [{"role": "user", "content": "1"}]}
    assert first == {"model": "b", "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, **options, **message, **own}
    assert second == {"model": "a", "max_tokens": 16, "temperature": 0.0, "top_p": 1.0, **message, **own}


def test_sglang_counts_on_top_of_the_answer() -> None:
    with StubServer("sglang", meta_info="top", metrics=False, info_path="/get_server_info") as server:
        report = measure(server)
    assert (report.acceptance_length, report.rounds) == (LENGTH, 8)


def test_sglang_answer_of_one_token_has_no_round() -> None:
    with StubServer("sglang") as server:
        report = measure(server, ["", *TEXTS])
        assert (report.acceptance_length, report.rounds, report.completion_tokens) == (LENGTH, 8, 27)
        with pytest.raises(UserError, match="no answer is longer than one token"):
            measure(server, [""])


def test_sglang_without_counts_in_the_answers_uses_the_counters_and_says_so() -> None:
    with StubServer("sglang", meta_info="nowhere") as server:
        assert measure(server).acceptance_length == LENGTH  # the counters are not there before the first request
        report = measure(server, ["2"])
    assert (report.acceptance_length, report.rounds) == (3.0, 1)
    assert "growth on /metrics: not all answers have spec_verify_ct" in report.source


@pytest.mark.parametrize("info_path", ["/server_info", "/get_server_info"])
def test_sglang_average_is_the_last_resort_and_says_so(info_path: str) -> None:
    """The average is over the earlier request too: 9 rounds, 22 + 3 tokens."""
    with StubServer("sglang", meta_info="nowhere", verify_counter=False, info_path=info_path) as server:
        server.answer("2")
        report = measure(server)
    assert report.acceptance_length == pytest.approx(25 / 9)
    assert report.rounds is None
    assert "since its start, all requests included" in report.source


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("bad", "reason"), [("fail", "HTTP status 500, not 200: .*out of memory"), ("garbage", "JSON")]
)
def test_failed_requests_are_told_and_do_not_stop_the_others(dialect: str, bad: str, reason: str) -> None:
    with StubServer(dialect) as server:
        report = measure(server, [bad, *TEXTS, bad], concurrency=2)
        with pytest.raises(UserError, match=f"all 2 requests failed, the first: .*{reason}"):
            measure(server, [bad, bad])
    assert (report.requests, report.failed, report.completion_tokens) == (6, 2, 26)
    assert report.acceptance_length == LENGTH
    assert server.url in report.first_failure


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dialect": "vllm", "drafter": False}, "num_drafts; start it with --speculative-config"),
        ({"dialect": "vllm", "metrics": False}, "without --disable-log-stats"),
        ({"dialect": "sglang", "drafter": False}, "is not set; start it with --speculative-algorithm"),
        ({"dialect": "sglang", "meta_info": "nowhere", "metrics": False, "info_path": "/-"}, "with --enable-metrics"),
        ({"dialect": "llamacpp"}, "vLLM or SGLang server, but has models owned by llamacpp"),
        ({"dialect": "vllm", "models": ()}, "model is not set and http.* has none; name one"),
        ({"dialect": "vllm", "models": ("a", "b")}, "has a, b; name one"),
    ],
)
def test_servers_that_cannot_be_measured(settings: dict[str, Any], message: str) -> None:
    with StubServer(**settings) as server, pytest.raises(UserError, match=message) as error:
        measure(server)
    assert server.url in str(error.value)


def test_vllm_that_never_drafts() -> None:
    with StubServer("vllm") as server, pytest.raises(UserError, match="verified no draft"):
        measure(server, [""])


def test_restart_during_the_measurement() -> None:
    with StubServer("vllm") as server:
        server.answer("4 4 4 4")
        with pytest.raises(UserError, match=r"num_drafts went from 4 to 0 .* restarted"):
            measure(server, ["1"], on_done=server.restart)


def test_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(UserError, match=f"server is {url}; .* cannot be read there: .*refused"):
        measure_server(url, chats(TEXTS), AnswerSettings(max_new_tokens=16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "localhost:8000"}, "server is 'localhost:8000'; it must be like http://"),
        ({"url": "http://localhost:8000/v1"}, "without /v1"),
        ({"conversations": []}, "conversations is 0; it must be at least 1"),
        ({"sampling": AnswerSettings(max_new_tokens=0)}, "max_new_tokens is 0"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"timeout_seconds": 0.0}, "timeout_seconds is 0"),
    ],
)
def test_arguments_out_of_range(changes: dict[str, Any], message: str) -> None:
    good = {"url": "http://127.0.0.1:1", "conversations": chats(TEXTS), "sampling": AnswerSettings(max_new_tokens=16)}
    with pytest.raises(UserError, match=message):
        measure_server(**{**good, **changes})
