"""Let the target answer prompts: python tools/regenerate.py target.path=T prompts=in.jsonl out=out.jsonl [server=URL]

With a server (SGLang, vLLM, any with OpenAI's chat completions) nothing is loaded here, otherwise the target is. The
same command again continues where it was stopped, and tries rows again that failed (OUT.failed.jsonl lists them).
"""

import fcntl
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from dflash_data.chat import load_tokenizer
from dflash_data.completions import USAGE, ChatServer, Completion, Failure, answer_all
from dflash_data.grouped import use_grouped_attention
from dflash_data.regenerate import KEY, Decoding, LocalTarget, Marks, Prompt, Row, digest, read_prompt
from dflash_data.sources import check_sources, read_raw, read_rows
from dflash_data.target import find_target
from dflash_model import Sampling, UserError
from dflash_train.cli import parse, run_tool
from dflash_train.config import TargetSection, key
from dflash_train.job import dtype_of

PATIENCE = 20  # requests that fail before any is answered: then it is the server, not the rows
Answers = Generator[tuple[Prompt, Completion | Failure], None, None]


@dataclass
class RegenerateConfig:
    """One pass over a file of prompts."""

    config: str = key("", "YAML file that the other keys override")
    target: TargetSection = field(default_factory=TargetSection)
    prompts: list[str] = key([], "conversations, in whatever tools/prepare.py reads; a last assistant turn is replaced")
    out: str = key("", "JSONL file to write; an existing one is continued")
    max_new_tokens: int = key(512, "longest response")
    temperature: float = key(0.0, "divides the logits; 0 takes the most likely token")
    top_p: float = key(1.0, "sample from the most likely tokens that reach this probability")
    top_k: int = key(0, "sample from the k most likely tokens; 0 for all")
    seed: int | None = key(None, "of the sampling; row i uses seed + i")
    batch_tokens: int = key(
        16384, "without a server: tokens decoded together, rows times the longest prompt and max_new_tokens"
    )
    server: str = key("", "let the OpenAI-compatible server at this URL answer (http://127.0.0.1:30000)")
    server_model: str | None = key(None, "model to ask the server for; default: its only one")
    concurrency: int = key(64, "requests in flight at the server")
    retries: int = key(5, "further requests after one that failed for a reason that may pass")
    request_timeout_seconds: float = key(600.0, "longest silence of the server, which is silent while it generates")


@dataclass(frozen=True)
class Writer:
    """Who answers: its name for ``generated_by``, what else of it decides the responses, and prompts to answers.

    ``answer`` also takes how many requests may fail before any is answered.
    """

    name: str
    settings: dict[str, Any]
    answer: Callable[[Iterator[Prompt], int], Answers]


def main(argv: list[str]) -> int:
    """Continue where an earlier run of the same command stopped; tell what it cost and what failed."""
    config = parse(RegenerateConfig, argv, __doc__ or "")
    decoding = check(config)
    paths = check_sources("prompts", config.prompts)
    if len(set(paths)) != len(paths):
        raise UserError(f"prompts names a file twice ({', '.join(config.prompts)}); name each once")
    content = [[str(path), digest(path)] for path in paths]  # answers are found again by their line in it
    writer = by_server(config, decoding) if config.server else by_model(config, decoding)
    settings = {
        "prompts": content,
        "generated_by": writer.name,
        **writer.settings,
        **asdict(decoding),
    }
    total = sum(1 for _ in read_raw(paths))
    if not total:
        raise UserError(f"prompts ({', '.join(config.prompts)}) has no rows")
    with closing(Output(Path(config.out), settings)) as output:
        if output.rows == total:
            print(f"{config.out} is complete ({total} prompts); remove it to redo it", file=sys.stderr)
            return 0
        with tqdm(total=total, initial=output.rows, unit="prompt") as bar:
            pass_over(paths, writer, decoding, output, bar)
        print(output.finish(total), file=sys.stderr)
    return 0


def check(config: RegenerateConfig) -> Decoding:
    """How responses are generated.

    Raises:
        UserError: a key is out of range.
    """
    if not config.out:
        raise UserError("out is not set; it takes the JSONL file to write")
    for name in ("max_new_tokens", "batch_tokens", "concurrency"):
        if getattr(config, name) < 1:
            raise UserError(f"{name} is {getattr(config, name)}; it must be at least 1")
    sampling = Sampling(temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, seed=config.seed)
    return Decoding(sampling, config.max_new_tokens, config.target.template_options)


def by_server(config: RegenerateConfig, decoding: Decoding) -> Writer:
    """A server's model; target.path is only a name then."""
    server = ChatServer(config.server.rstrip("/"), config.retries, config.request_timeout_seconds)
    model = server.find_model(config.server_model)

    def answer(prompts: Iterator[Prompt], patience: int) -> Answers:
        requests = ((prompt, prompt.request(model, decoding)) for prompt in prompts)
        yield from answer_all(server, requests, concurrency=config.concurrency, patience=patience)

    return Writer(Path(config.target.path or model).name, {"server_model": model}, answer)


def by_model(config: RegenerateConfig, decoding: Decoding) -> Writer:
    """The target on this machine, loaded once there is something to answer."""
    target, dtype = find_target(config.target.path, None), dtype_of("target.dtype", config.target.dtype)
    folder, name = target.location, config.target.tokenizer

    def answer(prompts: Iterator[Prompt], _: int) -> Answers:
        first = next(prompts, None)
        if first is None:
            return
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
        model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        use_grouped_attention(model)
        tokenizer = load_tokenizer(name or folder, decoding.template_options)
        local = LocalTarget(model, tokenizer, decoding.template_options)
        yield from local.answer_all(chain([first], prompts), decoding, config.batch_tokens)

    return Writer(target.name, {"target": str(folder), "tokenizer": name, "dtype": config.target.dtype}, answer)


