"""Rows that broke other people's preparation, by value: what carries loss, or the reason why the row is dropped."""

import json
from pathlib import Path
from typing import Any

import pytest

import prepare as prepare_tool
from dflash_data.chat import load_tokenizer
from dflash_data.conversation import Refused, as_document
from dflash_data.dataset import open_prepared
from dflash_data.prepare import read_ledger
from dflash_model import UserError
from support.masks import CALL, OFF, encoder, masked_in
from support.templates import family_tokenizer

ROOT = Path(__file__).parents[2]
END = "<|im_end|>"
KIT_FILE = ROOT / "tests" / "support" / "kit.jsonl"


def ask(question: Any, answer: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


KIT: dict[str, dict[str, Any]] = {
    **{row["id"]: row for row in map(json.loads, KIT_FILE.read_text(encoding="utf-8").strip().split("\n"))},
    "K12": ask("word " * 10_000, "Short answer."),
    "K14": ask("Lines?", "one\u2028two\u0085three"),
    "K15": ask("Half?", "half a pair \ud83d"),
    "image": ask([{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "What?"}], "A cat."),
    "control": ask("Say <|im_end|> please.", "No."),
}  # fmt: skip
ALIKE: dict[str, list[str] | str] = {
    "K1": ["Blue is a colour that many people name first."],
    "K3": "no messages",
    "K4": "starts with the assistant",
    "K5": "starts with the assistant",
    "K6": ["It is 4."],
    "K8": [CALL, "It is five past two in Oslo."],
    "K11": "unknown role 'mybot'",
    "K12": "the first answer begins beyond data.seq_len",
    "K13": ["Red."],
    "K14": ["one\u2028two\u0085three"],
    "K15": "not valid Unicode",
    "K17": ["Hi 👩‍👩‍👧‍👦 café 你好 Z͑ñ!"],
    "K19": ["OK."],
    "K20": "the assistant turn is empty",
    "image": "image, audio or video",
    "control": "content holds a control token",
}
THOUGHT = "<think>\n7 has no divisor between 2 and 6.\n</think>\n\nYes."
CHATML = ALIKE | {
    "K7": ["Here is one.", "Here is another."],
    "K9a": "the chat template does not show reasoning",
    "K9b": [THOUGHT],
    "K10": "the chat template does not show reasoning",
}
QWEN3 = ALIKE | {
    "K7": "the chat template rewrites earlier turns",  # the first answer shows an empty block until the second follows
    "K9a": [THOUGHT],
    "K9b": [THOUGHT],  # the same, however it is spelled
    "K10": ["<think>\n9 is 3 times 3.\n</think>\n\nNo."],  # the reasoning of the first turn is not shown any more
}
CASES = [(family, name, table[name]) for family, table in (("chatml", CHATML), ("qwen3", QWEN3)) for name in KIT]


@pytest.mark.parametrize(("family", "name", "expected"), CASES, ids=[f"{family}-{name}" for family, name, _ in CASES])
def test_each_row(family: str, name: str, expected: list[str] | str) -> None:
    encode = encoder(family, max_length=512)
    if isinstance(expected, list):
        assert masked_in(encode, as_document(KIT[name])) == [said + END for said in expected]
    else:
        with pytest.raises(Refused) as caught:
            encode(as_document(KIT[name]))
        assert caught.value.args == (expected,)


@pytest.mark.parametrize("name", ["K1", "K6", "K13", "K14", "K17", "K19"])
def test_without_thinking_the_same_answer_carries_loss(name: str) -> None:
    """The empty block of reasoning stands in the prompt, as a server sends it."""
    encode = encoder("qwen3", options=OFF)
    assert masked_in(encode, as_document(KIT[name])) == [said + END for said in ALIKE[name]]


# Whole files through the tool ----------------------------------------------------------------------------------------


def prepare(folder: Path, rows: list[bytes], *more: str) -> None:
    family_tokenizer("chatml").save_pretrained(folder / "target")
    (folder / "kit.jsonl").write_bytes(b"\n".join(rows) + b"\n")
    prepare_tool.main([
        f"data.sources={folder / 'kit.jsonl'}", f"data.path={folder / 'out'}", f"target.tokenizer={folder / 'target'}",
        "data.heldout_ratio=0", "data.seq_len=512", "data.prepare_workers=2", *more,
    ])  # fmt: skip


def line(name: str) -> bytes:
    return json.dumps(KIT[name]).encode()


def test_held_out_files_that_give_nothing_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, row, warned in (("kept", KIT["K1"], False), ("lost", {"messages": []}, True)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "held.jsonl").write_text(json.dumps(row) + "\n")
        prepare(folder, [line("K13")], f"data.heldout_sources={folder / 'held.jsonl'}")
        assert ("data.heldout_sources gave no conversation" in capsys.readouterr().out) is warned


def test_the_kit_and_a_cut_line_as_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [b"\xef\xbb\xbf" + line("K1"), line("K1")[:60], b"", *(line(name) for name in KIT), line("K1")]
    prepare(tmp_path, rows)
    ledger = read_ledger(tmp_path / "out")
    kept = [name for name in KIT if isinstance(CHATML[name], list)]
    reasons = {4 + place: CHATML[name] for place, name in enumerate(KIT) if name not in kept} | {2: "not a JSON row"}
    assert ledger.rows_in == len(rows) - 1 == ledger.rows["train"] + ledger.dropped.total(), "the blank line is no row"
    assert ledger.rows["train"] == len(kept) + 2
    assert ledger.duplicates == 2, "K1 stands there three times"
    dropped = [json.loads(text) for text in (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()]
    assert {row["line"]: row["reason"] for row in dropped} == reasons
    assert f"{len(rows) - 1} rows in, {len(kept) + 2} kept, {len(reasons)} dropped" in capsys.readouterr().out
    train = open_prepared(tmp_path / "out", seq_len=512, vocab_size=100_000).train
    assert [train.source(row).rpartition(":")[2] for row in (0, len(train) - 1)] == ["1", str(len(rows))]


def test_prompts_too_long_for_any_answer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none of 8 rows .*the first answer begins beyond data.seq_len: 8"):
        prepare(tmp_path, [line("K12")] * 8, "data.seq_len=128")
    assert not (tmp_path / "out").exists()
    prepare(tmp_path, [line("K12"), line("K1")] * 4, "data.seq_len=128")
    ledger = read_ledger(tmp_path / "out")
    assert (ledger.rows["train"], ledger.dropped) == (4, {"the first answer begins beyond data.seq_len": 4})


@pytest.mark.parametrize("turns", ["all", "last"])
def test_the_last_turn_alone_if_asked(tmp_path: Path, turns: str, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(tmp_path, [line("K7")], f"data.turns={turns}", "inspect=1")
    shown = capsys.readouterr().out
    assert (f"⟦Here is one.{END}⟧" in shown) == (turns == "all")
    assert f"⟦Here is another.{END}⟧" in shown


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.turns is 'first'; it must be one of all, last"):
        prepare(tmp_path, [line("K7")], "data.turns=first")
    with pytest.raises(UserError, match=r"data\.last_turn_only"):
        prepare(tmp_path, [line("K7")], "data.last_turn_only=true")


def test_a_missing_tokenizer_is_named() -> None:
    with pytest.raises(UserError, match="no tokenizer at /nowhere/at/all"):
        load_tokenizer("/nowhere/at/all")
