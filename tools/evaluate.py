"""Measure a drafter by drafting: python tools/evaluate.py drafter.path=DIR target.path=NAME prompts=file.jsonl

Answers every prompt with the real cached loop, beside it the replay evaluation that training uses, and the same loop
without drafting. With decode=false nothing is decoded: the answers that the rows hold are replayed, with one target
forward a row (tools/regenerate.py writes the target's own). With server=URL a running SGLang or vLLM answers the
prompts instead, and tells its own counts; given a drafter.path too, both numbers stand side by side. The last line is
one JSON object.
"""

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash_data.chat import render
from dflash_data.conversation import Refused, as_document
from dflash_data.encoder import Encoder
from dflash_data.ends import FrozenEnds
from dflash_data.regenerate import Failure, Prompt, read_prompt, stop_token_ids
from dflash_data.sources import check_sources, read_rows
from dflash_model import Drafter, Generation, Sampling, UserError, generate
from dflash_model.compare import first_divergence
from dflash_model.layout import to_published
from dflash_model.taps import context_features, text_config
from dflash_train.acceptance import Acceptance, Rounds
from dflash_train.cli import parse, run_tool
from dflash_train.config import TargetSection, key
from dflash_train.evaluate import evaluate_text
from dflash_train.server import AnswerSettings, ServerReport, measure_server
from dflash_train.step import DraftStep
from evaluate_report import finite, print_local, print_replay, summary
from generate import DrafterPath, describe_divergence, load_pair

CHUNK_ROWS = 1024


@dataclass
class EvaluateConfig:
    """One pass over a file of prompts."""

    config: str = key("", "YAML file that the other keys override")
    drafter: DrafterPath = field(default_factory=DrafterPath)
    target: TargetSection = field(default_factory=TargetSection)
    prompts: list[str] = key([], "JSONL files with messages; a last assistant turn is left out")
    limit: int = key(0, "use only so many prompts, evenly from all of them; 0 for all")
    max_new_tokens: int = key(256, "longest answer")
    temperatures: list[float] = key([0.0], "one evaluation at each; 0 is greedy")
    top_k: int = key(0, "sample from the k most likely tokens; 0 for all")
    top_p: float = key(1.0, "sample from the most likely tokens that reach this probability")
    seed: int = key(0, "of the sampling; prompt i uses seed + i")
    decode: bool = key(True, "false: replay the answers that the rows hold instead")
    compare: bool = key(True, "answer without drafting too: speed-up and equal texts")
    server: str = key("", "measure the SGLang or vLLM server at this URL (http://127.0.0.1:30000)")
    server_model: str | None = key(None, "model to ask the server for; default: its only one")
    concurrency: list[int] = key([1, 8, 32], "requests in flight at the server, one measurement each")


@dataclass(frozen=True)
class Bench:
    """Everything the local loops need.

    Attributes:
        config: the settings.
        drafter: the drafter.
        target: its target.
        tokenizer: the target's.
        rows: the conversations.
    """

    config: EvaluateConfig
    drafter: Drafter
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rows: list[Prompt]

    def prompt(self, row: Prompt) -> list[int]:
        """Tokens up to the turn that is to be generated."""
        options = self.config.target.template_options
        return render(self.tokenizer, row.messages, generation_prompt=True, tools=row.tools, **options)

    def answer(self, who: Drafter | None, ids: list[int], temperature: float, seed: int) -> Generation:
        """One text."""
        config = self.config
        return generate(
            who, self.target, ids, max_new_tokens=config.max_new_tokens,
            sampling=Sampling(temperature=temperature, top_k=config.top_k, top_p=config.top_p, seed=seed),
            stop_token_ids=stop_token_ids(self.target, self.tokenizer),
        )  # fmt: skip

    def replay(self, ids: list[int], mask: list[bool]) -> Rounds:
        """The rounds that the training job's evaluation finds in a text."""
        embed, head = self.target.get_input_embeddings(), self.target.get_output_embeddings()
        ends = FrozenEnds(embed.weight, head.weight)  # type: ignore[union-attr, arg-type]
        step = DraftStep(self.drafter, ends, self.target.dtype, CHUNK_ROWS, sparse=False)
        return evaluate_text(step, context_features(self.target, ids, self.drafter.config.target_layer_ids), ids, mask)


