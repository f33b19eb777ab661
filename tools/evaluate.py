"""Measure a drafter by drafting: python tools/evaluate.py drafter.path=DIR target.path=NAME prompts=file.jsonl

Answers every prompt with the real cached loop, reports acceptance length and speed; the last line is one JSON object.
"""

import json
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from dflash_data.chat import render
from dflash_data.regenerate import prompt_of, stop_token_ids
from dflash_data.sources import check_sources, read_rows
from dflash_model import Generation, UserError, generate
from dflash_train.cli import parse, run_tool
from dflash_train.config import TargetSection, key
from dflash_train.evaluate import Acceptance
from generate import DrafterPath, load_pair


@dataclass
class EvaluateConfig:
    """One pass over a file of prompts."""

    config: str = key("", "YAML file that the other keys override")
    drafter: DrafterPath = field(default_factory=DrafterPath)
    target: TargetSection = field(default_factory=TargetSection)
    prompts: list[str] = key([], "JSONL files with messages; a last assistant turn is left out")
    limit: int = key(0, "use only the first prompts; 0 for all")
    max_new_tokens: int = key(256, "longest answer")
    compare: bool = key(True, "answer without drafting too: speed-up and equal texts")


def acceptance(results: list[Generation]) -> Acceptance:
    """Tokens and rounds of each prompt; the first token comes from the prefill and counts as neither."""
    counts = np.array([(sum(result.committed), len(result.committed)) for result in results], dtype=np.int64)
    return Acceptance(counts[:, 0], counts[:, 1])


def main(argv: list[str]) -> int:
    """Evaluate."""
    config = parse(EvaluateConfig, argv, __doc__ or "")
    sources = [
        source
        for source in read_rows(check_sources("prompts", config.prompts))
        if source.row and source.row["messages"]
    ]
    sources = sources[: config.limit or None]
    if not sources:
        raise UserError(f"prompts ({', '.join(config.prompts)}) has no row with messages")
    drafter, target, tokenizer = load_pair(config.drafter.path, config.target)
    stops = stop_token_ids(target, tokenizer)
    drafted: list[Generation] = []
    plain: list[Generation] = []
    domains: dict[str, list[Generation]] = defaultdict(list)
    for source in tqdm(sources, unit="prompt"):
        assert source.row is not None
        ids = render(
            tokenizer, prompt_of(source.row["messages"]), generation_prompt=True, **config.target.template_options
        )
        result = generate(drafter, target, ids, max_new_tokens=config.max_new_tokens, stop_token_ids=stops)
        drafted.append(result)
        domains[str(source.row.get("domain", "all"))].append(result)
        if config.compare:
            plain.append(generate(None, target, ids, max_new_tokens=config.max_new_tokens, stop_token_ids=stops))
    whole = acceptance(drafted)
    low, high = whole.interval()
    report = {
        "prompts": len(drafted),
        "acceptance_pooled": whole.pooled,
        "acceptance_mean": whole.mean,
        "interval": [low, high],
        "tokens": int(whole.tokens.sum()),
        "target_forwards": int(whole.rounds.sum()),
        "domains": {name: acceptance(results).pooled for name, results in sorted(domains.items())},
        "tokens_per_second": float(whole.tokens.sum()) / sum(result.decode_seconds for result in drafted),
    }
    interval = f"[{low:.3f}, {high:.3f}]"
    print(f"acceptance {whole.pooled:.3f} {interval} pooled, {whole.mean:.3f} per prompt, {len(drafted)} prompts")
    for name, value in report["domains"].items():
        print(f"  {name}: {value:.3f}")
    if plain:
        speed_up = sum(result.decode_seconds for result in plain) / sum(result.decode_seconds for result in drafted)
        equal = sum(a.token_ids == b.token_ids for a, b in zip(drafted, plain, strict=True))
        report |= {"speed_up": speed_up, "texts_equal": equal}
        print(f"speed-up {speed_up:.2f}x, texts equal {equal} of {len(drafted)} ({config.target.dtype})")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    run_tool(main)