def pass_over(paths: list[Path], writer: Writer, decoding: Decoding, output: "Output", bar: "tqdm[Any]") -> None:
    """Have every row answered that is not yet, and write each answer as it comes.

    Raises:
        UserError: the server fails from the start.
    """
    tokens, began = 0, time.monotonic()

    def pending() -> Iterator[Prompt]:
        for number, source in enumerate(read_rows(paths)):
            if (source.file, source.line) in output.done:
                continue
            prompt = read_prompt(source, number)
            if isinstance(prompt, Prompt):
                yield prompt
            else:
                output.fail(source.file, source.line, prompt, asked=False)
                bar.update()

    with closing(writer.answer(pending(), PATIENCE + output.failed_before)) as answers:
        for prompt, result in answers:
            if isinstance(result, Completion):
                output.add(prompt.answered(result, decoding, writer.name), result.retries)
                tokens += (result.usage or {}).get("completion_tokens", 0)
            else:
                output.fail(prompt.file, prompt.line, result)
            speed = tokens / (time.monotonic() - began)
            bar.set_postfix_str(f"{speed:.0f} tokens/s, {output.failed.total()} failed", refresh=False)
            bar.update()


class Output:
    """The answered rows, which say themselves what is done; beside them the settings, and the rows that failed.

    A row is one append: whatever kills the job leaves whole rows and at most one torn line at the end. That line is cut
    off, and its prompt asked again.

    Attributes:
        done: the prompts that are answered.
        rows: how many these are.
        counts: sums over them: usage, answers without usage, retokenized answers.
        retries: in this run.
        failed: reasons without their details, in this run.
        failed_before: requests that failed in the last run.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Open or create; find what is done.

        Raises:
            UserError: it was not written by this tool with these settings, or another run writes it.
        """
        self.path, self.done, self.rows, self.retries = path, Marks(), 0, 0
        self.counts, self.failed = Counter[str](), Counter[str]()
        self.failures = path.with_name(path.name + ".failed.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._check_settings(json.loads(json.dumps(settings)))
        with ExitStack() as on_error:
            self._file = on_error.enter_context(path.open("ab"))
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it when the job is killed
            except OSError as error:
                raise UserError(f"out is {path}; another run writes it, or it cannot be locked ({error})") from error
            self._read()
            on_error.pop_all()
        # Their requests are tried first, and may fail again however well the server is.
        self.failed_before = self.failures.read_bytes().count(b'"asked": true') if self.failures.is_file() else 0

    def _check_settings(self, settings: dict[str, Any]) -> None:
        path = self.path.with_name(self.path.name + ".settings.json")
        if not self.path.exists() or not self.path.stat().st_size:
            partial = path.with_name(path.name + ".partial")
            partial.write_text(json.dumps(settings, indent=2) + "\n")
            partial.replace(path)
            return
        if not path.is_file():
            raise UserError(f"out is {self.path}; it exists without {path.name}: this tool did not write it, remove it")
        known = json.loads(path.read_text())
        other = {name: known.get(name) for name, value in settings.items() if known.get(name) != value}
        if other:
            now = {name: settings[name] for name in other}
            raise UserError(f"out is {self.path}; it was written with {other}, and now it is {now}: remove it first")

    def _read(self) -> None:
        size = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    os.truncate(self.path, size)
                    break
                size += len(line)
                try:
                    self._count(json.loads(line))
                except (ValueError, LookupError, TypeError, AttributeError) as error:
                    raise UserError(f"{self.path}:{number} is no new row of this tool ({error}): remove it") from error

    def _count(self, row: Row) -> None:
        file, _, line = row[KEY].rpartition(":")
        if (file, int(line)) in self.done:
            raise ValueError(f"{row[KEY]} is answered before")
        self.done.add(file, int(line))
        self.rows += 1
        usage = row.get("usage")
        self.counts.update({name: usage[name] for name in USAGE} if usage else {"untold": 1})
        self.counts["retokenized"] += "retokenized" in row

    def add(self, row: Row, retries: int) -> None:
        """Append one answered row."""
        self._count(row)
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.retries += retries

    def fail(self, file: str, line: int, failure: Failure, *, asked: bool = True) -> None:
        """List a row that has no answer; the list is of this run."""
        row = {"file": file, "line": line, "reason": failure.reason, "asked": asked, "retries": failure.retries}
        with self.failures.open("a" if self.failed else "w") as names:
            names.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.failed[failure.reason.partition(":")[0]] += 1
        self.retries += failure.retries

    def finish(self, total: int) -> str:
        """What it came to; the list of failures goes if there are none.

        Raises:
            UserError: nothing is answered.
        """
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self.failed.most_common(3))
        if not self.rows:
            raise UserError(f"none of {total} prompts was answered ({reasons}); {self.failures} lists them")
        if not self.failed:
            self.failures.unlink(missing_ok=True)
        told = (
            f"{self.path}: {self.rows} of {total} prompts answered; {self.counts['prompt_tokens']} prompt tokens,"
            f" {self.counts['completion_tokens']} completion tokens, {self.counts['untold']} answers without usage;"
            f" {self.counts['retokenized']} answers have other tokens once encoded; {self.retries} retries;"
            f" {self.failed.total()} failed"
        )
        return told + (f" ({reasons}), listed in {self.failures}" if self.failed else "")

    def close(self) -> None:
        """Release the file."""
        self._file.close()


if __name__ == "__main__":
    run_tool(main)
