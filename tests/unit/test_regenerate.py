"""Regenerating responses: what is stored is what the target said, and a stopped run continues."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from dflash_data.chat import ChatEncoder, render
from dflash_data.regenerate import greedy_responses, regenerate
from dflash_model import UserError
from regenerate import Progress
from support.tiny import DENSE
from support.tokenizer import chat_tokenizer


def test_stored_text_is_the_targets_greedy_text() -> None:
    """Batched and padded equals one by one, and the supervised tokens of the stored row are those tokens."""
    tokenizer = chat_tokenizer()
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**{**DENSE, "vocab_size": len(tokenizer)})).eval()
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("hi", "what is it?", "a b c d e f")]
    found = regenerate(model, tokenizer, rows, target_name="tiny", max_new_tokens=12, options={})
    kept = 0
    for row, new in zip(rows, found, strict=True):
        prompt = render(tokenizer, row["messages"], generation_prompt=True)
        alone = greedy_responses(model, tokenizer, [prompt], 12)[0]
        if new is None:
            assert tokenizer.encode(tokenizer.decode(alone), add_special_tokens=False) != alone
            continue
        kept += 1
        encoded = ChatEncoder(tokenizer, {}, 512)(new["messages"], ended=new["finish_reason"] == "stop")
        assert [i for i, m in zip(encoded.input_ids, encoded.loss_mask, strict=True) if m] == alone
        assert new["generated_by"] == "tiny"
    assert kept


def test_a_stopped_run_continues_after_its_last_batch(tmp_path: Path) -> None:
    out, settings = tmp_path / "new" / "out.jsonl", {"target": "t"}
    progress = Progress.open(out, settings)
    progress.add([{"n": 1}, None])
    with out.open("a") as file:
        file.write('{"n": 2')  # killed while writing
    again = Progress.open(out, settings)
    assert (again.done, again.dropped) == (2, 1)
    again.add([{"n": 3}])
    assert out.read_text() == '{"n": 1}\n{"n": 3}\n'
    with pytest.raises(UserError, match="written with other settings"):
        Progress.open(out, {"target": "other"})
    (tmp_path / "mine.jsonl").write_text("{}")
    with pytest.raises(UserError, match="not written by this tool"):
        Progress.open(tmp_path / "mine.jsonl", settings)
