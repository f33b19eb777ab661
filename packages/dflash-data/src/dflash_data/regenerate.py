"""Replace the responses of conversations by the target's own.

A drafter learns what the target would say, so it is trained on text the target itself produced; published drafters
are trained this way (paper, appendix A.1). The last assistant turn is generated from everything before it, by a server
(completions.py) or here, in batches.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from dflash_data.chat import render
from dflash_data.completions import Completion, Failure, JsonObject
from dflash_data.conversation import Conversation, Refused, as_document
from dflash_data.sources import SourceRow
from dflash_model.errors import UserError
from dflash_model.sampling import Sampling, draw
from dflash_model.taps import text_config

Row = dict[str, Any]
KEY = "regenerated_from"
SORTED = 1 << 16  # prompts rendered and sorted by length at a time
MAY_BE_ABSENT = ("usage", "retokenized")  # so those of an earlier regeneration must not stay


@dataclass(frozen=True)
class Decoding:
    """How responses are generated.

    Attributes:
        sampling: row i uses ``seed + i``.
        max_new_tokens: the longest response.
        template_options: passed to the chat template.
    """

    sampling: Sampling
    max_new_tokens: int
    template_options: JsonObject = field(default_factory=dict)

    def of_row(self, number: int) -> Sampling:
        """The sampling of one row: equal prompts are to get different answers, the same ones in every run."""
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=seed + number)

    def record(self, number: int) -> JsonObject:
        """What stands in the row; the options as text, as Parquet would give all rows the keys of each."""
        sampling, options = self.of_row(number), json.dumps(self.template_options, sort_keys=True)
        return {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "seed": sampling.seed, "max_new_tokens": self.max_new_tokens, "template_options": options,
        }  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """A conversation up to the turn that is to be generated.

    Attributes:
        file: where its row stands.
        line: the line there, from 1.
        number: the row's place in the whole input, from 0.
        row: all of it.
        messages: the turns before the one to be generated, in the usual spelling.
        tools: definitions of the tools that the target may call.
    """

    file: str
    line: int
    number: int
    row: Row
    messages: list[JsonObject]
    tools: list[JsonObject] | None = None

    def request(self, model: str, decoding: Decoding) -> JsonObject:
        """The body of a chat completion.

        Everything that shapes the distribution is sent: both servers take what is left out from the model's
        generation_config.json. All tokens are top_k -1, as SGLang refuses 0.
        """
        sampling = decoding.of_row(self.number)
        body: JsonObject = {
            "model": model, "messages": [_as_sent(message) for message in self.messages],
            "max_tokens": decoding.max_new_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0,
        }  # fmt: skip
        body |= {} if sampling.seed is None else {"seed": sampling.seed}
        body |= {"tools": self.tools} if self.tools else {}
        return body | ({"chat_template_kwargs": decoding.template_options} if decoding.template_options else {})

    def answered(self, answer: Completion, decoding: Decoding, generated_by: str) -> Row:
        """The row with its new last turn, and all that is known about it; its other turns stay as they are."""
        turns = self.row.get("messages")
        kept = self.messages if turns is None else turns[: len(self.messages)]
        row = {name: value for name, value in self.row.items() if name not in MAY_BE_ABSENT} | {
            "messages": [*kept, answer.message],
            "finish_reason": answer.finish_reason,
            "generated_by": generated_by,
            "sampling": decoding.record(self.number),
            KEY: f"{self.file}:{self.line}",
        }
        row |= {} if answer.usage is None else {"usage": answer.usage}
        return row | ({"retokenized": True} if answer.retokenized else {})


def prompt_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation up to the turn that is to be generated."""
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def read_prompt(source: SourceRow, number: int) -> Prompt | Failure:
    """The conversation of a row as tools/prepare.py reads it, or why there is none."""
    if source.row is None:
        return Failure(str(source.problem))
    try:
        asked = _asked(source.row)
        json.dumps(source.row, ensure_ascii=False).encode()
    except Refused as refused:
        return Failure(refused.args[0])
    except UnicodeEncodeError:
        return Failure("not valid Unicode")
    except TypeError as error:  # Parquet has dates and bytes
        return Failure(f"the row cannot be written as JSON: {error}")
    return Prompt(source.file, source.line, number, source.row, asked.messages, asked.tools)


def _asked(row: Row) -> Conversation:
    name = "messages" if row.get("messages") is not None else "conversations"
    turns = row.get(name)
    if isinstance(turns, list) and turns:
        # Without an assistant turn nothing could be learnt from a row, but a prompt needs none.
        row = {**row, name: [*turns, {"role": "assistant", "content": "to be generated"}]}
    document = as_document(row)
    if not isinstance(document, Conversation):
        raise Refused("plain text or tokens, no conversation")
    messages = document.messages[:-1] if isinstance(turns, list) else document.messages
    return replace(document, messages=prompt_of(messages))


def _as_sent(message: JsonObject) -> JsonObject:
    """The API has the arguments of tool calls as JSON text; templates, and so our messages, as objects."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def digest(path: Path) -> str:
    """Of a source's content; of a folder that datasets saved, of the file with its fingerprint.

    Raises:
        UserError: it is a name of the hub.
    """
    if not path.exists():
        raise UserError(f"prompts names {path} of the hub, which may change between two runs; save it to a file first")
    with (path / "state.json" if path.is_dir() else path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Marks:
    """Lines of files, a byte for each: a set would take a hundred, and there may be millions."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}

    def __contains__(self, place: tuple[str, int]) -> bool:
        marks = self.files.get(place[0], b"")
        return place[1] < len(marks) and bool(marks[place[1]])

    def add(self, file: str, line: int) -> None:
        """Mark a line."""
        marks = self.files.setdefault(file, bytearray())
        marks.extend(bytes(max(0, line + 1 - len(marks))))
        marks[line] = 1


