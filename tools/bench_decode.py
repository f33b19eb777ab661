"""Time generate() on random weights: what a drafter of a given acceptance length gains with a target of a given size.

A random drafter is never accepted, so a real one's forward is run and its answer replaced: from the known greedy text,
``accepted`` right tokens and then a wrong one. Draft and verify cost what they cost; only the luck is made up.
"""

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dflash_model import (
    DFlash2Config,
    DraftCache,
    Drafter,
    DrafterConfig,
    DraftInputs,
    Generation,
    UserError,
    generate,
)
from dflash_model import default_target_layer_ids as default_taps
from dflash_model.config import FULL
from dflash_train.cli import parse
from dflash_train.config import key
from dflash_train.job import dtype_of

TARGETS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
    "qwen3.5-9b": {"model_type": "qwen3_5_text"},  # a hybrid; transformers' defaults are this model
    "tiny": {
        "model_type": "qwen3_5_text", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
}  # fmt: skip


@dataclass
class DecodeBench:
    """One prompt, several texts."""

    config: str = key("", "YAML file that the other keys override")
    preset: str = key("qwen3-8b", f"target: {', '.join(TARGETS)}")
    accepted: int = key(4, "proposals accepted in every round")
    num_layers: int = key(5, "drafter layers")
    dflash2: bool = key(False, "with DFlash2's convolutions and selector")
    block_size: int = key(16, "K")
    prompt_tokens: int = key(512, "length of the prompt")
    new_tokens: int = key(128, "length of the text")
    dtype: str = key("bfloat16", "of both models")
    repeats: int = key(3, "texts counted; one more is the warm-up")


class ScriptedDrafter(Drafter):
    """Computes everything, then proposes ``accepted`` tokens of the known text and a wrong one."""

    def script(self, text: list[int], accepted: int, head_VD: Tensor) -> "ScriptedDrafter":
        """Set what to propose: prompt and text from position 0."""
        self.text, self.accepted, self.head_VD = text, accepted, head_VD
        return self

    def forward(self, inputs: DraftInputs, cache: DraftCache | None = None) -> Tensor:
        """Hidden states whose logits are largest at the scripted tokens: the head's own random rows."""
        super().forward(inputs, cache)
        begin = int(inputs.block_position_BQ[0, 0])
        right = [self.text[min(begin + slot, len(self.text) - 1)] for slot in range(self.config.block_size)]
        tokens = [token if slot <= self.accepted else (token + 1) % 100 for slot, token in enumerate(right)]
        return self.head_VD[torch.tensor(tokens, device=self.head_VD.device)][None]


def build_target(bench: DecodeBench, device: torch.device) -> PreTrainedModel:
    """A target of random weights, made on the device, that has a clear favourite everywhere.

    Random weights alone leave many tokens nearly equal; in bf16 a block and single steps would then choose differently,
    and no text could be known. So the residual stream is dominated by the token's embedding, and the head maps it to
    another token: the text walks through a permutation, while every layer costs what it costs.
    """
    if bench.preset not in TARGETS:
        raise UserError(f"preset is {bench.preset}; it takes {', '.join(TARGETS)}")
    config = AutoConfig.for_model(**TARGETS[bench.preset])
    torch.manual_seed(0)
    with device:
        target = AutoModelForCausalLM.from_config(config, dtype=dtype_of("dtype", bench.dtype)).eval()
        rows_VD = torch.randn(config.vocab_size, config.hidden_size, dtype=target.dtype)
        order = torch.randperm(config.vocab_size)
    with torch.no_grad():
        target.get_input_embeddings().weight.copy_(100 * rows_VD)  # type: ignore[operator, union-attr]
        target.get_output_embeddings().weight = torch.nn.Parameter(rows_VD[order])  # type: ignore[union-attr]
    return target


def build_drafter(bench: DecodeBench, target: PreTrainedModel) -> ScriptedDrafter:
    """A drafter of the published shape with random weights."""
    goal = target.config
    config = DrafterConfig(
        hidden_size=goal.hidden_size, intermediate_size=goal.intermediate_size, num_layers=bench.num_layers,
        num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=goal.vocab_size,
        num_target_layers=goal.num_hidden_layers, target_layer_ids=default_taps(goal.num_hidden_layers, 5),
        block_size=bench.block_size, mask_token_id=goal.vocab_size - 1, layer_types=(FULL,) * bench.num_layers,
        dflash2=DFlash2Config() if bench.dflash2 else None,
    )  # fmt: skip
    with target.device:
        drafter = ScriptedDrafter(config).to(target.dtype).eval().requires_grad_(False)
    for name, tensor in Drafter.initial_tensors(config, torch.Generator().manual_seed(0)):
        drafter.get_parameter(name).copy_(tensor)
    return drafter


def bench_decode(argv: list[str]) -> dict[str, Any]:
    """Plain decoding, then drafted decoding of the same text."""
    bench = parse(DecodeBench, argv, __doc__ or "")
    for name, value, least in (("new_tokens", bench.new_tokens, 2), ("repeats", bench.repeats, 1)):
        if value < least:
            raise UserError(f"{name} is {value}; it must be at least {least}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = build_target(bench, device)
    drafter = build_drafter(bench, target)
    prompt = torch.randint(100, target.config.vocab_size - 1, (bench.prompt_tokens,)).tolist()
    plain = [generate(None, target, prompt, max_new_tokens=bench.new_tokens) for _ in range(bench.repeats + 1)][1:]
    head = target.get_output_embeddings()
    assert head is not None
    drafter.script([*prompt, *plain[0].token_ids], bench.accepted, head.weight)  # type: ignore[arg-type]
    drafted = [generate(drafter, target, prompt, max_new_tokens=bench.new_tokens) for _ in range(bench.repeats + 1)][1:]

    def median(results: list[Generation], name: str) -> float:
        return statistics.median(getattr(result, name) for result in results)

    rounds = len(drafted[0].committed)
    return {
        "bench": "decode", "preset": bench.preset, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "dflash2": bench.dflash2,
        "block_size": bench.block_size, "acceptance_length": median(drafted, "acceptance_length"),
        "target_forwards_per_round": (drafted[0].target_forwards - 1) / rounds,
        "draft_ms_per_round": median(drafted, "draft_seconds") / rounds * 1e3,
        "verify_ms_per_round": median(drafted, "verify_seconds") / rounds * 1e3,
        "plain_ms_per_token": 1e3 / median(plain, "tokens_per_second"),
        "drafted_tokens_s": median(drafted, "tokens_per_second"), "plain_tokens_s": median(plain, "tokens_per_second"),
        "speed_up": median(drafted, "tokens_per_second") / median(plain, "tokens_per_second"),
        "texts_equal": drafted[0].token_ids == plain[0].token_ids,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }  # fmt: skip
