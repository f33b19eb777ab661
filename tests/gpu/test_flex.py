"""On a GPU: flex_attention with the block-sparse mask equals SDPA with the dense one, forward and backward."""

import pytest
import torch

from dflash_model import DraftInputs
from dflash_model.config import FULL, SLIDING
from dflash_model.mask import dense_mask, sparse_mask
from support.tiny import tiny_config, tiny_drafter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("block_size", [16, 8])
def test_flex_equals_dense(compiled: bool, block_size: int) -> None:
    config = tiny_config((SLIDING, FULL), block_size=block_size, head_dim=32, sliding_window=40)
    num, context = 512 // block_size, 384
    generator = torch.Generator().manual_seed(0)
    anchor = torch.randint(0, context, (num,), generator=generator).sort().values
    first = (anchor // 100 * 100).cuda()[None]  # documents of 100 tokens
    anchor = anchor.cuda()[None]
    block = torch.randn(1, num * block_size, config.hidden_size, generator=generator).cuda()
    features = torch.randn(1, context, config.context_size, generator=generator).cuda()
    positions = (
        torch.arange(context, device="cuda")[None],
        (anchor[..., None] + torch.arange(block_size, device="cuda")).view(1, -1),
    )
    weight = torch.randn(1, num * block_size, config.hidden_size, generator=generator).cuda()
    results = []
    for build in (dense_mask, sparse_mask):
        drafter = tiny_drafter(config).cuda()
        if compiled:
            for layer in drafter.layers:
                layer.compile(dynamic=False, fullgraph=True)
        masks = {
            kind: build(
                first, anchor, context, block_size, window=config.window(kind), causal=config.causal_in_block(kind)
            )
            for kind in (FULL, SLIDING)
        }
        out = drafter(DraftInputs(block, features, *positions, masks))
        (out * weight).sum().backward()
        results.append((out.detach(), {name: p.grad for name, p in drafter.named_parameters()}))
    (dense, dense_grads), (flex, flex_grads) = results
    torch.testing.assert_close(flex, dense, rtol=1e-3, atol=1e-3)
    for name, grad in dense_grads.items():
        error = (flex_grads[name] - grad).norm() / grad.norm()
        assert error < 2e-3, f"{name}: {error:.1e}"