class Drawing(LogitsProcessor):
    """Leaves a greedy decoder one token to take: the drawn one.

    Each row has random numbers of its own, so what is drawn does not depend on the batch that a row is in.
    """

    def __init__(self, samplings: list[Sampling], device: torch.device) -> None:
        self.samplings = samplings
        self.generators = [sampling.generator(device) for sampling in samplings]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        """Scores of the next token, ``[batch, vocabulary]``."""
        p = self.samplings[0].probabilities(scores)  # they differ in their seeds only
        tokens = torch.stack([draw(row[None], source)[0] for row, source in zip(p, self.generators, strict=True)])
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens[:, None], 0.0)


@torch.inference_mode()
def decode_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    samplings: list[Sampling],
    max_new_tokens: int,
) -> list[list[int]]:
    """Answer one batch; each response ends with its stop token unless it reached the limit."""
    width = max(map(len, prompts))
    stop_ids = stop_token_ids(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    decode = cast(Callable[..., Tensor], model.generate)
    # transformers makes each preallocated cache at least as long as the longest before, to spare compiled graphs.
    vars(model).pop("_previous_max_cache_length", None)
    drawing = [] if samplings[0].greedy else [Drawing(samplings, model.device)]
    out = decode(
        input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad,
        eos_token_id=stop_ids, logits_processor=LogitsProcessorList(drawing),
        repetition_penalty=1.0,  # some models' generation_config.json has another
        **(_PREALLOCATED if _attends_only(model) else {}),
    )  # fmt: skip
    responses = []
    for row in out[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row))
        responses.append(row[:end])
    return responses


# A cache that grows by a token is copied at every token. Its own graphs would be compiled for every batch's shape.
_PREALLOCATED = {"cache_implementation": "static", "disable_compile": True}


def _attends_only(model: PreTrainedModel) -> bool:
    """Whether every layer keeps keys and values of the whole text, which is what a preallocated cache is for."""
    config = text_config(model.config)
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    return set(kinds) == {"full_attention"} and not getattr(config, "num_kv_shared_layers", None)


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a turn: the tokenizer's and the generation config's."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    many = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in [*many, tokenizer.eos_token_id] if token is not None})


@dataclass(frozen=True)
class LocalTarget:
    """A target on this machine, which answers in batches.

    Attributes:
        model: the target.
        tokenizer: its own.
        options: passed to its chat template.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    options: JsonObject

    def answer_all(
        self, prompts: Iterable[Prompt], decoding: Decoding, batch_tokens: int
    ) -> Iterator[tuple[Prompt, Completion | Failure]]:
        """Answer prompts, of ``SORTED`` at a time the long ones first.

        A step costs about the same for few rows and for many until memory is busy, so a batch holds as many rows as
        fit: its longest prompt and the longest response, times its rows, is at most ``batch_tokens`` (or it has one
        row). Sorted, short prompts do not pay for long ones, and what does not fit into memory fails at once.
        """
        left = iter(prompts)
        while window := list(islice(left, SORTED)):
            good: list[tuple[Prompt, list[int]]] = []
            for prompt in window:
                ids = self._render(prompt)
                if isinstance(ids, Failure):
                    yield prompt, ids
                else:
                    good.append((prompt, ids))
            good.sort(key=lambda one: len(one[1]), reverse=True)
            while good:
                rows = max(1, batch_tokens // (len(good[0][1]) + decoding.max_new_tokens))
                batch, good = good[:rows], good[rows:]
                yield from self._answer_batch(batch, decoding)

    def _answer_batch(
        self, batch: Sequence[tuple[Prompt, list[int]]], decoding: Decoding
    ) -> Iterator[tuple[Prompt, Completion | Failure]]:
        samplings = [decoding.of_row(prompt.number) for prompt, _ in batch]
        ids = [ids for _, ids in batch]
        found = decode_batch(self.model, self.tokenizer, ids, samplings, decoding.max_new_tokens)
        for (prompt, asked), response in zip(batch, found, strict=True):
            yield prompt, self._read(asked, response)

    def _render(self, prompt: Prompt) -> list[int] | Failure:
        options = {**self.options, "tools": prompt.tools} if prompt.tools else self.options
        try:
            return render(self.tokenizer, prompt.messages, generation_prompt=True, **options)
        except (TemplateError, TypeError) as error:  # templates refuse by the first, and trip over odd rows by both
            return Failure(f"the chat template refuses it: {error}")

    def _read(self, prompt: list[int], response: list[int]) -> Completion | Failure:
        """A response as text. It stays if that is encoded to other tokens than the target wrote, and says so."""
        stopped = response[-1] in stop_token_ids(self.model, self.tokenizer)
        body = response[:-1] if stopped else response
        if not body:
            return Failure("the answer is empty")
        text = str(self.tokenizer.decode(body))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(response)}
        retokenized = self.tokenizer.encode(text, add_special_tokens=False) != body
        message = {"role": "assistant", "content": text}
        return Completion(message, "stop" if stopped else "length", usage, retokenized=retokenized)
