"""A tiny drafter that has learnt its target's own greedy texts by heart, trained by the product's own step."""

from functools import cache

import numpy as np
import torch
from transformers import PreTrainedModel

from dflash_data.ends import FrozenEnds
from dflash_data.packs import HiddenPack, make_blocks
from dflash_data.schedule import Stream, WorkItem
from dflash_model import DFlash2Config, Drafter, generate
from dflash_model.blocks import anchor_candidates, default_gamma
from dflash_model.taps import context_features, text_config
from dflash_train.step import DraftStep, Tally
from support.tiny import tiny_config, tiny_target

PROMPTS = ([3, 17, 5, 90, 41], [7, 7, 30], list(range(50, 70)), [100, 2])
TEXT = 40


def draft_step(drafter: Drafter, target: PreTrainedModel) -> DraftStep:
    """The training step's forward with the target's own ends."""
    ends = FrozenEnds(target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach())
    return DraftStep(drafter, ends, torch.float32, chunk_rows=64, sparse=False)


def as_pack(target: PreTrainedModel, drafter: Drafter, prompt: list[int], text: list[int]) -> HiddenPack:
    """One prompt and response as a row, a block at every candidate."""
    ids = np.array(prompt + text, dtype=np.int32)
    doc, mask = np.zeros_like(ids), np.arange(len(ids)) >= len(prompt)
    anchors, block_size = anchor_candidates(mask, doc), drafter.config.block_size
    blocks = make_blocks(ids, mask, doc, anchors, len(anchors), block_size, default_gamma(block_size))
    host = {"input_ids_S": torch.from_numpy(ids), "position_S": torch.arange(len(ids)), **blocks}
    context_SE = context_features(target, ids.tolist(), drafter.config.target_layer_ids)
    return HiddenPack(WorkItem(0, Stream.TRAIN, 0), {**host, "context_SE": context_SE}, host, {})


@cache
def overfitted(
    family: str, layers: tuple[str, ...], steps: int = 150, dflash2: DFlash2Config | None = None
) -> tuple[PreTrainedModel, Drafter, float]:
    """Target, drafter and the last slot accuracy. One drafter per family and layout for the whole test session."""
    target = tiny_target(family)
    goal = text_config(target.config)
    config = tiny_config(layers, num_target_layers=goal.num_hidden_layers, target_layer_ids=(1, 2, 4), dflash2=dflash2)
    drafter = Drafter(config)
    with torch.no_grad():
        for name, tensor in Drafter.initial_tensors(config, torch.Generator().manual_seed(0)):
            drafter.get_parameter(name).copy_(tensor)
    texts = [generate(None, target, prompt, max_new_tokens=TEXT).token_ids for prompt in PROMPTS]
    packs = [as_pack(target, drafter, prompt, text) for prompt, text in zip(PROMPTS, texts, strict=True)]
    step, optimizer = draft_step(drafter, target), torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(steps):
        tally = Tally.of(config, torch.device("cpu"))
        for pack in packs:
            loss, weight = step.loss(pack, tally)
            (loss / weight / len(packs)).backward()
        tally.commit(torch.tensor(True))
        optimizer.step()
        optimizer.zero_grad()
    accuracy = Tally.read(tally.sums.tolist(), config.block_size)["acc"]
    return target, drafter.eval().requires_grad_(False), accuracy
