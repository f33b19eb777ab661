"""The parts that DFlash2 adds against z-lab's package, and that they change nothing before they have learnt."""

from typing import Any

import dflash.model as reference
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import Qwen3Config

from conftest import Hold
from dflash_model import DFlash2Config, DraftCache, Drafter, DrafterConfig, DraftInputs, UserError
from dflash_model.attention import Mask
from dflash_model.config import FULL, SLIDING
from dflash_model.dflash2 import CandidateSelector
from dflash_model.drafter import draft_candidates, rope_tables
from dflash_model.layout import to_published
from dflash_model.mask import dense_mask
from support.tiny import DFLASH2, tiny_config, tiny_drafter

REFERENCE = "z-lab dflash 0.1.0"
LAYOUTS: dict[str, tuple[tuple[str, ...], bool | None]] = {
    "full": ((FULL, FULL), False), "4+1": ((SLIDING,) * 4 + (FULL,), None), "sliding": ((SLIDING, SLIDING), False),
}  # fmt: skip
PUBLISHED = DFlash2Config(conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16)


def config_of(layout: str, block_size: int = 8, added: DFlash2Config = DFLASH2) -> DrafterConfig:
    layers, is_causal = LAYOUTS[layout]
    window = 18 if SLIDING in layers else None
    return tiny_config(layers, block_size=block_size, sliding_window=window, is_causal=is_causal, dflash2=added)


def masks_for(config: DrafterConfig, context: int) -> dict[str, Mask]:
    edge = torch.tensor([[context]])
    return {
        kind: dense_mask(
            torch.zeros_like(edge), edge, context, config.block_size,
            window=config.window(kind), causal=config.causal_in_block(kind),
        )
        for kind in set(config.layer_types)
    }  # fmt: skip


