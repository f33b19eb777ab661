"""Responses by a server over real HTTP: every prompt answered once, whatever the server or a kill does."""

import json
import multiprocessing
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dflash_data.completions as completions
from dflash_data.completions import Completion, answer_all
from dflash_model import UserError
from regenerate import main
from support.chat_server import CALL, ChatServer, Job


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "FIRST_PAUSE_SECONDS", 0.01)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer() as running:
        yield running


def test_rows_are_kept_and_say_how_they_were_made(server: ChatServer, tmp_path: Path) -> None:
    """Everything of the input row, the new last turn, and what was asked for."""
    sent = {"role": "user", "content": "hello"}
    user = {**sent, "weight": 1}
    row = {"id": 7, "usage": "old", "retokenized": True, "messages": [user, {"role": "assistant", "content": "old"}]}
    job = Job(tmp_path, server, [row, "think", "ponder", "long", "silent"])
    options = {"enable_thinking": False}
    job.run(
        temperature=0.5, top_p=0.9, top_k=20, seed=100, max_new_tokens=9, **{"target.template_options": options}
    )  # fmt: skip
    rows = job.by_line()
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "max_new_tokens": 9,
        "template_options": '{"enable_thinking": false}',
    }
    assert rows[1] == {
        "id": 7, "messages": [user, {"role": "assistant", "content": "olleh"}], "finish_reason": "stop",
        "generated_by": "model", "sampling": {**sampling, "seed": 100}, "regenerated_from": f"{job.prompts}:1",
        "usage": {"prompt_tokens": 5, "completion_tokens": 5},
    }  # fmt: skip
    for line, text in ((2, "kniht"), (3, "rednop")):
        turn = {"role": "assistant", "content": text, "reasoning_content": "thoughts"}
        assert rows[line]["messages"][-1] == turn
    assert (rows[4]["finish_reason"], rows[4]["sampling"]["seed"]) == ("length", 103)
    assert "usage" not in rows[5]
    body = next(body for body in server.bodies if body["messages"] == [sent])
    assert body == {
        "model": "stub/model", "messages": [sent], "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 20,
        "min_p": 0.0, "repetition_penalty": 1.0, "seed": 100, "chat_template_kwargs": options,
    }  # fmt: skip


def test_tools_and_their_calls(server: ChatServer, tmp_path: Path) -> None:
    """Arguments of earlier calls go out as JSON text, whichever way the row spells them; the row keeps its own."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {"at": "Rome"}}}
    earlier = [
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "there", "tool_call_id": "a"},
        {"role": "user", "content": "call"},
    ]
    job = Job(
        tmp_path, server, [{"messages": earlier, "tools": tools}, {"messages": earlier, "tools": json.dumps(tools)}]
    )
    job.run()
    for row in job.rows():
        assert row["messages"] == [*earlier, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
        assert (row["finish_reason"], row["sampling"]["seed"]) == ("tool_calls", None)
    for body in server.bodies:
        assert body["tools"] == tools
        assert body["messages"][1]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "Rome"}'}
        assert (body["top_k"], body["max_tokens"]) == (-1, 512)
        assert not {"seed", "chat_template_kwargs"} & body.keys()


@pytest.mark.parametrize("concurrency", [1, 8])
def test_as_many_in_flight_as_asked_and_no_more(concurrency: int, tmp_path: Path) -> None:
    """The server answers none before ``concurrency`` are there."""
    with ChatServer(together=concurrency) as server:
        job = Job(tmp_path, server, [f"q{number}" for number in range(24)])
        job.run(concurrency=concurrency, retries=0)
    assert (len(job.by_line()), server.most_in_flight) == (24, concurrency)
    assert not server.barrier.broken


def test_no_more_prompts_are_read_than_are_in_flight() -> None:
    taken = 0

    def requests() -> Iterator[tuple[int, dict[str, Any]]]:
        nonlocal taken
        for taken in range(1, 101):
            yield taken, {"messages": [{"role": "user", "content": str(taken)}]}

    with ChatServer() as server:
        asked = completions.ChatServer(server.url, 0, 10.0)
        for count, (_, result) in enumerate(answer_all(asked, requests(), concurrency=4, patience=1), 1):
            assert isinstance(result, Completion)
            assert taken <= count + 3
    assert server.answered.total() == 100


def test_what_may_pass_is_tried_again(server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each fault once, and then several on one prompt."""
    names = [f"q | {step}" for step in ("500", "503", "408", "429", "cut", "garbage", "drop", "abort")]
    names.append("q | 500 cut 429 garbage drop")
    job = Job(tmp_path, server, ["fine", *names])
    job.run(concurrency=16)
    assert sorted(job.by_line()) == list(range(1, 11))
    assert server.asked == {"fine": 1, **dict.fromkeys(names[:-1], 2), names[-1]: 6}
    assert set(server.answered.values()) == {1}
    assert "13 retries; 0 failed" in capsys.readouterr().err
    assert not job.failures()


