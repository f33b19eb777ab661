"""Every row of a source is accounted for, and text arrives in the dataset unchanged."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_data.dataset import Documents, open_prepared
from dflash_data.prepare import Ledger, is_heldout, prepare
from dflash_data.sources import check_sources
from dflash_data.synthetic import write_synthetic
from dflash_model.errors import UserError
from support.tokenizer import chat_tokenizer

TOKENIZER = chat_tokenizer()
BOM = b"\xef\xbb\xbf"


def chat(answer: str, question: str = "What is it?", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **more}


def write(path: Path, rows: list[Any]) -> Path:
    """Rows to lines; bytes as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def run(paths: list[Path], out: Path, heldout_ratio: float = 0.0, max_length: int = 256) -> tuple[Ledger, bool]:
    return prepare(paths, out, TOKENIZER, max_length=max_length, heldout_ratio=heldout_ratio, options={})


def answers(split: Documents) -> list[str]:
    pairs = (split[index] for index in range(len(split)))
    return [TOKENIZER.decode(ids[mask]).removesuffix("<|im_end|>") for ids, mask in pairs]


def test_every_row_is_kept_or_dropped_with_its_place(tmp_path: Path) -> None:
    odd = "one\u2028two\u0085three\u000bfour"
    sharegpt = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "From ShareGPT."}]}
    rows = [
        BOM + json.dumps(chat("After a BOM.")).encode(), b'{"messages": [', b"", chat(odd), b"[1]", {"text": "x"},
        {"messages": "hi"}, {"messages": []}, b'{"messages": "\xff"}', sharegpt, chat("Cut", finish_reason="length"),
    ]  # fmt: skip
    first, second = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", [chat("Last."), b"no"])
    ledger, reused = run([first, second], tmp_path / "out")
    assert not reused
    places = [(Path(row["file"]).name, row["line"], row["reason"]) for row in ledger.dropped_rows]
    assert places == [
        ("a.jsonl", 2, "not a JSON row"),
        ("a.jsonl", 5, "not a JSON object"),
        ("a.jsonl", 6, "neither messages nor conversations"),
        ("a.jsonl", 7, "messages is not a list of turns"),
        ("a.jsonl", 8, "no messages"),
        ("a.jsonl", 9, "not a JSON row"),
        ("b.jsonl", 2, "not a JSON row"),
    ]
    assert ledger.dropped["not a JSON row"] == 3
    assert ledger.rows_in == 12  # the blank line is none
    assert ledger.rows == {"train": 5, "heldout": 0}
    data = open_prepared(tmp_path / "out", seq_len=256, vocab_size=100_000)
    assert answers(data.train) == ["After a BOM.", odd, "From ShareGPT.", "Cut", "Last."]
    assert data.train.rows.with_format(None)["source"][1:3] == [f"{first}:4", f"{first}:10"]
    ids, mask = data.train[3]
    assert TOKENIZER.decode(ids[mask]) == "Cut", "finish_reason length: the end token carries no loss"
    assert ledger.tokens["train"] == data.train.lengths.sum() == sum(len(data.train[i][0]) for i in range(5))
    assert ledger.supervised_tokens["train"] == sum(data.train[i][1].sum() for i in range(5))
    assert data.ledger == ledger


@pytest.mark.parametrize(
    "row", [{"conversations": ["hi", "there"]}, {"conversations": [{"from": ["human"], "value": "x"}]}, chat("\ud83d")]
)
def test_a_misshapen_row_is_dropped_like_any_other(tmp_path: Path, row: dict[str, Any]) -> None:
    source = write(tmp_path / "a.jsonl", [chat("Good."), json.dumps(row).encode()])
    ledger, _ = run([source], tmp_path / "out")
    assert (ledger.rows_in, ledger.rows["train"], ledger.dropped.total()) == (2, 1, 1)
    assert ledger.dropped_rows[0]["line"] == 2


def test_unchanged_input_is_reused_and_changed_input_redone(tmp_path: Path) -> None:
    source, out = write(tmp_path / "a.jsonl", [chat("One."), b"bad"]), tmp_path / "out"
    first, _ = run([source], out)
    stamp = (out / "ledger.json").stat().st_mtime_ns
    assert run([source], out) == (first, True)
    assert (out / "ledger.json").stat().st_mtime_ns == stamp
    write(source, [chat("One."), chat("Two.")])
    second, reused = run([source], out)
    assert not reused
    assert second.fingerprint != first.fingerprint
    assert answers(open_prepared(out, seq_len=256, vocab_size=100_000).train) == ["One.", "Two."]
    assert run([source], out, max_length=200)[1] is False, "another setting is another result"


def test_nothing_to_train_on_is_an_error_and_leaves_the_old_folder(tmp_path: Path) -> None:
    source, out = write(tmp_path / "a.jsonl", [chat("One.")]), tmp_path / "out"
    run([source], out)
    write(source, [b"bad", b"bad", {"messages": []}])
    with pytest.raises(UserError, match=r"none of 3 rows .*\(not a JSON row: 2, no messages: 1\)"):
        run([source], out)
    assert answers(open_prepared(out, seq_len=256, vocab_size=100_000).train) == ["One."]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]


def test_holding_out_everything_is_not_called_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="held") as caught:
        run([write(tmp_path / "a.jsonl", [chat("One.")])], tmp_path / "out", heldout_ratio=1.0)
    assert "empty" not in str(caught.value)


def test_a_folder_that_is_no_dataset_is_never_deleted(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [chat("One.")])
    with pytest.raises(UserError, match=r"data\.path"):
        run([source], tmp_path)
    assert source.is_file()


def test_splits_are_disjoint_complete_and_keep_equal_conversations_together(tmp_path: Path) -> None:
    rows = [chat(f"Answer {number % 60}.", finish_reason="stop", id=number) for number in range(120)]
    ledger, _ = run([write(tmp_path / "a.jsonl", rows)], tmp_path / "out", heldout_ratio=0.3)
    data = open_prepared(tmp_path / "out", seq_len=256, vocab_size=100_000)
    train, heldout = answers(data.train), answers(data.heldout)
    assert not set(train) & set(heldout)
    assert sorted(train + heldout) == sorted(f"Answer {number % 60}." for number in range(120))
    assert ledger.rows == {"train": len(train), "heldout": len(heldout)}
    kept = [json.loads(line) for line in (tmp_path / "out" / "heldout.jsonl").read_text().splitlines()]
    assert [row["messages"][-1]["content"] for row in kept] == heldout
    assert 16 <= len(heldout) <= 56  # 60 conversations, each twice: 36 +- 7
    assert all(is_heldout(chat(text)["messages"], 0.3) for text in heldout)


def test_missing_sources_and_templates_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.sources is empty"):
        check_sources("data.sources", [])
    with pytest.raises(UserError, match=r"prompts names .*gone\.jsonl, which does not exist"):
        check_sources("prompts", [str(tmp_path / "gone.jsonl")])
    with pytest.raises(UserError, match="no chat template"):
        prepare([], tmp_path / "out", chat_tokenizer(None), max_length=9, heldout_ratio=0, options={})


def test_a_dataset_for_another_vocabulary_is_refused(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "data", documents=8, max_length=32, vocab_size=500, seed=0)
    open_prepared(tmp_path / "data", seq_len=128, vocab_size=500)
    with pytest.raises(UserError, match="holds token id 498, the target's vocabulary ends at 99"):
        open_prepared(tmp_path / "data", seq_len=128, vocab_size=100)
