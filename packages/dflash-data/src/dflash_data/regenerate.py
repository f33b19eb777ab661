"""Replace the responses of conversations by the target's own greedy output.

A drafter learns what the target would say, so it is trained on text the target itself produced; published drafters
are trained this way (paper, appendix A.1). The last assistant turn is generated from everything before it.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash_data.chat import render

Row = dict[str, Any]


def prompt_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation up to the turn that is to be generated."""
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


@torch.inference_mode()
def greedy_responses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], max_new_tokens: int
) -> list[list[int]]:
    """Decode one batch greedily; each response ends with its stop token unless it reached the limit."""
    width = max(map(len, prompts))
    stop_ids = stop_token_ids(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    decode = cast(Callable[..., torch.Tensor], model.generate)
    out = decode(
        input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad,
        eos_token_id=stop_ids,
    )  # fmt: skip
    responses = []
    for row in out[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row))
        responses.append(row[:end])
    return responses


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a turn: the tokenizer's and the generation config's."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    many = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in [*many, tokenizer.eos_token_id] if token is not None})


def regenerate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Row],
    *,
    target_name: str,
    max_new_tokens: int,
    options: dict[str, Any],
) -> list[Row | None]:
    """Answer one batch of rows; None where the response does not survive decoding and encoding.

    Such a response cannot be stored as text without changing its tokens, so the caller counts and drops it. A row
    that reached ``max_new_tokens`` says ``finish_reason: length``: the target did not end that turn.
    """
    conversations = [prompt_of(row["messages"]) for row in rows]
    prompts = [render(tokenizer, messages, generation_prompt=True, **options) for messages in conversations]
    stops = set(stop_token_ids(model, tokenizer))
    results: list[Row | None] = []
    responses = greedy_responses(model, tokenizer, prompts, max_new_tokens)
    for row, messages, response in zip(rows, conversations, responses, strict=True):
        stopped = response[-1] in stops
        body = response[:-1] if stopped else response
        text = str(tokenizer.decode(body))
        if not body or tokenizer.encode(text, add_special_tokens=False) != body:
            results.append(None)
            continue
        results.append(
            {
                **row,
                "messages": [*messages, {"role": "assistant", "content": text}],
                "finish_reason": "stop" if stopped else "length",
                "generated_by": target_name,
            }
        )
    return results
