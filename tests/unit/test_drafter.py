"""The drafter against z-lab's package, and the packed training forward against the cached drafting loop."""

import dflash.model as reference
import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from conftest import Hold
from dflash_model import DraftCache, DrafterConfig, DraftInputs
from dflash_model.attention import Mask
from dflash_model.blocks import first_of_document
from dflash_model.config import FULL, SLIDING
from dflash_model.drafter import draft_logits, embed_block
from dflash_model.layout import to_published
from dflash_model.mask import dense_mask
from support.tiny import packed_row, tiny_config, tiny_drafter

REFERENCE = "z-lab dflash 0.1.0"
LAYOUTS = {"full": (FULL, FULL), "4+1": (SLIDING,) * 4 + (FULL,), "sliding": (SLIDING, SLIDING)}


def masks_for(config: DrafterConfig, first: torch.Tensor, anchor: torch.Tensor, context: int) -> dict[str, Mask]:
    return {
        kind: dense_mask(
            first, anchor, context, config.block_size, window=config.window(kind), causal=config.causal_in_block(kind)
        )
        for kind in set(config.layer_types)
    }


def reference_model(
    config: DrafterConfig, state: dict[str, torch.Tensor], dtype: torch.dtype
) -> reference.DFlashDraftModel:
    model = reference.DFlashDraftModel(Qwen3Config(**to_published(config))).to(dtype).eval()
    missing = model.load_state_dict(state, strict=True)
    assert not missing.missing_keys
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_equals_the_reference_with_and_without_cache(
    layout: str, block_size: int, dtype: torch.dtype, tolerance: float, hold: Hold
) -> None:
    """One drafting call after 21 context tokens, whole and fed to the cache in two parts."""
    config = tiny_config(LAYOUTS[layout], block_size=block_size, sliding_window=18 if layout != "full" else None)
    drafter = tiny_drafter(config, dtype)
    theirs = reference_model(config, drafter.state_dict(), dtype)
    torch.manual_seed(2)
    context_len, early = 21, 13
    context = torch.randn(1, context_len, config.context_size, dtype=dtype)
    block = torch.randn(1, block_size, config.hidden_size, dtype=dtype)
    positions = torch.arange(context_len + block_size)[None]
    with torch.no_grad():
        expected = theirs(position_ids=positions, noise_embedding=block, target_hidden=context)

    edge = torch.tensor([[context_len]])
    masks = masks_for(config, torch.zeros_like(edge), edge, context_len)
    whole = DraftInputs(block, context, positions[:, :context_len], positions[:, context_len:], masks)
    with torch.no_grad():
        name = f"drafter outputs, {layout}, block 8 and 16, {str(dtype).removeprefix('torch.')}"
        hold(name, REFERENCE, float((drafter(whole) - expected).abs().max()), tolerance)
        cache = DraftCache()
        early_edge = torch.tensor([[early]])
        drafter(
            DraftInputs(
                block, context[:, :early], positions[:, :early], positions[:, early : early + block_size],
                masks_for(config, torch.zeros_like(early_edge), early_edge, early),
            ),
            cache,
        )  # fmt: skip
        later = DraftInputs(
            block, context[:, early:], positions[:, early:context_len], positions[:, context_len:], masks
        )
        hold(f"{name}, cached", REFERENCE, float((drafter(later, cache) - expected).abs().max()), tolerance)
    assert cache.length == context_len


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_forward_equals_drafting(layout: str, hold: Hold) -> None:
    """Every block of a packed row equals a drafting call that sees only its own document's context."""
    config = tiny_config(LAYOUTS[layout])
    drafter = tiny_drafter(config)
    rng = np.random.default_rng(3)
    _, _, doc = packed_row(rng, 3, 90)
    position = np.concatenate([np.arange((doc == number).sum()) for number in (0, 1, 2, -1)])
    anchors = np.sort(np.concatenate([np.flatnonzero(doc == number)[[0, 5, -1]] for number in (0, 1, 2)])).astype(
        np.int32
    )
    first = torch.from_numpy(first_of_document(doc, anchors)).long()[None]
    anchor = torch.from_numpy(anchors).long()[None]
    torch.manual_seed(4)
    context = torch.randn(1, 90, config.context_size)
    blocks = torch.randn(1, len(anchors), config.block_size, config.hidden_size)
    block_position = torch.from_numpy(position[anchors])[:, None] + torch.arange(config.block_size)
    packed = DraftInputs(
        blocks.flatten(1, 2), context, torch.from_numpy(position)[None], block_position.view(1, -1),
        masks_for(config, first, anchor, 90),
    )  # fmt: skip
    with torch.no_grad():
        hidden = drafter(packed).view(len(anchors), config.block_size, -1)
        for index, (begin, at) in enumerate(zip(first[0].tolist(), anchors.tolist(), strict=True)):
            length = at - begin
            edge = torch.tensor([[length]])
            alone = DraftInputs(
                blocks[:, index], context[:, begin:at], torch.arange(length)[None],
                torch.arange(length, length + config.block_size)[None],
                masks_for(config, torch.zeros_like(edge), edge, length),
            )  # fmt: skip
            difference = float((drafter(alone)[0] - hidden[index]).abs().max())
            hold(f"packed training forward, {layout}", "drafting call at each anchor", difference, 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_leaks_into_a_block(layout: str) -> None:
    """Context at or after the anchor, other documents and other blocks change nothing; the token before does."""
    config = tiny_config(LAYOUTS[layout])
    drafter = tiny_drafter(config)
    first, anchor = torch.tensor([[0, 0, 40]]), torch.tensor([[10, 14, 50]])
    torch.manual_seed(5)
    context, blocks = torch.randn(1, 64, config.context_size), torch.randn(1, 24, config.hidden_size)
    masks = masks_for(config, first, anchor, 64)
    positions = torch.arange(64)[None], (anchor[0][:, None] + torch.arange(8)).view(1, -1)

    def run(context: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return drafter(DraftInputs(blocks, context, *positions, masks)).view(3, 8, -1)

    base = run(context, blocks)
    for touched, changed in ((12, {1}), (9, {0, 1}), (39, set()), (45, {2}), (50, set()), (14, set())):
        other = context.clone()
        other[0, touched] += 1
        found = run(other, blocks)
        assert {index for index in range(3) if not torch.equal(found[index], base[index])} == changed
    other = blocks.clone()
    other[0, 8:16] += 1
    found = run(context, other)
    assert torch.equal(found[0], base[0])
    assert torch.equal(found[2], base[2])
    assert not torch.equal(found[1], base[1])


def test_ends_equal_the_references(hold: Hold) -> None:
    """Embedding scale, logit factor and cap: under z-lab's keys, applied as z-lab does."""
    config = tiny_config(input_embedding_scale=7.5, output_multiplier=0.25, final_logit_softcapping=3.0)
    drafter = tiny_drafter(config, torch.float64)
    theirs = reference_model(config, drafter.state_dict(), torch.float64)
    torch.manual_seed(6)
    embedding, head = (
        torch.nn.Embedding(131, 64, dtype=torch.float64),
        torch.nn.Linear(64, 131, False, dtype=torch.float64),
    )
    target = torch.nn.Module()
    target.get_input_embeddings = lambda: embedding  # type: ignore[assignment]
    hidden, ids = torch.randn(3, 64, dtype=torch.float64), torch.tensor([3, 130, 130])
    with torch.no_grad():
        scale = float(reference._draft_value(theirs.config, "input_embedding_scale", 1.0))
        ours = embed_block(config, ids, embedding.weight)
        difference = float((ours - reference._raw_input_embeddings(target, ids, scale)).abs().max())
        hold("scaled block embedding, float64", REFERENCE, difference, 1e-10)
        logits = draft_logits(config, hidden, head.weight)
        assert logits.abs().max() < 3.0
        difference = float((logits - theirs.compute_logits(hidden, head)).abs().max())
        hold("logits with factor and cap, float64", REFERENCE, difference, 1e-10)
