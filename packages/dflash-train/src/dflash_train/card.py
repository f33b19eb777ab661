"""The README.md of an exported drafter: what it is for, what it learnt from, how it is served.

Only what the checkpoint knows is stated; what it does not know is called unknown.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_model import DrafterConfig, UserError
from dflash_model.config import SLIDING
from dflash_train.metrics import EVALUATIONS, read_jsonl
from dflash_train.retention import MANIFEST

TEMPLATE = """---
base_model: {quoted}
tags: [dflash, speculative-decoding]
---

# {method} drafter for {target}

Proposes {proposals} tokens at a time for `{target}`, from that model's own hidden states; the target checks them, so
its text stays what it was. It works with this target only, and has no embedding or head of its own.

| | |
|---|---|
| target | `{target}`, {num_target_layers} layers, width {hidden_size}, vocabulary {vocab_size} |
| tapped layers | {taps} (0-based, the output of each) |
| block | {block_size} tokens, the anchor included; mask token {mask_token_id} |
| layers | {layers} |
| data | {data} |
| chat template | {options} |
| trained | {trained} |
| held-out acceptance length | {acceptance} |

## Serving

SGLang counts the whole block:

```
python -m sglang.launch_server --model-path {target} \\
    --speculative-algorithm DFLASH --speculative-draft-model-path {folder} \\
    --speculative-num-draft-tokens {block_size}
```

vLLM counts the proposals:

```
vllm serve {target} \\
    --speculative-config '{{"method": "dflash", "model": "{folder}", "num_speculative_tokens": {proposals}}}'
```
{note}
## Python

```python
import dflash_model
drafter = dflash_model.load_drafter("{folder}", dtype=target.dtype, device=target.device)
out = dflash_model.generate(drafter, target, prompt_ids, max_new_tokens=256)
```

