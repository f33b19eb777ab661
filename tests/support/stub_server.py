"""A real HTTP server that answers like vLLM or SGLang, with counts that can be made by hand.

A conversation says itself how it is drafted: the last message "3 0 2" is answered in three verification rounds that
accept 3, 0 and 2 proposals. That makes 1 token of the prefill and 4 + 1 + 3 of the rounds, so the counts do not depend
on the order in which requests arrive. "fail" is answered with HTTP status 500, "garbage" not with JSON.
"""

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROPOSALS = 4
LABELS = 'model_name="a \\"b}, position=\\"7\\" {c\\\\"'  # what a reader of labels may trip over


class HttpServer(ThreadingHTTPServer):
    """Waits for its threads when closed, so that no socket is left."""

    daemon_threads = False
    request_queue_size = 64


@dataclass
class StubServer:
    """``with StubServer("vllm") as server: ... server.url``."""

    dialect: str
    drafter: bool = True
    metrics: bool = True
    meta_info: str = "choice"  # SGLang: where an answer has its counts: choice, top or nowhere
    verify_counter: bool = True  # SGLang: /metrics counts the rounds
    info_path: str = "/server_info"
    models: tuple[str, ...] = ("stub/model",)
    together: int = 1  # answers are held back until so many requests are in flight …
    patience: float = 10.0  # … or for so many seconds; from then on all fail
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(self.together, timeout=self.patience)
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> "StubServer":
        self.http = HttpServer(("127.0.0.1", 0), handler(self))
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()

    def restart(self) -> None:
        """Begin to count at 0."""
        with self.lock:
            self.counts.clear()

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a GET."""
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": name, "owned_by": self.dialect} for name in self.models]})
        if path == "/metrics" and self.metrics:
            return 200, self.metrics_text()
        if path == self.info_path and self.dialect == "sglang":
            counts = self.counts
            average = {"avg_spec_accept_length": 1 + counts["accepted"] / counts["rounds"]} if counts["rounds"] else {}
            algorithm = "DFLASH" if self.drafter else None
            return 200, json.dumps({"speculative_algorithm": algorithm, "internal_states": [average]})
        return 404, json.dumps({"detail": "Not Found"})

    def chat(self, body: dict[str, Any]) -> tuple[int, str]:
        """Status and text of a chat completion, once enough requests are in flight."""
        with self.lock:
            self.bodies.append(body)
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            return 503, f"never {self.together} requests in flight"
        return self.answer(body["messages"][-1]["content"], meta_info=body.get("return_meta_info", False))

    def answer(self, content: str, *, meta_info: bool = False) -> tuple[int, str]:
        """Answer and count, as for one more client."""
        if content == "fail":
            return 500, json.dumps({"error": {"message": "out of memory"}})
        if content == "garbage":
            return 200, "<html>"
        accepted = [int(word) for word in content.split()] if self.drafter else []
        tokens = 1 + sum(accepted) + len(accepted)
        with self.lock:
            engine = self.counts["requests"] % 2
            self.counts.update(requests=1, tokens=tokens, rounds=len(accepted), accepted=sum(accepted))
            self.counts.update({f"drafts {engine}": len(accepted), f"accepted {engine}": sum(accepted)})
            for place in range(PROPOSALS):
                self.counts[f"{place} {engine}"] += sum(count > place for count in accepted)
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": "."}}
        found: dict[str, Any] = {"choices": [choice], "usage": {"completion_tokens": tokens}}
        if meta_info and self.meta_info != "nowhere":
            # As SGLang, which leaves the count out of answers that were not drafted.
            counts = {"spec_verify_ct": len(accepted)} if accepted else {}
            (choice if self.meta_info == "choice" else found)["meta_info"] = {"completion_tokens": tokens, **counts}
        return 200, json.dumps(found)

    def metrics_text(self) -> str:
        """The page as prometheus_client writes it; two engines take turns in vLLM's series."""
        counts, lines = self.counts, ["# HELP python_info Python", 'python_info{version="3.11"} 1.0']
        if self.dialect == "vllm":
            lines += ["# TYPE vllm:num_requests_running gauge", 'vllm:num_requests_running{engine="0"} 0.0']
        for engine in "01" if self.dialect == "vllm" and self.drafter else "":
            labels, name = f'engine="{engine}",{LABELS}', "vllm:spec_decode_num"
            lines += [
                f"# TYPE {name}_drafts_total counter",
                f"{name}_drafts_total{{{labels}}} {counts[f'drafts {engine}']:e}",
                f"{name}_drafts_created{{{labels}}} 1.7e+09",
                f"{name}_draft_tokens_total{{{labels}}} {PROPOSALS * counts[f'drafts {engine}']}.0",
                f"{name}_accepted_tokens_total{{{labels}}} {counts[f'accepted {engine}']}.0",
            ]
            for place in range(PROPOSALS):
                value = counts[f"{place} {engine}"]
                lines.append(f'{name}_accepted_tokens_per_pos_total{{{labels},position="{place}"}} {value}.0')
        if self.dialect == "sglang":
            lines.append(f"sglang:spec_accept_length{{{LABELS}}} 9.9")
        if self.dialect == "sglang" and counts["requests"]:
            lines.append(f"sglang:num_requests_total{{{LABELS}}} {counts['requests']}.0")
            lines.append(f"sglang:generation_tokens_total{{{LABELS}}} {counts['tokens']}.0")
            if self.verify_counter and counts["rounds"]:
                lines.append(f"sglang:spec_verify_calls_total{{{LABELS}}} {counts['rounds']}.0 1700000000000")
        return "\n".join(lines) + "\n"


def handler(stub: StubServer) -> type[BaseHTTPRequestHandler]:
    """The requests of one server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(*stub.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(*(stub.chat(body) if self.path == "/v1/chat/completions" else (404, "")))

        def reply(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