def read_prompts(config: EvaluateConfig) -> list[Prompt]:
    """The conversations to answer; rows that are none are counted on stderr.

    Raises:
        UserError: there are none, or a setting is out of range.
    """
    for name, wrong in (
        ("limit", config.limit < 0), ("max_new_tokens", config.max_new_tokens < 1),
        ("temperatures", not config.temperatures),
        ("concurrency", not config.concurrency or min(config.concurrency) < 1),
    ):  # fmt: skip
        if wrong:
            raise UserError(f"{name} is {getattr(config, name)}; it is out of range (--help says what it takes)")
    for temperature in config.temperatures:
        Sampling(temperature=temperature, top_k=config.top_k, top_p=config.top_p)
    rows: list[Prompt] = []
    unusable: list[str] = []
    for number, source in enumerate(read_rows(check_sources("prompts", config.prompts))):
        found = read_prompt(source, number)
        if isinstance(found, Failure):
            unusable.append(f"{source.file}:{source.line}: {found.reason}")
        else:
            rows.append(found)
    if unusable:
        print(f"{len(unusable)} rows are no prompts, the first: {unusable[0]}", file=sys.stderr)
    if not rows:
        raise UserError(f"prompts ({', '.join(config.prompts)}) has no row with messages")
    count = min(config.limit or len(rows), len(rows))  # files are often sorted by domain
    return [rows[index * len(rows) // count] for index in range(count)]


@dataclass
class Answers:
    """What the loops said, prompt by prompt.

    Attributes:
        drafted: with the drafter.
        plain: without it, if asked for.
        loop: the drafted texts' rounds.
        replayed: the rounds that the replay finds in them; for greedy texts.
        divergences: where greedy texts with and without drafting part.
    """

    drafted: list[Generation] = field(default_factory=list)
    plain: list[Generation] = field(default_factory=list)
    loop: list[Rounds] = field(default_factory=list)
    replayed: list[Rounds] = field(default_factory=list)
    divergences: list[str] = field(default_factory=list)


def answer_all(bench: Bench, temperature: float) -> Answers:
    """Every prompt with the loop, its replay beside it, and the loop without drafting."""
    answers, compare = Answers(), bench.config.compare
    for who in (bench.drafter, None):  # kernels are loaded and memory is found before the clock counts
        bench.answer(who, bench.prompt(bench.rows[0])[:16], temperature, 0)
    for number, row in enumerate(tqdm(bench.rows, unit="prompt", desc=f"temperature {temperature:g}")):
        ids, seed = bench.prompt(row), bench.config.seed + number
        result = bench.answer(bench.drafter, ids, temperature, seed)
        answers.drafted.append(result)
        answers.loop.append(Rounds.of(result, len(ids)))
        if temperature == 0:
            mask = [False] * len(ids) + [True] * len(result.token_ids)
            answers.replayed.append(bench.replay([*ids, *result.token_ids], mask))
        if compare:
            answers.plain.append(bench.answer(None, ids, temperature, seed))
        if compare and temperature == 0:
            found = first_divergence(bench.target, ids, answers.plain[-1].token_ids, result.token_ids)
            if found is not None:
                where = describe_divergence(found, bench.config.target.dtype)
                answers.divergences.append(f"prompt {number}: {where}")
    return answers


def rate(results: list[Generation]) -> float:
    """Tokens per second of decoding, 0 if nothing was decoded."""
    seconds = sum(result.decode_seconds for result in results)
    return sum(sum(result.committed) for result in results) / seconds if seconds else 0.0


def evaluate_locally(bench: Bench, temperature: float) -> dict[str, Any]:
    """One temperature."""
    answers = answer_all(bench, temperature)
    drafted, plain = answers.drafted, answers.plain
    domains = [domain_of(row) for row in bench.rows]
    report: dict[str, Any] = {"temperature": temperature}
    report |= summary(answers.loop, domains, bench.drafter.config.block_size)
    report["target_forwards"] = sum(result.target_forwards for result in drafted)
    report["stopped_by"] = dict(Counter(result.stopped_by for result in drafted))
    for name in ("prefill", "draft", "verify", "decode"):
        report[f"{name}_seconds"] = sum(getattr(result, f"{name}_seconds") for result in drafted)
    report["tokens_per_second"] = rate(drafted)
    if answers.replayed:
        again = Acceptance.of(answers.replayed)
        equal = [
            a.committed.tolist() == b.committed.tolist() for a, b in zip(answers.loop, answers.replayed, strict=True)
        ]
        report["replay"] = {
            "pooled": again.pooled, "mean": again.mean, "rounds": int(again.rounds.sum()), "equal_texts": sum(equal),
        }  # fmt: skip
    if plain:
        report["plain_tokens_per_second"] = rate(plain)
        report["speed_up"] = rate(drafted) / rate(plain) if rate(plain) else None
    if plain and temperature == 0:
        report |= {"texts_equal": len(plain) - len(answers.divergences), "divergences": answers.divergences}
    return report


def replay_stored(bench: Bench) -> dict[str, Any]:
    """The last answers of the rows, as training would see them; rows without one are counted on stderr.

    Raises:
        UserError: no row has an answer.
    """
    longest = text_config(bench.target.config).max_position_embeddings
    encoder = Encoder(
        tokenizer=bench.tokenizer, options=bench.config.target.template_options, max_length=longest, too_long="drop",
        turns="last", reasoning=True,
    )  # fmt: skip
    texts, domains, names, refused = [], [], set(), Counter[str]()
    for row in tqdm(bench.rows, unit="answer", desc="replay"):
        try:
            encoded = encoder(as_document(row.row))
        except Refused as reason:
            refused[reason.args[0]] += 1
            continue
        texts.append(bench.replay(encoded.input_ids, encoded.loss_mask))
        domains.append(domain_of(row))
        names.add(str(row.row.get("generated_by")))
    if refused:
        print(f"{refused.total()} rows are left out ({refused.most_common(3)})", file=sys.stderr)
    if not texts:
        raise UserError(
            f"prompts ({', '.join(bench.config.prompts)}) has no row with an answer to replay; decode=false needs one"
        )
    own = names == {Path(bench.config.target.path or "").name}
    name = {"name": "replay" if own else "teacher-forced"}
    return name | summary(texts, domains, bench.drafter.config.block_size)


def measure_locally(bench: Bench) -> dict[str, Any]:
    """Decode at every temperature, or replay."""
    config = bench.config
    if not config.decode:
        report = replay_stored(bench)
        print_replay(report, config.target.dtype)
        return {"replay": report}
    reports = []
    for temperature in config.temperatures:
        reports.append(evaluate_locally(bench, temperature))
        print_local(reports[-1], config.target.dtype)
    return {"local": reports}


def domain_of(row: Prompt) -> str:
    """What a row says it is about."""
    return str(row.row.get("domain", "all"))


def record(config: EvaluateConfig) -> dict[str, Any]:
    """What was measured, on what: two results can be told apart later."""
    cuda = torch.cuda.is_available()
    return {
        **asdict(config),
        "device": torch.cuda.get_device_name() if cuda else f"cpu, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def evaluate_server(config: EvaluateConfig, rows: list[Prompt]) -> list[ServerReport]:
    """One measurement at each concurrency."""
    if len(config.temperatures) != 1:
        raise UserError(f"temperatures is {config.temperatures}; with server it takes one value")
    settings = AnswerSettings(
        config.max_new_tokens, config.temperatures[0], config.top_k, config.top_p, config.seed,
        config.target.template_options,
    )  # fmt: skip
    conversations = [row.messages for row in rows]
    reports = []
    for concurrency in config.concurrency:
        with tqdm(total=len(rows), unit="request", desc=f"concurrency {concurrency}") as bar:
            report = measure_server(
                config.server, conversations, settings, concurrency=concurrency, model=config.server_model,
                on_done=bar.update,
            )  # fmt: skip
        reports.append(report)
        failed = f", {report.failed} failed ({report.first_failure})" if report.failed else ""
        print(
            f"{report.dialect} at concurrency {concurrency}: acceptance {report.acceptance_length:.3f},"
            f" {report.tokens_per_second:.1f} tokens/s, {report.requests} requests{failed}\n  by {report.source}"
        )
        if report.position_acceptance:
            print("  accepted " + " ".join(f"{share:5.2f}" for share in report.position_acceptance))
    return reports


def main(argv: list[str]) -> int:
    """Evaluate."""
    config = parse(EvaluateConfig, argv, __doc__ or "")
    rows = read_prompts(config)
    if config.server and not config.decode:
        raise UserError("decode is false; with server the server decodes")
    local = bool(config.drafter.path) or not config.server
    bench = Bench(config, *load_pair(config.drafter.path, config.target), rows) if local else None
    result: dict[str, Any] = {"settings": record(config)}
    if config.server:
        result["server"] = [
            {"concurrency": concurrency, **asdict(report)}
            for concurrency, report in zip(config.concurrency, evaluate_server(config, rows), strict=True)
        ]
    if bench is not None:
        result["drafter"] = to_published(bench.drafter.config)
        result |= measure_locally(bench)
    print(json.dumps(finite(result), allow_nan=False))
    return 0


if __name__ == "__main__":
    run_tool(main)
