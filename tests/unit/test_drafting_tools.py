"""The drafting tools as a user calls them, on a tiny target with a tokenizer; their numbers against the library's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dflash.model as reference
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

import evaluate
import export
import generate as generate_tool
from dflash_data.chat import render
from dflash_data.prepare import Recipe, Source, prepare
from dflash_model import UserError, generate, load_drafter, save_drafter
from dflash_model.config import FULL, SLIDING
from dflash_model.taps import context_features
from dflash_train.acceptance import Acceptance
from dflash_train.card import Origin, model_card
from dflash_train.cli import parse
from dflash_train.config import RunConfig, TargetSection
from dflash_train.describe import facts_for_card
from dflash_train.evaluate import evaluate_text
from dflash_train.job import check_job
from support.stub_server import StubServer
from support.tiny import DENSE, tiny_config, tiny_drafter
from support.tokenizer import byte_fallback_tokenizer, chat_tokenizer
from support.trained import draft_step

# Also what the stub server reads: proposals accepted in each of its rounds, 8 in 6 rounds.
QUESTIONS = [("3 0 2", "facts"), ("0 1", "prose"), ("2", "prose")]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a drafter for it, and prompts."""
    root = tmp_path_factory.mktemp("tools")
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(Qwen3Config(**{**DENSE, "vocab_size": 347}))
    target.generation_config.eos_token_id = 2
    target.save_pretrained(root / "target")
    chat_tokenizer().save_pretrained(root / "target")
    config = tiny_config((SLIDING, FULL), vocab_size=347, mask_token_id=345, sliding_window=16)
    save_drafter(tiny_drafter(config).state_dict(), config, root / "dflash")
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "-"}], "domain": domain}
        for text, domain in QUESTIONS
    ]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def pair(world: Path) -> list[str]:
    return [f"target.path={world / 'target'}", f"drafter.path={world / 'dflash'}", "target.dtype=float32"]


