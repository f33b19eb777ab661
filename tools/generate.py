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
from dflash_model import Drafter, Generation, UserError, generate, load_drafter
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
    compare: bool = key(True, "answer again without drafting and compare")


def load_pair(drafter_path: str, section: TargetSection) -> tuple[Drafter, PreTrainedModel, PreTrainedTokenizerBase]:
    """Drafter, target and tokenizer on the best device here.

    Raises:
        UserError: one is missing, or they do not belong together.
    """
    if not drafter_path:
        raise UserError("drafter.path is not set; it takes a drafter's folder")
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", dtype_of("target.dtype", section.dtype)
    target = find_target(section.path, None)
    drafter = load_drafter(Path(drafter_path), dtype=dtype, device=device)
    drafter.config.check_fits(target.config, f"drafter.path ({drafter_path})", f"target.path ({section.path})")
    model = AutoModelForCausalLM.from_pretrained(target.location, dtype=dtype).to(device).eval()
    return drafter, model, load_tokenizer(section.tokenizer or target.location)


def describe(name: str, result: Generation) -> str:
    """One line of statistics."""
    return (
        f"{name}: {len(result.token_ids)} tokens, acceptance length {result.acceptance_length:.2f} over"
        f" {len(result.committed)} rounds, {result.tokens_per_second:.1f} tokens/s"
    )


def main(argv: list[str]) -> int:
    """Answer one prompt twice."""
    config = parse(GenerateConfig, argv, __doc__ or "")
    if not config.prompt:
        raise UserError('prompt is not set; give it as prompt="…"')
    drafter, target, tokenizer = load_pair(config.drafter.path, config.target)
    ids = render(
        tokenizer,
        [{"role": "user", "content": config.prompt}],
        generation_prompt=True,
        **config.target.template_options,
    )
    stops = stop_token_ids(target, tokenizer)
    shown: list[int] = []

    def stream(new: list[int]) -> None:
        before = tokenizer.decode(shown, skip_special_tokens=True)
        shown.extend(new)
        print(tokenizer.decode(shown, skip_special_tokens=True)[len(before) :], end="", flush=True)

    drafted = generate(
        drafter, target, ids, max_new_tokens=config.max_new_tokens, stop_token_ids=stops, on_tokens=stream
    )
    print("\n" + describe("with drafting   ", drafted))
    if not config.compare:
        return 0
    plain = generate(None, target, ids, max_new_tokens=config.max_new_tokens, stop_token_ids=stops)
    print(describe("without drafting", plain))
    print(f"speed-up {plain.decode_seconds / drafted.decode_seconds:.2f}x")
    if plain.token_ids == drafted.token_ids:
        print("texts equal")
        return 0
    at = next((i for i, (a, b) in enumerate(zip(plain.token_ids, drafted.token_ids, strict=False)) if a != b), -1)
    print(
        f"texts differ from token {at} ({config.target.dtype}; in bfloat16 a block and single steps can round"
        " differently)",
        file=sys.stderr,
    )
    return 1 if config.target.dtype == "float32" else 0


if __name__ == "__main__":
    run_tool(main)
