"""Draft with a drafter: python tools/generate.py drafter.path=DIR target.path=NAME prompt="…"

Streams the text, then answers again without drafting and compares: acceptance length, tokens per second, same text.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from dflash_data.chat import load_tokenizer, render
from dflash_data.regenerate import stop_token_ids
from dflash_data.target import find_target
from dflash_model import Drafter, Generation, Sampling, UserError, generate, load_drafter
from dflash_model.compare import Divergence, first_divergence
from dflash_train.card import trained_template_options
from dflash_train.cli import parse, run_tool
from dflash_train.config import TargetSection, key
from dflash_train.job import dtype_of


@dataclass
class DrafterPath:
    """The drafter to use."""

    path: str = key("", "folder with config.json and model.safetensors (runs/…/checkpoints/step-N/dflash)")


@dataclass
class GenerateConfig:
    """One prompt."""

    config: str = key("", "YAML file that the other keys override")
    drafter: DrafterPath = field(default_factory=DrafterPath)
    target: TargetSection = field(default_factory=TargetSection)
    prompt: str = key("", "the user's turn")
    max_new_tokens: int = key(256, "longest answer")
    temperature: float = key(0.0, "0 is greedy; above it, text is sampled with the target's own distribution")
    top_k: int = key(0, "sample from the k most likely tokens; 0 for all")
    top_p: float = key(1.0, "sample from the most likely tokens that reach this probability")
    seed: int | None = key(None, "of the sampling; not set: another text each time")
    stop: list[str] = key([], "texts that end the answer")
    compare: bool = key(True, "answer again without drafting and compare")


def load_pair(drafter_path: str, section: TargetSection) -> tuple[Drafter, PreTrainedModel, PreTrainedTokenizerBase]:
    """Drafter, target and tokenizer on the best device here.

    The options of the chat template that the drafter was trained with join those of ``section``, which come first.

    Raises:
        UserError: one is missing, or they do not belong together.
    """
    if not drafter_path:
        raise UserError("drafter.path is not set; it takes a drafter's folder")
    trained = trained_template_options(Path(drafter_path))
    section.template_options = trained | section.template_options
    if section.template_options:
        print(f"chat template with {section.template_options}; trained with {trained}", file=sys.stderr)
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", dtype_of("target.dtype", section.dtype)
    target = find_target(section.path, None)
    drafter = load_drafter(Path(drafter_path), dtype=dtype, device=device)
    drafter.config.check_fits(target.config, f"drafter.path ({drafter_path})", f"target.path ({section.path})")
    model = (
        AutoModelForCausalLM.from_pretrained(target.location, dtype=dtype, trust_remote_code=False).to(device).eval()
    )
    return drafter, model, load_tokenizer(section.tokenizer or target.location, section.template_options)


def describe(name: str, result: Generation) -> str:
    """One line of statistics."""
    rounds = max(len(result.committed), 1)
    per_round = (
        f"{result.draft_seconds / rounds * 1e3:.1f} ms draft + {result.verify_seconds / rounds * 1e3:.1f} ms verify"
    )
    return (
        f"{name}: {len(result.token_ids)} tokens, acceptance length {result.acceptance_length:.2f} over"
        f" {len(result.committed)} rounds ({per_round} a round), {result.tokens_per_second:.1f} tokens/s"
    )


def describe_divergence(found: Divergence, dtype: str) -> str:
    """Where two greedy texts part, and whether rounding explains it."""
    if found.margin is None:
        return f"texts differ from token {found.position}: one ends there ({dtype})"
    return (
        f"texts differ from token {found.position}, where the target's logits of the two tokens differ by"
        f" {found.margin:.3g} (largest logit {found.largest:.3g}; {dtype}: a block and single steps round differently)"
    )


class TextStream:
    """Prints text as its tokens come, never half a character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = ""

    def __call__(self, new: list[int]) -> None:
        """Show what the new tokens complete."""
        self._tokens += new
        text = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True)).rstrip("\ufffd")
        if text.startswith(self._shown):  # not while a character's bytes are incomplete
            print(text[len(self._shown) :], end="", flush=True)
            self._shown = text


def main(argv: list[str]) -> int:
    """Answer one prompt twice."""
    config = parse(GenerateConfig, argv, __doc__ or "")
    if not config.prompt:
        raise UserError('prompt is not set; give it as prompt="…"')
    if config.max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {config.max_new_tokens}; it must be at least 1")
    sampling = Sampling(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, seed=config.seed)
    drafter, target, tokenizer = load_pair(config.drafter.path, config.target)
    turn = [{"role": "user", "content": config.prompt}]
    ids = render(tokenizer, turn, generation_prompt=True, **config.target.template_options)

    def answer(who: Drafter | None, stream: TextStream | None) -> Generation:
        return generate(
            who, target, ids, max_new_tokens=config.max_new_tokens, sampling=sampling,
            stop_token_ids=stop_token_ids(target, tokenizer), stop_strings=config.stop, tokenizer=tokenizer,
            on_tokens=stream,
        )  # fmt: skip

    drafted = answer(drafter, TextStream(tokenizer))
    print("\n" + describe("with drafting   ", drafted))
    if not config.compare:
        return 0
    plain = answer(None, None)
    print(describe("without drafting", plain))
    print(f"speed-up {drafted.tokens_per_second / plain.tokens_per_second:.2f}x" if plain.committed else "one token")
    if not sampling.greedy:
        return 0  # two draws from one distribution
    found = first_divergence(target, ids, plain.token_ids, drafted.token_ids)
    if found is None:
        print("texts equal")
        return 0
    print(describe_divergence(found, config.target.dtype), file=sys.stderr)
    return 1 if config.target.dtype == "float32" else 0


if __name__ == "__main__":
    run_tool(main)