def run_evaluate(world: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert evaluate.main([*pair(world), f"prompts={world / 'prompts.jsonl'}", *arguments]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_evaluate_reports_what_the_library_does(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_evaluate(world, capsys, "max_new_tokens=24", "temperatures=0,1", "seed=5")
    target = AutoModelForCausalLM.from_pretrained(world / "target", dtype=torch.float32)
    drafter, tokenizer = load_drafter(world / "dflash", dtype=torch.float32), chat_tokenizer()
    prompts = [render(tokenizer, [{"role": "user", "content": text}], generation_prompt=True) for text, _ in QUESTIONS]
    outs = [generate(drafter, target, ids, max_new_tokens=24, stop_token_ids=[2]) for ids in prompts]
    greedy, sampled = report["local"]
    tokens, rounds = sum(sum(out.committed) for out in outs), sum(len(out.committed) for out in outs)
    assert (greedy["tokens"], greedy["rounds"], greedy["prompts"]) == (tokens, rounds, 3)
    assert greedy["acceptance_pooled"] == pytest.approx(tokens / rounds)
    assert greedy["acceptance_mean"] == pytest.approx(sum(out.acceptance_length for out in outs) / 3)
    assert greedy["target_forwards"] == 3 + rounds
    assert greedy["replay"] == {
        "pooled": pytest.approx(tokens / rounds), "mean": greedy["acceptance_mean"], "rounds": rounds, "equal_texts": 3,
    }  # fmt: skip
    assert greedy["texts_equal"] == 3
    assert {name: row["prompts"] for name, row in greedy["domains"].items()} == {"facts": 1, "prose": 2}
    accepted = [count for out in outs for count in out.accepted]
    assert greedy["positions"][0]["accepted"] == pytest.approx(sum(a >= 1 for a in accepted) / len(accepted))
    assert sum(row["rounds"] for row in greedy["context"]) == rounds
    assert sampled["temperature"] == 1
    assert "replay" not in sampled
    assert "texts_equal" not in sampled


def test_stored_answers_are_replayed(world: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Prompt and answer as a server would tokenize them, the stop token included; rows without an answer are told."""
    said = [("What?", "The quick brown fox.", "prose"), ("Hm", "It is 3.", "facts")]
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}], "domain": domain}
        for asked, answer, domain in said
    ]
    rows.append({"messages": [{"role": "user", "content": "Hm"}]})
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert evaluate.main([*pair(world), f"prompts={path}", "decode=false"]) == 0
    out = capsys.readouterr()
    report = json.loads(out.out.splitlines()[-1])
    assert "local" not in report
    assert "1 rows are left out" in out.err
    target = AutoModelForCausalLM.from_pretrained(world / "target", dtype=torch.float32)
    drafter, tokenizer = load_drafter(world / "dflash", dtype=torch.float32), chat_tokenizer()
    texts = []
    for asked, answer, _ in said:
        prompt = render(tokenizer, [{"role": "user", "content": asked}], generation_prompt=True)
        answered = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        ids, mask = prompt + answered, [False] * len(prompt) + [True] * len(answered)
        context = context_features(target, ids, drafter.config.target_layer_ids)
        texts.append(evaluate_text(draft_step(drafter, target), context, ids, mask))
    assert report["replay"]["name"] == "teacher-forced"  # these rows do not say that the target wrote them
    assert report["replay"]["acceptance_pooled"] == pytest.approx(Acceptance.of(texts).pooled)
    assert report["replay"]["domains"]["facts"]["pooled"] == pytest.approx(Acceptance.of(texts[1:]).pooled)


@pytest.fixture
def server() -> Iterator[StubServer]:
    with StubServer("vllm") as stub:
        yield stub


def test_evaluate_asks_a_server_beside_the_replay(
    world: Path, capsys: pytest.CaptureFixture[str], server: StubServer
) -> None:
    report = run_evaluate(world, capsys, f"server={server.url}", "concurrency=1,2", "max_new_tokens=9")
    assert [row["concurrency"] for row in report["server"]] == [1, 2]
    assert all(row["requests"] == 3 and row["failed"] == 0 for row in report["server"])
    assert all(row["acceptance_length"] == pytest.approx(1 + 8 / 6) for row in report["server"])
    assert report["local"][0]["replay"]["equal_texts"] == 3


def test_generate_streams_the_text_and_compares(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate_tool.main([*pair(world), "prompt=What is it?", "max_new_tokens=12"]) == 0
    shown = capsys.readouterr().out
    assert "texts equal" in shown
    assert "over" in shown
    assert generate_tool.main([*pair(world), "prompt=Hm", "max_new_tokens=9", "temperature=0.8", "seed=3"]) == 0
    first = capsys.readouterr().out
    assert generate_tool.main([*pair(world), "prompt=Hm", "max_new_tokens=9", "temperature=0.8", "seed=3"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == first.splitlines()[0]


def test_text_is_streamed_in_whole_characters(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, text = chat_tokenizer(), "é漢👍🏽!"
    stream = generate_tool.TextStream(tokenizer)
    for token in tokenizer.encode(text, add_special_tokens=False):
        stream([token])
    assert capsys.readouterr().out == text


def test_text_is_streamed_once_where_half_a_character_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, text = byte_fallback_tokenizer(), "ab漢字🦙🦙b"
    stream = generate_tool.TextStream(tokenizer)
    for token in tokenizer.encode(text, add_special_tokens=False):
        stream([token])
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_target_layers": 7}, "has num_target_layers 7, target.path"),
        ({"vocab_size": 350}, "has vocab_size 350, target.path"),
    ],
)
def test_a_drafter_for_another_target_is_refused(
    world: Path, tmp_path: Path, change: dict[str, int], message: str
) -> None:
    config = tiny_config(**{"vocab_size": 347, **change})
    save_drafter(tiny_drafter(config).state_dict(), config, tmp_path / "dflash")
    with pytest.raises(UserError, match=message):
        generate_tool.main([f"target.path={world / 'target'}", f"drafter.path={tmp_path / 'dflash'}", "prompt=a"])


def test_export_of_a_bare_drafter_is_bit_equal(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "my-dflash"
    assert export.main([f"checkpoint.path={world / 'dflash'}", f"export.path={out}", "target=acme/tiny"]) == 0
    before, after = load_file(world / "dflash" / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (out / "config.json").read_text() == (world / "dflash" / "config.json").read_text()
    theirs = reference.DFlashDraftModel.from_pretrained(out, dtype=torch.bfloat16)
    assert all(torch.equal(tensor, before[name]) for name, tensor in theirs.state_dict().items())
    card = (out / "README.md").read_text()
    assert "--speculative-num-draft-tokens 8" in card
    assert '"num_speculative_tokens": 7' in card
    assert 'base_model: "acme/tiny"' in card
    assert "0, 2, 4 (0-based" in card
    assert card.count("unknown (exported from a bare drafter") == 4


def test_a_checkpoints_card_tells_its_run(tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoints" / "step-40"
    config = tiny_config()
    save_drafter(tiny_drafter(config).state_dict(), config, step / "dflash")
    facts = {
        "target": "acme/tiny", "template_options": {"enable_thinking": False}, "epoch_steps": 8.0,
        "data": {"sources": ["chat.jsonl"], "rows": 20, "tokens": 900, "supervised_tokens": 500, "longest": 77,
                 "generated_by": {"tiny": 20}},
    }  # fmt: skip
    manifest = {"step": 40, "trainer.steps": 50, "trainer.packs_per_step": 3, "data.seq_len": 128,
                "data.anchors_per_pack": 32, "facts": facts}  # fmt: skip
    (step / "manifest.json").write_text(json.dumps(manifest))
    row = {"step": 40, "name": "replay", "pooled": 2.5, "mean": 2.25, "low": 2.4, "high": 2.6, "prompts": 9}
    (tmp_path / "run" / "evaluations.jsonl").write_text(
        "".join(json.dumps({**row, "step": number, "pooled": value}) + "\n" for number, value in ((20, 9), (40, 2.5)))
    )
    card = model_card(config, Origin.find(step), "x-dflash", None)
    assert (
        "2.500 (95 % interval over prompts 2.400 to 2.600) pooled over rounds, 2.250 mean of 9 prompts (replay" in card
    )
    assert (
        "40 of 50 steps of 3 rows of 128 tokens (15360 in all, padding included: 5.00 epochs), conversations up to 77"
        in card
    )
    assert 'chat template | rendered with `{"enable_thinking": false}`; ask servers for it too' in card
    assert "2 full, bidirectional in the block" in card
    said = "20 conversations, 900 tokens, 500 of them supervised; responses (held-out ones too) written by: tiny (20)"
    assert f"chat.jsonl: {said}" in card


def test_a_job_knows_how_its_data_was_rendered(world: Path, tmp_path: Path) -> None:
    """From preparation to what a checkpoint notes: options that the configuration does not name any more."""
    options = {"enable_thinking": False}
    recipe = Recipe(max_length=128, heldout_ratio=0, options=options)
    prepare([Source(world / "prompts.jsonl")], tmp_path / "data", chat_tokenizer(), recipe, workers=1)
    argv = [
        f"target.path={world / 'target'}", f"data.path={tmp_path / 'data'}", "data.seq_len=128", "trainer.steps=1",
        "data.anchors_per_pack=16", "drafter.num_layers=2", "drafter.block_size=8", "drafter.mask_token_id=345",
    ]  # fmt: skip
    facts = facts_for_card(check_job(parse(RunConfig, argv, ""), 1), 8.0)
    assert (facts["template_options"], facts["epoch_steps"]) == (options, 8.0)
    with pytest.raises(UserError, match=r"^target.template_options is {'enable_thinking': True}; data.path .* under"):
        check_job(parse(RunConfig, [*argv, "target.template_options={enable_thinking: true}"], ""), 1)


def test_text_is_rendered_as_the_drafter_was_trained(world: Path, tmp_path: Path) -> None:
    """The checkpoint remembers the options of the chat template; one that a template does not know is refused."""
    config, step = tiny_config(vocab_size=347), tmp_path / "step-40"
    save_drafter(tiny_drafter(config).state_dict(), config, step / "dflash")
    facts = {"step": 40, "facts": {"template_options": {"shout": True}}}
    (step / "manifest.json").write_text(json.dumps(facts))
    arguments = [f"target.path={world / 'target'}", f"drafter.path={step / 'dflash'}", "prompt=a"]
    with pytest.raises(UserError, match=r"target.template_options has shout; the chat template at .* has no such word"):
        generate_tool.main(arguments)
    section = TargetSection(path=str(world / "target"), template_options={"whisper": 1, "shout": False})
    with pytest.raises(UserError, match=r"target.template_options has"):
        generate_tool.load_pair(str(step / "dflash"), section)
    assert section.template_options == {"shout": False, "whisper": 1}, "what the user says comes first"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export.path=x-dflash"], "checkpoint.path is not set"),
        (["checkpoint.path={root}/dflash", "export.path={root}/served"], "must contain dflash"),
        (["checkpoint.path={root}/dflash", "export.path={root}/dflash", "target=a"], "it exists"),
        (["checkpoint.path={root}", "export.path={root}/b-dflash", "target=a"], "neither a checkpoint"),
        (["checkpoint.path={root}/dflash", "export.path={root}/b-dflash"], "target is not set"),
    ],
)
def test_export_refuses_in_one_sentence(world: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        export.main([argument.format(root=world) for argument in arguments])
    assert not (world / "b-dflash").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["limit=-1"], "limit is -1"),
        (["temperatures="], r"temperatures is \[\]"),
        (["temperatures=.inf"], "temperature is inf"),
        (["concurrency=0"], r"concurrency is \[0\]"),
        (["max_new_tokens=0"], "max_new_tokens is 0"),
    ],
)
def test_evaluate_refuses_what_measures_nothing(world: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        evaluate.main([*pair(world), f"prompts={world / 'prompts.jsonl'}", *arguments])


def test_rows_that_are_no_prompts_are_counted(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad: list[Any] = [
        {"messages": "hi"},
        {"messages": [{"content": "a"}]},
        {"messages": []},
        {"messages": [{"role": "assistant", "content": "a"}]},
    ]
    good = {"messages": [{"role": "user", "content": "a"}]}
    (tmp_path / "p.jsonl").write_text("{\n" + "".join(json.dumps(row) + "\n" for row in [*bad, good]))
    assert evaluate.main([*pair(world), f"prompts={tmp_path / 'p.jsonl'}", "max_new_tokens=1"]) == 0
    shown = capsys.readouterr()
    assert "5 rows are no prompts, the first: " in shown.err
    report = json.loads(shown.out.splitlines()[-1])["local"][0]
    assert (report["prompts"], report["rounds"], report["acceptance_pooled"]) == (1, 0, None)  # one token: no round
