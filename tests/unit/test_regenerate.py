"""Regenerating responses: what is stored is what the target said, and a stopped run continues."""

import json
import re
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from dflash_data.chat import render
from dflash_data.completions import Completion, Failure, pause
from dflash_data.regenerate import Decoding, LocalTarget, Marks, Prompt, decode_batch, read_prompt
from dflash_data.sources import SourceRow
from dflash_model import Sampling, UserError
from regenerate import Output, main
from support.chat_server import Job
from support.tiny import DENSE
from support.tokenizer import CHATML, chat_tokenizer

GREEDY = Sampling()
TEXTS = ("hi", "what is it?", "a b c d e f")


def tiny_model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(Qwen3Config(**{**DENSE, "vocab_size": len(tokenizer)})).eval()


def prompt(text: str, number: int = 0, **row: Any) -> Prompt:
    turns = [{"role": "user", "content": text}]
    return Prompt("in.jsonl", number + 1, number, {"messages": turns, **row}, turns)


def answers(target: LocalTarget, prompts: list[Prompt], decoding: Decoding, batch_tokens: int) -> list[Completion]:
    found = dict(sorted((one.number, result) for one, result in target.answer_all(prompts, decoding, batch_tokens)))
    assert list(found) == sorted(one.number for one in prompts)
    assert all(isinstance(result, Completion) for result in found.values())
    return list(found.values())  # type: ignore[arg-type]


def test_stored_text_is_the_targets_greedy_text() -> None:
    """Batched and padded equals one by one, and the supervised tokens of the stored row are those tokens."""
    tokenizer = chat_tokenizer()
    model = tiny_model(tokenizer)
    prompts = [prompt(text, number) for number, text in enumerate(TEXTS)]
    decoding = Decoding(GREEDY, 12)
    kept = 0
    for one, new in zip(prompts, answers(LocalTarget(model, tokenizer, {}), prompts, decoding, 10_000), strict=True):
        ids = render(tokenizer, one.messages, generation_prompt=True)
        alone = decode_batch(model, tokenizer, [ids], [GREEDY], 12)[0]
        assert new.message == {"role": "assistant", "content": tokenizer.decode(alone).removesuffix("<|im_end|>")}
        assert new.usage == {"prompt_tokens": len(ids), "completion_tokens": len(alone)}
        row = one.answered(new, decoding, "tiny")
        if new.retokenized:
            assert tokenizer.encode(new.message["content"], add_special_tokens=False) != alone
            continue
        whole = render(tokenizer, row["messages"], generation_prompt=False)
        assert whole[: len(ids) + len(alone)] == ids + alone
        kept += 1
    assert kept


def test_a_response_with_other_tokens_once_encoded_is_kept_and_marked() -> None:
    """The two tokens "a", "b" of a text whose encoding is another; a character cut in half; and nothing at all."""
    tokenizer = chat_tokenizer()
    target = LocalTarget(tiny_model(tokenizer), tokenizer, {})
    whole, end = tokenizer.encode("The quick", add_special_tokens=False), tokenizer.eos_token_id
    apart = [token for letter in "The quick" for token in tokenizer.encode(letter, add_special_tokens=False)]
    assert whole != apart
    half = tokenizer.encode("é", add_special_tokens=False)[:1]
    for response, text, finish, other in (
        ([*whole, end], "The quick", "stop", False),
        ([*apart, end], "The quick", "stop", True),
        (half, "\ufffd", "length", True),
    ):
        found = target._read([5, 6], response)
        assert isinstance(found, Completion)
        assert (found.message["content"], found.finish_reason, found.retokenized) == (text, finish, other)
        row = prompt("x", retokenized=True).answered(found, Decoding(GREEDY, 12), "tiny")
        assert row.get("retokenized", False) is other
    assert target._read([5, 6], [end]) == Failure("the answer is empty")


def test_drawn_responses_do_not_depend_on_the_batch() -> None:
    """Row i uses seed + i: equal prompts differ, the same run again does not, and no seed is another text each time."""
    tokenizer = chat_tokenizer()
    target = LocalTarget(tiny_model(tokenizer), tokenizer, {})
    prompts = [prompt(text, number) for number, text in enumerate((*TEXTS, "hi"))]

    def texts(batch_tokens: int, seed: int | None, asked: list[Prompt] = prompts, top_k: int = 0) -> list[str]:
        decoding = Decoding(Sampling(temperature=1.0, seed=seed, top_k=top_k), 12)
        return [found.message["content"] for found in answers(target, asked, decoding, batch_tokens)]

    whole = 10_000
    all_at_once = texts(whole, 5)
    assert texts(1, 5) == texts(100, 5) == all_at_once
    assert texts(whole, 5, prompts[2:]) == all_at_once[2:]
    assert all_at_once[0] != all_at_once[3]
    assert texts(whole, 6) != all_at_once
    assert texts(whole, None) != texts(whole, None)
    greedy = [found.message["content"] for found in answers(target, prompts, Decoding(GREEDY, 12), whole)]
    assert texts(whole, 5, top_k=1) == greedy != all_at_once


