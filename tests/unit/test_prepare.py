"""Every row of a source is accounted for, and text arrives in the dataset unchanged."""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from dflash_data import prepare as preparation
from dflash_data.dataset import Documents, open_prepared
from dflash_data.encoder import Encoded, Encoder
from dflash_data.prepare import Ledger, Recipe, Source, prepare, read_ledger
from dflash_data.sources import check_sources
from dflash_data.synthetic import write_synthetic
from dflash_model.errors import UserError
from support.tokenizer import CHATML, chat_tokenizer

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


def run(
    paths: list[Path], out: Path, heldout_ratio: float = 0.0, max_length: int = 256, workers: int = 1, **more: Any
) -> tuple[Ledger, bool]:
    recipe = Recipe(max_length=max_length, heldout_ratio=heldout_ratio, **more)
    return prepare([Source(path) for path in paths], out, TOKENIZER, recipe, workers=workers)


def dropped(out: Path) -> list[tuple[str, int, str]]:
    rows = map(json.loads, (out / "dropped.jsonl").read_text().splitlines())
    return [(Path(row["file"]).name, row["line"], row["reason"]) for row in rows]


def answers(split: Documents) -> list[str]:
    pairs = (split[index] for index in range(len(split)))
    return [TOKENIZER.decode(ids[mask]).removesuffix("<|im_end|>") for ids, mask in pairs]