Trained with DFlash-Train. The algorithm is that of the DFlash paper (arXiv 2602.06036).
"""
DFLASH2_NOTE = (
    "\nSGLang serves DFlash2 since its #35371, vLLM since its #52816 (with the V2 model runner); what is older would"
    " leave a part of the drafter out.\n"
)
HYBRID_NOTE = "\nThe layers mix sliding and full attention: vLLM serves such drafters with its V2 model runner only.\n"
UNKNOWN = "unknown (exported from a bare drafter, not from a training checkpoint)"


@dataclass(frozen=True)
class Origin:
    """Where an exported drafter comes from.

    Attributes:
        drafter: folder in the published layout.
        manifest: the checkpoint's, empty for a bare drafter.
        evaluation: the row of the run's ``evaluations.jsonl`` for the checkpoint's step, if any.
    """

    drafter: Path
    manifest: dict[str, Any]
    evaluation: dict[str, Any] | None

    @classmethod
    def find(cls, folder: Path) -> "Origin":
        """A training checkpoint (``step-N``) or a bare drafter.

        Raises:
            UserError: the folder is neither.
        """
        if folder.name == "dflash" and (folder.parent / MANIFEST).is_file():
            folder = folder.parent  # the drafter in a checkpoint: what the checkpoint knows is told too
        manifest = folder / MANIFEST
        if not manifest.is_file():
            if not (folder / "config.json").is_file():
                raise UserError(
                    f"checkpoint.path is {folder}; it is neither a checkpoint (runs/…/checkpoints/step-N, with"
                    f" {MANIFEST}) nor a drafter's folder (with config.json)"
                )
            return cls(folder, {}, None)
        try:
            facts = json.loads(manifest.read_text())
            step = facts["step"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UserError(
                f"checkpoint.path is {folder}; its {MANIFEST} is not that of a checkpoint: {error!r}"
            ) from error
        rows = [row for row in read_jsonl(folder.parent.parent / EVALUATIONS) if row["step"] == step]
        return cls(folder / "dflash", facts, rows[-1] if rows else None)


def model_card(config: DrafterConfig, origin: Origin, folder: str, target: str | None) -> str:
    """The text of README.md.

    Args:
        config: the drafter's.
        origin: where it comes from.
        folder: how the serving commands call the exported drafter.
        target: name of the target where the checkpoint does not say it.

    Raises:
        UserError: nothing says what the target is.
    """
    facts = origin.manifest.get("facts", {})
    target = target or facts.get("target")
    if target is None:
        raise UserError("target is not set, and the checkpoint does not name its target; give it as target=NAME")
    mixed = len(set(config.layer_types)) > 1
    return TEMPLATE.format(
        method="DFlash" if config.dflash2 is None else "DFlash2",
        target=target,
        quoted=json.dumps(target, ensure_ascii=False),  # JSON is YAML
        folder=folder,
        proposals=config.block_size - 1,
        block_size=config.block_size,
        num_target_layers=config.num_target_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        taps=", ".join(map(str, config.target_layer_ids)),
        mask_token_id=config.mask_token_id,
        layers=_layers(config),
        data=_data(facts),
        options=_options(facts),
        trained=_trained(origin.manifest, facts),
        acceptance=_acceptance(origin.evaluation) if facts else UNKNOWN,
        note=(DFLASH2_NOTE if config.dflash2 else "") + (HYBRID_NOTE if mixed else ""),
    )


def _layers(config: DrafterConfig) -> str:
    """How many, and who sees whom; servers derive the same from the configuration."""
    parts = []
    for kind in dict.fromkeys(config.layer_types):
        reach = f"sliding over {config.sliding_window} tokens" if kind == SLIDING else "full"
        inside = "causal" if config.causal_in_block(kind) else "bidirectional"
        parts.append(f"{config.layer_types.count(kind)} {reach}, {inside} in the block")
    if config.dflash2 is not None:
        parts.append(
            f"convolutions over {config.dflash2.conv_kernel_size} slots; a selector among"
            f" {config.dflash2.selector_top_k} candidates"
        )
    return "; ".join(parts)


def _data(facts: dict[str, Any]) -> str:
    if not facts:
        return UNKNOWN
    data = facts["data"]
    wrote = ", ".join(f"{name} ({count})" for name, count in sorted(data["generated_by"].items())) or "not recorded"
    return (
        f"{', '.join(data['sources'])}: {data['rows']} conversations, {data['tokens']} tokens,"
        f" {data['supervised_tokens']} of them supervised; responses (held-out ones too) written by: {wrote}"
    )


def _options(facts: dict[str, Any]) -> str:
    if "template_options" not in facts:
        return "not recorded" if facts else UNKNOWN
    options = json.dumps(facts["template_options"])
    return (
        f"rendered with `{options}`; ask servers for it too, as `chat_template_kwargs`" if options != "{}" else "as is"
    )


def trained_template_options(drafter: Path) -> dict[str, Any]:
    """What the chat template got where a drafter in a checkpoint was trained; nothing where that is not known."""
    manifest = drafter.expanduser().parent / MANIFEST
    if drafter.name != "dflash" or not manifest.is_file():
        return {}
    return Origin.find(drafter.expanduser()).manifest.get("facts", {}).get("template_options", {})


def _trained(manifest: dict[str, Any], facts: dict[str, Any]) -> str:
    if not facts:
        return UNKNOWN
    tokens = manifest["step"] * manifest["trainer.packs_per_step"] * manifest["data.seq_len"]
    epochs = f": {manifest['step'] / facts['epoch_steps']:.2f} epochs" if "epoch_steps" in facts else ""
    began = f", starting from {facts['init_from']}" if facts.get("init_from") else ""
    return (
        f"{manifest['step']} of {manifest['trainer.steps']} steps of {manifest['trainer.packs_per_step']} rows of"
        f" {manifest['data.seq_len']} tokens ({tokens} in all, padding included{epochs}), conversations up to"
        f" {facts['data']['longest']}"
        f" tokens, {manifest['data.anchors_per_pack']} anchors a row{began}"
    )


def _acceptance(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not evaluated at this step"
    return (
        f"{row['pooled']:.3f} (95 % interval over prompts {row['low']:.3f} to {row['high']:.3f}) pooled over rounds,"
        f" {row['mean']:.3f} mean of {row['prompts']} prompts ({row['name']}, greedy, the target's own token included)"
    )
