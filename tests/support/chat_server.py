"""A real HTTP server with OpenAI's chat completions that misbehaves as each prompt asks it to, and runs over it.

The last message is "name | step step …": the first request for it gets the first step, the second one the second, and
what comes after the last step is answered. A step is an HTTP status or one of STEPS; one with "!" is for ever. The
answer is the name backwards; "think", "ponder", "call", "long" and "silent" in the name shape it (see ``answer``).
Usage is in characters: what the prompt's messages hold, and what the answer's text holds.
"""

import json
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from regenerate import main
from support.stub_server import HttpServer

STEPS = ("slow", "cut", "garbage", "drop", "abort", "empty")
CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"at": "Paris"}'}}


@dataclass
class ChatServer:
    """``with ChatServer() as server: ... server.url``."""

    models: tuple[str, ...] = ("stub/model",)
    together: int = 1  # answers are held back until so many requests are in flight, or one has waited for ``patience``
    patience: float = 10.0
    allowance: int = 1_000_000  # answers that may be given; ``allow`` adds to them
    down: bool = False  # everything but the list of models is answered with 503
    bodies: list[dict[str, Any]] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    most_in_flight: int = 0

    def __post_init__(self) -> None:
        self.in_flight, self.closed = 0, False
        self.change = threading.Condition()
        self.barrier = threading.Barrier(self.together, timeout=self.patience)

    def __enter__(self) -> "ChatServer":
        self.http = HttpServer(("127.0.0.1", 0), handler(self))
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self.change:
            self.closed = True
            self.change.notify_all()
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()

    def allow(self, answers: int) -> None:
        """Let so many more requests be answered."""
        with self.change:
            self.allowance += answers
            self.change.notify_all()

    def wait_answered(self, answers: int) -> None:
        """Return once so many answers are given."""
        with self.change:
            assert self.change.wait_for(lambda: self.answered.total() >= answers, self.patience)

    def drain(self) -> None:
        """Answer what a killed client has asked, and then nothing more."""
        self.allow(1_000_000)
        with self.change:
            assert self.change.wait_for(lambda: self.answered.total() == self.asked.total(), self.patience)
            self.allowance = 0

    def chat(self, body: dict[str, Any]) -> tuple[str, int]:
        """The name of a prompt and its next step's place; returns when the answer may be given."""
        name = body["messages"][-1]["content"]
        with self.change:
            self.bodies.append(body)
            self.asked[name] += 1
            place = self.asked[name] - 1
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self.change.wait_for(lambda: self.closed or self.allowance > 0)
            self.allowance -= 1
        with suppress(threading.BrokenBarrierError):
            self.barrier.wait()
        with self.change:
            self.in_flight -= 1
        return name, place

    def step(self, name: str, place: int) -> str:
        """What to do with a request, "" to answer it."""
        if self.down:
            return "503"
        steps = name.partition(" | ")[2].split()
        if steps and steps[-1].endswith("!"):
            place = min(place, len(steps) - 1)
        return steps[place].rstrip("!") if place < len(steps) else ""

    def outcome(self, step: str, body: dict[str, Any]) -> tuple[int, str, int]:
        """Status, text, and how many of its bytes are left out."""
        assert step in ("", *STEPS) or step.isdecimal(), step
        if step.isdecimal():
            return int(step), json.dumps({"error": {"message": f"told to answer {step}"}}), 0
        if step == "garbage":
            return 200, "<html>", 0
        return 200, json.dumps(self.answer(body, step)), 9 if step == "cut" else 0

    def count(self, name: str) -> None:
        """Take note of an answer that was given."""
        with self.change:
            self.answered[name] += 1
            self.change.notify_all()

    def wait_closed(self) -> None:
        """Return when the server is to end."""
        with self.change:
            self.change.wait_for(lambda: self.closed)

    def answer(self, body: dict[str, Any], reason: str = "") -> dict[str, Any]:
        """A chat completion."""
        name = body["messages"][-1]["content"].partition(" | ")[0]
        text = name[::-1] if reason != "empty" else ""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "tool_calls": None}
        if "think" in name:
            message["reasoning_content"] = "thoughts"  # SGLang
        if "ponder" in name:
            message["reasoning"] = "thoughts"  # newer vLLM
        if "call" in name:
            message |= {"content": None, "tool_calls": [CALL]}
        finish = "length" if "long" in name else "tool_calls" if "call" in name else "stop"
        choice = {"index": 0, "message": message, "finish_reason": "abort" if reason == "abort" else finish}
        counts = {
            "prompt_tokens": sum(len(turn["content"]) for turn in body["messages"]),
            "completion_tokens": len(text),
            "total_tokens": 0,
        }
        return {"object": "chat.completion", "choices": [choice], "usage": None if "silent" in name else counts}


def handler(server: ChatServer) -> type[BaseHTTPRequestHandler]:
    """The requests of one server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = {"data": [{"id": name} for name in server.models]}
            self.reply(200 if self.path == "/v1/models" else 404, json.dumps(found))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/chat/completions":
                self.reply(404, "")
                return
            name, place = server.chat(body)
            step = server.step(name, place)
            if step == "slow":
                server.wait_closed()
            if step not in ("slow", "drop"):
                self.reply(*server.outcome(step, body))
            if not step:
                server.count(name)

        def reply(self, status: int, text: str, missing: int = 0) -> None:
            content = text.encode()
            with suppress(BrokenPipeError, ConnectionResetError):  # who asked may have been killed
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                if status == 429:
                    self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(content[: len(content) - missing])

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


class Job:
    """A file of prompts, and the runs of tools/regenerate.py over it."""

    def __init__(self, folder: Path, server: ChatServer | str, rows: list[Any]) -> None:
        self.prompts, self.out, self.failed = (
            folder / "in.jsonl",
            folder / "out.jsonl",
            folder / "out.jsonl.failed.jsonl",
        )
        full = [{"messages": [{"role": "user", "content": row}]} if isinstance(row, str) else row for row in rows]
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in full))
        self.url = server if isinstance(server, str) else server.url

    def argv(self, **settings: object) -> list[str]:
        """The command."""
        keys = {"prompts": self.prompts, "out": self.out, "server": self.url, "concurrency": 4, **settings}
        return [f"{name}={value}" for name, value in keys.items()]

    def run(self, **settings: object) -> None:
        """Run the tool to its end."""
        assert main(self.argv(**settings)) == 0

    def rows(self) -> list[dict[str, Any]]:
        """What is in the output."""
        return [json.loads(line) for line in self.out.read_bytes().splitlines()]

    def by_line(self) -> dict[int, dict[str, Any]]:
        """Its rows by the line of their prompt, each there once."""
        found = {int(row["regenerated_from"].rpartition(":")[2]): row for row in self.rows()}
        assert len(found) == len(self.rows()), "a prompt is answered twice"
        return found

    def failures(self) -> list[dict[str, Any]]:
        """The list of failures."""
        return [json.loads(line) for line in self.failed.read_text().splitlines()] if self.failed.exists() else []