def test_batches_hold_as_many_rows_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 14, 20, 29, ... tokens, responses of 6 at most, 80 tokens a batch, the long ones first."""
    tokenizer = chat_tokenizer()
    target = LocalTarget(tiny_model(tokenizer), tokenizer, {})
    widths: list[list[int]] = []
    cached: list[int] = []

    def decode(*args: Any) -> list[list[int]]:
        widths.append([len(ids) for ids in args[2]])
        found = decode_batch(*args)
        cached.append(len(args[2]) * target.model._previous_max_cache_length)
        return found

    monkeypatch.setattr("dflash_data.regenerate.decode_batch", decode)
    prompts = [prompt("a" * 10 * (n % 5), n) for n in range(12)]
    lengths = sorted((len(target._render(one)) for one in prompts), reverse=True)  # type: ignore[arg-type]
    answers(target, prompts, Decoding(GREEDY, 6), 80)
    expected = []
    while lengths:
        rows = max(1, 80 // (lengths[0] + 6))
        expected.append(lengths[:rows])
        lengths = lengths[rows:]
    assert widths == expected
    assert len({len(batch) for batch in widths}) > 1
    assert max(cached) <= 80, "a cache is no longer than its own batch needs"


def test_templates_get_tools_and_arguments_and_may_refuse() -> None:
    """The reason is told for that row, and the others of its batch are answered."""
    template = (
        "{% if tools %}{{ tools[0].function.name }}{% endif %}{% for m in messages %}"
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments.at + '!' }}{% endfor %}"
        "{% if m.content == 'no' %}{{ raise_exception('never') }}{% endif %}{% endfor %}" + CHATML
    )
    tokenizer = chat_tokenizer(template)
    target = LocalTarget(tiny_model(tokenizer), tokenizer, {})
    call = {"function": {"name": "look", "arguments": '{"at": "Rome"}'}}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "user", "content": "y"},
    ]
    row = {"messages": turns, "tools": json.dumps([{"type": "function", "function": {"name": "look"}}])}
    with_calls = read_prompt(SourceRow("in.jsonl", 1, row), 0)
    assert isinstance(with_calls, Prompt)
    assert tokenizer.decode(target._render(with_calls)).startswith("lookRome!<|im_start|>")
    call["function"]["arguments"] = '{"at": 1}'  # which that template cannot add to a text
    odd = read_prompt(SourceRow("in.jsonl", 1, row), 0)
    assert isinstance(odd, Prompt)
    prompts = [prompt("yes"), prompt("no", 1), replace(odd, number=2), prompt("yes", 3)]
    found = {one.number: result for one, result in target.answer_all(prompts, Decoding(GREEDY, 4), 10_000)}
    assert found[1] == Failure("the chat template refuses it: never")
    assert isinstance(found[2], Failure)
    assert isinstance(found[0], Completion)
    assert found[0] == found[3]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": "hi"}, "messages is not a list of turns"),
        ({"messages": ["hi"]}, "messages is not a list of turns"),
        ({"messages": [{"content": "hi"}]}, "unknown role None"),
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "starts with the assistant"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not valid Unicode"),
        ({"messages": [{"role": "user", "content": "x"}], "id": "\ud800"}, "not valid Unicode"),
        ({"messages": [{"role": "user", "content": "x"}], "at": b"x"}, "the row cannot be written as JSON: .* bytes"),
        ({"text": "hi"}, "plain text or tokens, no conversation"),
        ({"messages": [{"role": "user", "content": "x"}], "input_ids": [1, 2]}, "plain text or tokens"),
    ],
)
def test_rows_that_are_no_prompts(row: dict[str, Any], reason: str) -> None:
    found = read_prompt(SourceRow("in.jsonl", 3, row), 2)
    assert isinstance(found, Failure)
    assert re.match(reason, found.reason)


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("spelling", ["messages", "conversations", "prompt"])
def test_rows_in_every_spelling(spelling: str, answered: bool) -> None:
    """The row stays as it is, but for its last turn."""
    if spelling == "prompt":
        row: dict[str, Any] = {"prompt": "hi", "response": "old"}
    else:
        says, speaks, human, bot = (
            ("content", "role", "user", "assistant") if spelling == "messages" else ("value", "from", "human", "gpt")
        )
        turns = [{speaks: human, says: "hi", "weight": 1}, {speaks: bot, says: "old"}]
        row = {spelling: turns if answered else turns[:1]}
    found = read_prompt(SourceRow("in.jsonl", 3, row), 2)
    assert isinstance(found, Prompt)
    assert found.messages == [{"role": "user", "content": "hi"}]
    answer = {"role": "assistant", "content": "new"}
    new = found.answered(Completion(answer, "stop", None), Decoding(GREEDY, 4), "tiny")
    kept = {"role": "user", "content": "hi", "weight": 1} if spelling == "messages" else found.messages[0]
    assert new == {
        **row, "messages": [kept, answer], "finish_reason": "stop", "generated_by": "tiny",
        "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None, "max_new_tokens": 4,
                     "template_options": "{}"},
        "regenerated_from": "in.jsonl:3",
    }  # fmt: skip


def test_a_run_continues_wherever_it_was_cut(tmp_path: Path) -> None:
    """The file cut at every byte of its second row, and at others: whole rows are done, the rest is gone."""
    path, settings = tmp_path / "new" / "out.jsonl", {"target": "t"}
    answer = Completion(
        {"role": "assistant", "content": "ü\u2028€"}, "stop", {"prompt_tokens": 2, "completion_tokens": 3}
    )
    rows = [prompt("x", number).answered(answer, Decoding(GREEDY, 4), "tiny") for number in (0, 4, 2)]
    with closing(Output(path, settings)) as output:
        for row in rows:
            output.add(row, 0)
        whole = path.read_bytes()
        with pytest.raises(UserError, match="another run writes it"):
            Output(path, settings)
    ends = [index for index, byte in enumerate(whole, 1) if byte == ord("\n")]
    assert len(ends) == 3
    for cut in (0, 1, *ends, *range(ends[0] + 1, ends[1])):
        path.write_bytes(whole[:cut])
        with closing(Output(path, settings)) as again:
            count = sum(end <= cut for end in ends)
            assert (again.rows, again.counts["completion_tokens"]) == (count, 3 * count)
            assert [("in.jsonl", line) in again.done for line in (1, 2, 3, 5)] == [
                count > 0,
                False,
                count > 2,
                count > 1,
            ]
            for row in rows[count:]:
                again.add(row, 0)
        assert path.read_bytes() == whole
    with pytest.raises(UserError, match=r"written with {'target': 't'}, and now it is {'target': 'other'}"):
        Output(path, {"target": "other"})
    with path.open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(UserError, match=r"out.jsonl:4 is no new row of this tool"):
        Output(path, settings)


def test_marks() -> None:
    marks = Marks()
    for file, line in (("a:1", 7), ("b", 1), ("a:1", 3)):
        marks.add(file, line)
    assert [line for line in range(12) if ("a:1", line) in marks] == [3, 7]
    assert [line for line in range(12) if ("b", line) in marks] == [1]
    assert ("c", 0) not in marks


def test_the_tool_without_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In two parts, the second after a kill in the middle of a row, equals at once."""
    tokenizer = chat_tokenizer()
    tiny_model(tokenizer).save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    rows: list[Any] = [{"id": n, "messages": [{"role": "user", "content": text}]} for n, text in enumerate(TEXTS * 2)]
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"messages": []}]))
    argv = [f"target.path={tmp_path / 'tiny'}", "target.dtype=float32", f"prompts={prompts}", "max_new_tokens=8",
            "temperature=0.8", "seed=4", "batch_tokens=70"]  # fmt: skip
    assert main([*argv, f"out={out}"]) == 0
    whole = out.read_text()
    found = [json.loads(line) for line in whole.splitlines()]
    assert [(row["id"], row["sampling"]["seed"]) for row in found] == [
        (number, 4 + number)
        for number in (2, 5, 1, 4, 0, 3)  # by length
    ]
    assert {row["generated_by"] for row in found} == {"tiny"}
    told = capsys.readouterr().err
    assert "6 of 7 prompts answered; " in told
    assert f" {sum(row['usage']['completion_tokens'] for row in found)} completion tokens" in told
    assert "1 failed (no messages: 1), listed in " in told
    out.write_text(whole[: len(whole) // 2])
    assert main([*argv, f"out={out}", "batch_tokens=10000"]) == 0
    assert out.read_text() == whole


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"server": "localhost:8000"}, "server is 'localhost:8000'; it must be like http://"),
        ({"server": "http://localhost:8000/v1"}, "without /v1"),
        ({"concurrency": 0}, "concurrency is 0; it must be at least 1"),
        ({"retries": -1}, "retries is -1; it must be 0 or more"),
        ({"request_timeout_seconds": 0}, "request_timeout_seconds is 0; it must be above 0"),
        ({"top_p": 0}, "top_p is 0"),
        ({"out": ""}, "out is not set"),
        ({"prompts": "org/data"}, "prompts names org/data of the hub, which may change"),
    ],
)
def test_settings_out_of_range(tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        Job(tmp_path, "http://127.0.0.1:1", ["a"]).run(**settings)


def test_pauses_double_and_keep_to_what_the_server_asks_for() -> None:
    for retries, longest in enumerate([0.5, 1, 2, 4, 8, 16, 30, 30, 30]):
        found = [pause(retries, None) for _ in range(100)]
        assert longest / 2 <= min(found) < max(found) <= longest
    assert pause(0, "7") == 7
    assert pause(0, "0") <= 0.5
    assert pause(5, "1") >= 8
    later = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    assert 3500 < pause(0, later) <= 3600
    assert pause(0, "soon") <= 0.5