def test_an_answer_that_does_not_come_in_time_is_asked_for_again(server: ChatServer, tmp_path: Path) -> None:
    job = Job(tmp_path, server, ["fine", "q | slow", "p | slow!"])
    job.run(request_timeout_seconds=0.3, retries=2)
    assert sorted(job.by_line()) == [1, 2]
    assert (server.asked["q | slow"] >= 2, server.asked["p | slow!"]) == (True, 3)
    assert [(row["line"], row["reason"]) for row in job.failures()] == [(3, "no answer within 0.3 s")]


def test_what_fails_for_good_is_listed_and_tried_by_the_next_run(
    server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ["400", "404", "empty", "500 500 500", "garbage garbage garbage"]
    lines = ["fine", *(f"q | {step}" for step in steps), {"messages": [{"role": "assistant", "content": "I"}]}]
    job = Job(tmp_path, server, lines)
    with job.prompts.open("a") as file:
        file.write("{\n")
    job.run(retries=2)
    assert sorted(job.by_line()) == [1]
    assert [server.asked[f"q | {step}"] for step in steps] == [1, 1, 1, 3, 3]
    found = {row["line"]: row for row in job.failures()}
    assert {row["file"] for row in found.values()} == {str(job.prompts)}
    expected = [
        "HTTP status 400: .*told to answer 400", "HTTP status 404", "the answer is empty", "HTTP status 500",
        "no chat completion: '<html>'", "starts with the assistant", "not a JSON row",
    ]  # fmt: skip
    assert sorted(found) == [2, 3, 4, 5, 6, 7, 8]
    for line, reason in enumerate(expected, 2):
        assert re.search(reason, found[line]["reason"])
    assert "1 of 8 prompts answered" in (told := capsys.readouterr().err)
    assert "4 retries; 7 failed (" in told
    job.run(retries=2)  # the steps are used up
    assert sorted(job.by_line()) == [1, 2, 3, 4, 5, 6]
    assert server.asked["fine"] == 1
    assert sorted(row["line"] for row in job.failures()) == [7, 8]


def test_nothing_left_to_do(server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, server, ["a", "b | 400"])
    job.run()
    assert job.failures()
    job.run()
    assert not job.failed.exists()
    job.run()
    assert "is complete (2 prompts)" in capsys.readouterr().err
    assert server.asked.total() == 3


@pytest.mark.timeout(60)
def test_killed_at_any_moment_every_prompt_is_answered_once(tmp_path: Path) -> None:
    """SIGKILL after 1, 5, 6 and 17 answers; the second one is made to leave a torn line. Then a run to the end."""
    names = [f"question {number} with ü, \u2028 and €" for number in range(40)]
    context, kills = multiprocessing.get_context("fork"), (1, 4, 1, 11)
    with ChatServer(allowance=0) as server:
        job = Job(tmp_path, server, names)
        for kill, answers in enumerate(kills):
            before, process = server.answered.total(), context.Process(target=main, args=(job.argv(concurrency=3),))
            process.start()
            server.allow(answers)
            server.wait_answered(before + answers)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            assert process.exitcode == -signal.SIGKILL
            server.drain()
            if kill == 1:
                with job.out.open("ab") as file:
                    file.write('{"messages": [{"role": "user", "content": "ü'.encode()[:-1])
        server.allow(1000)
        job.run(concurrency=3)
    found = job.by_line()
    assert [found[line]["messages"] for line in sorted(found)] == [
        [{"role": "user", "content": name}, {"role": "assistant", "content": name[::-1]}] for name in names
    ]
    assert job.out.read_bytes().endswith(b"}\n")
    assert server.answered.keys() == set(names)
    assert server.asked.total() <= len(names) + len(kills) * 3, "more is asked again than was in flight"
    assert not job.failures()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"temperature": 0.5}, "'sampling': {'temperature': 0.0, "),
        ({"max_new_tokens": 9}, "'max_new_tokens': 512"),
        ({"target.path": "org/other"}, "'generated_by': 'model'"),
        ({"target.template_options": "{enable_thinking: false}"}, "'template_options': {}"),
    ],
)
def test_other_settings_are_refused(server: ChatServer, tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    job = Job(tmp_path, server, ["a", "b | 400"])
    job.run()
    with pytest.raises(UserError, match=f"out is {job.out}; it was written with .*{told}.*, and now it is"):
        job.run(**settings)
    job.run(concurrency=1, retries=0, request_timeout_seconds=9)  # these decide nothing
    assert len(job.by_line()) == 2


def test_other_prompts_or_another_output_are_refused(server: ChatServer, tmp_path: Path) -> None:
    job = Job(tmp_path, server, ["a"])
    job.run()
    job.prompts.write_text(job.prompts.read_text().replace("a", "b"))
    with pytest.raises(UserError, match=r"it was written with {'prompts': .* and now it is {'prompts'"):
        job.run()
    job = Job(tmp_path, server, ["a"])
    job.out.write_bytes(job.out.read_bytes() * 2)
    with pytest.raises(UserError, match=r"is no new row of this tool \(.*in.jsonl:1 is answered before\): remove it"):
        job.run()
    (tmp_path / "mine.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"exists without mine.jsonl.settings.json: this tool did not write it"):
        job.run(out=tmp_path / "mine.jsonl")
    assert (tmp_path / "mine.jsonl").read_text() == "{}\n"


def test_usage_is_summed_over_all_runs(server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Characters: "abc" 3 + 3, "de | 400" 8 + 2, "silent" untold; a system turn of 4 before "f" 5 + 1."""
    system = [{"role": "system", "content": "Rule"}, {"role": "user", "content": "f"}]
    job = Job(tmp_path, server, ["abc", "de | 400", "silent", {"messages": system}])
    job.run()
    first = "8 prompt tokens, 4 completion tokens, 1 answers without usage"
    assert f"3 of 4 prompts answered; {first}; 0 answers have other tokens" in capsys.readouterr().err
    job.run()
    second = "16 prompt tokens, 6 completion tokens, 1 answers without usage"
    assert f"4 of 4 prompts answered; {second}; 0 answers" in capsys.readouterr().err


def test_server_that_answers_nothing_stops_the_run_at_once(server: ChatServer, tmp_path: Path) -> None:
    """No row is blamed, and the same command answers all once the server is well."""
    job = Job(tmp_path, server, [f"q{number}" for number in range(60)])
    server.down = True
    with pytest.raises(
        UserError, match=f"server is {server.url}; the first 20 requests all failed, the last: HTTP .*503"
    ):
        job.run(retries=0)
    assert server.asked.total() <= 20 + 4
    assert not job.failures()
    server.down = False
    job.run(temperature=1.0)  # nothing is written yet, so nothing binds
    assert len(job.by_line()) == 60


def test_many_rows_that_fail_again_are_no_reason_to_stop(server: ChatServer, tmp_path: Path) -> None:
    job = Job(tmp_path, server, ["fine", *(f"q{number} | 400!" for number in range(30))])
    job.run(concurrency=1)
    job.run(concurrency=1)
    assert (len(job.by_line()), len(job.failures()), server.asked["fine"]) == (1, 30, 1)


def test_nothing_answered_is_an_error(server: ChatServer, tmp_path: Path) -> None:
    job = Job(tmp_path, server, ["a | 400!", "b | 400!"])
    with pytest.raises(UserError, match=r"none of 2 prompts was answered \(HTTP status 400: 2\); .*failed.jsonl lists"):
        job.run()
    assert sorted(row["line"] for row in job.failures()) == [1, 2]


def test_unreachable(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(UserError, match=f"server is {url}; it cannot be reached: .*refused; is it up?"):
        Job(tmp_path, url, ["a"]).run()
    assert not list(tmp_path.glob("out*"))


def test_model_is_the_only_one_or_named(tmp_path: Path) -> None:
    with ChatServer(models=("org/a", "b")) as server:
        job = Job(tmp_path, server, ["x"])
        with pytest.raises(UserError, match=r"server_model is not set and http.* has org/a, b; name one"):
            job.run()
        with pytest.raises(UserError, match=r"server_model is c; http.* has org/a, b"):
            job.run(server_model="c")
        job.run(server_model="org/a", **{"target.path": "somewhere/not-on-this-machine"})
    assert server.bodies[0]["model"] == "org/a"
    assert job.rows()[0]["generated_by"] == "not-on-this-machine"