def reference_model(config: DrafterConfig, state: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """Theirs keeps the codebooks in embeddings; files do not."""
    model = reference.DFlash2DraftModel(Qwen3Config(**to_published(config))).to(dtype).eval()
    model.load_state_dict({f"{name}.weight" if "_codebook" in name else name: t for name, t in state.items()})
    return model


@pytest.mark.parametrize("added", [DFLASH2, PUBLISHED], ids=["odd", "published"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_equals_the_reference_with_and_without_cache(
    added: DFlash2Config, layout: str, block_size: int, dtype: torch.dtype, tolerance: float, hold: Hold
) -> None:
    """One drafting call after 21 context tokens, whole and fed to the cache in two parts."""
    config = config_of(layout, block_size, added)
    drafter = tiny_drafter(config, dtype)
    theirs = reference_model(config, drafter.state_dict(), dtype)
    torch.manual_seed(2)
    length, early = 21, 13
    context = torch.randn(1, length, config.context_size, dtype=dtype)
    block = torch.randn(1, block_size, config.hidden_size, dtype=dtype)
    positions = torch.arange(length + block_size)[None]
    name = f"DFlash2 outputs, {layout}, block 8 and 16, {str(dtype).removeprefix('torch.')}"
    with torch.no_grad():
        expected = theirs(position_ids=positions, noise_embedding=block, target_hidden=context)
        whole = DraftInputs(block, context, positions[:, :length], positions[:, length:], masks_for(config, length))
        hold(name, REFERENCE, float((drafter(whole) - expected).abs().max()), tolerance)
        cache = DraftCache()
        begin = DraftInputs(
            block, context[:, :early], positions[:, :early], positions[:, early : early + block_size],
            masks_for(config, early),
        )  # fmt: skip
        drafter(begin, cache)
        later = DraftInputs(
            block, context[:, early:], positions[:, early:length], positions[:, length:], masks_for(config, length)
        )
        hold(f"{name}, cached", REFERENCE, float((drafter(later, cache) - expected).abs().max()), tolerance)


def test_a_block_sees_no_other_block() -> None:
    """Several blocks in one forward are each what they are alone, and no slot depends on a later one's neighbour."""
    config = config_of("full")
    drafter = tiny_drafter(config, torch.float64)
    torch.manual_seed(3)
    blocks, context = torch.randn(1, 3 * 8, 64).double(), torch.randn(1, 5, config.context_size).double()
    first, anchor, at = torch.zeros(1, 3, dtype=torch.long), torch.full((1, 3), 5), torch.arange(5, 13)
    masks: dict[str, Mask] = {FULL: dense_mask(first, anchor, 5, 8, window=None, causal=False)}
    with torch.no_grad():
        packed = drafter(DraftInputs(blocks, context, torch.arange(5)[None], at.repeat(3)[None], masks))
        for index in range(3):
            mine = slice(8 * index, 8 * index + 8)
            alone = drafter(DraftInputs(blocks[:, mine], context, torch.arange(5)[None], at[None], {}))
            torch.testing.assert_close(packed[:, mine], alone)


def selector_case(
    dtype: torch.dtype, seed: int, **changes: Any
) -> tuple[DrafterConfig, CandidateSelector, Any, Tensor, Any]:
    """Ours, theirs, drafter outputs and a head; weights so large that what stood before decides as much as logits."""
    config = tiny_config(dflash2=DFLASH2, **changes)
    drafter = tiny_drafter(config, dtype, seed)
    selector = drafter.candidate_selector
    assert selector is not None
    with torch.no_grad():
        for parameter in selector.parameters():
            parameter.mul_(3)
    theirs = reference_model(config, drafter.state_dict(), dtype)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(7, 64, generator=generator, dtype=dtype)
    head = torch.nn.Linear(64, 131, False, dtype=dtype)
    with torch.no_grad():
        head.weight.normal_(0, 0.3, generator=generator)
    return config, selector, theirs, hidden, head


@pytest.mark.parametrize("changes", [{}, {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}])
def test_greedy_walks_equal_the_references(changes: dict[str, float], hold: Hold) -> None:
    """Token by token; most walks leave the likeliest tokens somewhere."""
    apart = 0
    for seed in range(20):
        config, selector, theirs, hidden, head = selector_case(torch.float64, seed, **changes)
        anchor = torch.tensor(seed)
        with torch.no_grad():
            candidate, unary = draft_candidates(config, hidden, head.weight, selector.top_k)
            path, q = selector.walk(hidden, candidate, unary, anchor, 0.0, None)
            expected, *_ = theirs.propose(hidden[None], anchor[None], head, 0.0)
        assert q is None
        hold("greedy walk, 140 slots", f"{REFERENCE}, tokens that differ", int((path != expected[0]).sum()), 0)
        apart += int((path != head(hidden).argmax(-1)).any())
    assert apart > 10


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_sampled_walks_have_the_references_distribution(
    temperature: float, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    """What their sampler drew is given to ours (which slot's candidate stands where may differ): rows of q agree."""
    _, selector, theirs, hidden, head = selector_case(torch.float64, 5)
    torch.manual_seed(1)
    path, candidate, q = (x[0] for x in theirs.propose(hidden[None], torch.tensor([9]), head, temperature))
    unary = head(hidden).gather(1, candidate)
    drawn = iter((candidate == path[:, None]).long().argmax(1))
    monkeypatch.setattr("dflash_model.dflash2.draw", lambda *_: next(drawn)[None])
    mine, mine_q = selector.walk(hidden, candidate, unary, torch.tensor(9), temperature, None)
    assert torch.equal(mine, path)
    assert mine_q is not None
    hold("q of a sampled walk", REFERENCE, float((mine_q - q).abs().max().detach()), 1e-6)


def test_scores_by_hand(hold: Hold) -> None:
    """One number at a time, in float64."""
    _, selector, _, hidden, _ = selector_case(torch.float64, 2)
    before, candidate = torch.randint(0, 131, (7, 2)), torch.randint(0, 131, (7, 6))
    unary = torch.randn(7, 6, dtype=torch.float64)
    with torch.no_grad():
        found = selector(hidden, before, candidate, unary)
        for slot, a, b in ((0, 0, 0), (3, 1, 5), (6, 0, 2)):
            gate = selector.hidden_projection.weight @ hidden[slot]
            left, right = (
                selector.predecessor_codebook[before[slot, a]],
                selector.successor_codebook[candidate[slot, b]],
            )
            expected = float(unary[slot, b] + sum(x * y * z for x, y, z in zip(gate, left, right, strict=True)))
            hold("selector score, float64", "by hand", abs(float(found[slot, a, b]) - expected), 1e-10)


def started(config: DrafterConfig) -> Drafter:
    drafter = Drafter(config)
    drafter.load_state_dict(dict(Drafter.initial_tensors(config, torch.Generator().manual_seed(0))))
    return drafter.eval()


def test_it_starts_as_the_dflash_drafter_of_the_same_seed() -> None:
    """To the last bit: outputs, and tokens behind the head."""
    plain, mine = started(tiny_config()), started(tiny_config(dflash2=DFLASH2))
    torch.manual_seed(0)
    inputs = DraftInputs(
        torch.randn(1, 16, 64), torch.randn(1, 5, plain.config.context_size), torch.arange(5)[None],
        torch.arange(5, 13).repeat(2)[None], {},
    )  # fmt: skip
    head, selector = torch.randn(131, 64), mine.candidate_selector
    assert selector is not None
    with torch.no_grad():
        hidden = mine(inputs)
        assert torch.equal(hidden, plain(inputs))
        candidate, unary = draft_candidates(mine.config, hidden[0, 1:8], head, selector.top_k)
        path, _ = selector.walk(hidden[0, 1:8], candidate, unary, torch.tensor(3), 0.0, None)
    assert torch.equal(path, (hidden[0, 1:8] @ head.T).argmax(-1))
    assert selector.predecessor_codebook.std().item() == pytest.approx(0.02, rel=0.1)


def test_every_new_part_learns_from_the_start() -> None:
    """Nothing that is zero keeps another zero from moving: all gradients are there after one step at the latest."""
    mine = started(tiny_config(dflash2=DFLASH2))
    torch.manual_seed(0)
    selector = mine.candidate_selector
    assert selector is not None
    inputs = DraftInputs(
        torch.randn(1, 8, 64), torch.randn(1, 5, mine.config.context_size), torch.arange(5)[None],
        torch.arange(5, 13)[None], {},
    )  # fmt: skip
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    before, candidate, unary = torch.randint(0, 131, (7, 1)), torch.randint(0, 131, (7, 6)), torch.randn(7, 6)
    for _ in range(2):
        optimizer.zero_grad()
        selector(mine(inputs)[0, 1:], before, candidate, unary).logsumexp(-1).sum().backward()
        optimizer.step()
    for name, parameter in mine.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0, name


def test_a_layer_is_one_graph() -> None:
    """Traced whole by Dynamo, as ``parallelize_drafter`` compiles it; gradients stay what they were."""
    layer = tiny_drafter(config_of("full")).layers[0]
    torch.manual_seed(0)
    rope = rope_tables(torch.cat((torch.arange(5), torch.arange(5, 13).repeat(2)))[None], 24, 1e4)
    inputs = [torch.randn(1, length, 64, requires_grad=True) for length in (16, 5)]
    counter, results = CompileCounter(), []
    for call in (layer, torch.compile(layer, dynamic=False, fullgraph=True, backend=counter)):
        out = call(*inputs, rope, None, None)
        results.append((out, *torch.autograd.grad(out.square().sum(), [*inputs, *layer.parameters()])))
    for plain, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, plain)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_kernel_size": 9}, r"drafter\.conv_kernel_size is 9; it takes 1 to drafter\.block_size \(8\)"),
        ({"conv_group_size": 24}, r"drafter\.conv_group_size is 24; it must divide the drafter's width \(64\)"),
        ({"selector_rank": 0}, r"drafter\.selector_rank is 0; it must be at least 1"),
        ({"selector_top_k": 1}, r"drafter\.selector_top_k is 1; it takes 2 to the size of the vocabulary \(131\)"),
        ({"selector_top_k": 132}, r"drafter\.selector_top_k is 132"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_config(dflash2=DFlash2Config(**changes))