def test_every_row_is_kept_or_dropped_with_its_place(tmp_path: Path) -> None:
    odd = "one\u2028two\u0085three\u000bfour"
    sharegpt = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "From ShareGPT."}]}
    rows = [
        BOM + json.dumps(chat("After a BOM.")).encode(), b'{"messages": [', b"", chat(odd), b"[1]", {"txt": "x"},
        {"messages": "hi"}, {"messages": []}, b'{"messages": "\xff"}', sharegpt, chat("Cut", finish_reason="length"),
    ]  # fmt: skip
    first, second = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", [chat("Last."), b"no"])
    ledger, reused = run([first, second], tmp_path / "out")
    assert not reused
    assert dropped(tmp_path / "out") == [
        ("a.jsonl", 2, "not a JSON row"),
        ("a.jsonl", 5, "not a JSON object"),
        ("a.jsonl", 6, "none of messages, conversations, prompt and response, text, input_ids"),
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
    assert [data.train.source(index) for index in (1, 2)] == [f"{first}:4", f"{first}:10"]
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
    assert dropped(tmp_path / "out")[0][1] == 2


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


def test_answers_to_another_prompt_are_dropped(tmp_path: Path) -> None:
    """A drafter of answers with thinking accepts little without: what counts is what the template makes of options."""
    tokenizer = chat_tokenizer("{%- if quiet -%}{{ 'Be quiet. ' }}{%- endif -%}" + CHATML)
    rows = [
        chat("Quiet.", sampling={"template_options": '{"quiet": true}'}),
        chat("Plain.", sampling={"template_options": "{}"}),
        chat("Loud.", sampling='{"template_options": {"quiet": false}}'),
        chat("Of old.", sampling={}), chat("None.", sampling=1),
    ]  # fmt: skip
    source = Source(write(tmp_path / "a.jsonl", rows))
    quiet, plain, loud = (
        f"answered under target.template_options {text}" for text in ('{"quiet": true}', "{}", '{"quiet": false}')
    )
    for options, kept, lost in (
        ({}, ["Plain.", "Loud.", "Of old.", "None."], [("a.jsonl", 1, quiet)]),
        ({"quiet": True}, ["Quiet.", "Of old.", "None."], [("a.jsonl", 2, plain), ("a.jsonl", 3, loud)]),
    ):
        out = tmp_path / str(len(kept))
        prepare([source], out, tokenizer, Recipe(max_length=256, heldout_ratio=0.0, options=options), workers=1)
        assert dropped(out) == lost
        assert answers(open_prepared(out, seq_len=256, vocab_size=100_000).train) == kept
    only = Source(write(tmp_path / "b.jsonl", rows[:1]))
    with pytest.raises(UserError, match=r'answered under target.template_options {"quiet": true}'):
        prepare([only], tmp_path / "none", tokenizer, Recipe(max_length=256, heldout_ratio=0.0), workers=1)


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
    assert ledger.duplicates == 60
    run([tmp_path / "a.jsonl"], tmp_path / "more", heldout_ratio=0.6)
    assert set(heldout) < set(answers(open_prepared(tmp_path / "more", seq_len=256, vocab_size=100_000).heldout))


def test_a_test_set_of_ones_own(tmp_path: Path) -> None:
    """All of it is held out beside a share of the rest; what is trained on as well is counted."""
    source = write(tmp_path / "a.jsonl", [chat(f"Answer {number}.") for number in range(40)])
    own = write(tmp_path / "own.jsonl", [chat("Mine."), chat("Answer 7."), chat("Answer 8.")])
    first, _ = run([source], tmp_path / "alone", heldout_ratio=0.3)
    sources = [Source(source), Source(own, heldout=True)]
    ledger, reused = prepare(sources, tmp_path / "out", TOKENIZER, Recipe(max_length=256, heldout_ratio=0.3), workers=1)
    before, after = (open_prepared(tmp_path / name, seq_len=256, vocab_size=100_000) for name in ("alone", "out"))
    assert answers(after.train) == answers(before.train)
    assert answers(after.heldout) == [*answers(before.heldout), "Mine.", "Answer 7.", "Answer 8."]
    trained = sum(text in answers(after.train) for text in ("Answer 7.", "Answer 8."))
    assert (ledger.in_both_splits, ledger.duplicates, first.in_both_splits, reused) == (trained, 2, 0, False)
    assert trained == 2, "or another pair must be chosen"


def test_missing_sources_and_templates_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.sources is empty"):
        check_sources("data.sources", [])
    with pytest.raises(UserError, match=r"prompts names .*gone\.jsonl, which does not exist"):
        check_sources("prompts", [str(tmp_path / "gone.jsonl")])
    with pytest.raises(UserError, match="no chat template"):
        prepare([], tmp_path / "out", chat_tokenizer(None), Recipe(max_length=9, heldout_ratio=0), workers=1)


def test_a_dataset_for_another_vocabulary_is_refused(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "data", documents=8, max_length=32, vocab_size=500, seed=0)
    open_prepared(tmp_path / "data", seq_len=128, vocab_size=500)
    with pytest.raises(UserError, match="holds token id 498, the target's vocabulary ends at 99"):
        open_prepared(tmp_path / "data", seq_len=128, vocab_size=100)


def contents(out: Path) -> dict[str, bytes]:
    """Everything that is not the time of a file."""
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_gives_the_same_bytes(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "CHUNK_ROWS", 7)
    rows = [b"bad" if number % 11 == 3 else chat(f"Answer {number}.") for number in range(100)]
    source = write(tmp_path / "a.jsonl", rows)
    run([source], tmp_path / "one", heldout_ratio=0.2)
    run([source], tmp_path / "many", heldout_ratio=0.2, workers=workers)
    assert contents(tmp_path / "one") == contents(tmp_path / "many")
    assert len(list((tmp_path / "one" / "train").iterdir())) == 15


def test_a_killed_preparation_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped inside a chunk: what is done is kept, and the result is that of a run which never stopped."""
    monkeypatch.setattr(preparation, "CHUNK_ROWS", 10)
    source = write(tmp_path / "a.jsonl", [chat(f"Answer {number}.") for number in range(50)])
    run([source], tmp_path / "whole")
    encode, calls = Encoder.__call__, []

    def dying(self: Encoder, document: Any) -> Encoded:
        calls.append(document)
        if len(calls) == 27:
            raise KeyboardInterrupt
        return encode(self, document)

    monkeypatch.setattr(Encoder, "__call__", dying)
    with pytest.raises(KeyboardInterrupt):
        run([source], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run([source], tmp_path / "out")
    assert len(calls) == 27 + 30  # two chunks of ten were done
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_weights_and_caps(tmp_path: Path) -> None:
    """Whole weights repeat, fractions choose by text, caps count rows as they come; held-out rows stand once."""
    rows = [chat(f"Answer {number}.") for number in range(200)]
    a, b = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", [chat(f"Other {n}.") for n in range(200)])
    sources = [Source(a, weight=2.5, max_rows=120), Source(b, weight=0.25)]
    recipe = Recipe(max_length=256, heldout_ratio=0.1)
    ledger, _ = prepare(sources, tmp_path / "out", TOKENIZER, recipe, workers=1)
    data = open_prepared(tmp_path / "out", seq_len=256, vocab_size=100_000)
    counts = Counter(answers(data.train))
    first = {text: count for text, count in counts.items() if text.startswith("Answer")}
    assert set(first.values()) == {2, 3}
    assert 2.35 < sum(first.values()) / len(first) < 2.65
    assert all(int(text.split()[1].rstrip(".")) < 120 for text in first)
    second = [text for text in counts if text.startswith("Other")]
    assert 25 < len(second) < 65
    assert all(counts[text] == 1 for text in second)
    assert max(Counter(answers(data.heldout)).values()) == 1
    assert ledger.rows_in == 320 == sum(ledger.rows.values()) + ledger.dropped.total()
    assert ledger.dropped == {"left out by data.weights": 320 - sum(ledger.rows.values())}


@pytest.mark.parametrize("silent", [False, True])
def test_too_many_bad_rows_are_an_error_with_the_commonest_reasons(
    tmp_path: Path, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no progress bar counts them."""
    monkeypatch.setattr(preparation, "tqdm", partial(tqdm, disable=silent))
    source = write(tmp_path / "a.jsonl", [chat("Fine."), b"bad", {"messages": []}, b"bad", chat("Good.")])
    assert run([source], tmp_path / "out", max_bad_rows=3)[0].dropped.total() == 3
    message = r"data\.max_bad_rows is 2; 3 of the first 5 rows were dropped \(not a JSON row: 2, no messages: 1\)"
    with pytest.raises(UserError, match=message):
        run([source], tmp_path / "other", max_bad_rows=2)


def test_a_changed_template_or_tokenizer_is_redone(tmp_path: Path) -> None:
    source, recipe = Source(write(tmp_path / "a.jsonl", [chat("One.")])), Recipe(max_length=99, heldout_ratio=0.0)
    first, _ = prepare([source], tmp_path / "out", chat_tokenizer(), recipe, workers=1)
    changed = chat_tokenizer(CHATML.replace("<|im_end|>\n", "<|im_end|>\n\n"))
    second, reused = prepare([source], tmp_path / "out", changed, recipe, workers=1)
    assert not reused
    assert first.fingerprint != second.fingerprint
    assert prepare([source], tmp_path / "out", changed, recipe, workers=1)[1]


def test_lengths_and_counts_of_the_ledger_by_hand(tmp_path: Path) -> None:
    rows = [
        {"input_ids": list(range(5, 5 + length)), "loss_mask": [0] + [1] * (length - 1)} for length in (3, 4, 5, 17)
    ]
    ledger, _ = run(
        [write(tmp_path / "a.jsonl", [*rows, {"input_ids": [1, 2], "loss_mask": [0, 1]}])], tmp_path / "out"
    )
    assert ledger.lengths == {"4": 2, "8": 1, "32": 1}
    assert (ledger.tokens["train"], ledger.supervised_tokens["train"], ledger.max_token_id) == (29, 25, 21)
    assert ledger.dropped == {"fewer than two supervised tokens in a row": 1}
    assert read_ledger(tmp_path / "out") == ledger
