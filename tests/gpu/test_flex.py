"""On a GPU: flex_attention with the block-sparse mask equals SDPA with the dense one, forward and backward."""

import pytest
import torch

from dflash_model import DraftInputs
from dflash_model.attention import HOPPER, Mask, attend, check_flash
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


@pytest.mark.parametrize("window", [None, 1000])
def test_flash_equals_flex(window: int | None) -> None:
    """In bf16, packed and not: as near to fp32 as flex_attention's own kernels are, values and gradients."""
    if torch.cuda.get_device_capability()[0] != HOPPER:
        pytest.skip("needs a Hopper GPU")
    pytest.importorskip("flash_attn.cute", reason="needs flash-attn-4")
    check_flash("flash", torch.device("cuda"))
    num, context, block_size = 64, 1024, 16
    generator = torch.Generator().manual_seed(0)
    anchor = torch.randint(0, context, (1, num), generator=generator).sort().values.cuda()
    keys, rows = context + num * block_size, (anchor // 300 * 300, anchor, context, block_size)
    query = torch.randn(1, 8, num * block_size, 128, generator=generator).cuda()
    key, value = torch.randn(2, 1, 2, keys, 128, generator=generator).cuda()
    weight = torch.randn(query.shape, generator=generator).cuda()
    masks = {build: build(*rows, window=window, causal=False) for build in (dense_mask, sparse_mask)}

    def run(mask: Mask, dtype: torch.dtype, *, flash: bool = False) -> list[torch.Tensor]:
        inputs = [x.detach().to(dtype, copy=True).requires_grad_() for x in (query, key, value)]
        out = attend(*inputs, mask, flash=flash)
        return [x.float() for x in (out.detach(), *torch.autograd.grad(out, inputs, weight.to(dtype)))]

    exact = run(masks[dense_mask], torch.float32)
    flex, flash = (run(masks[sparse_mask], torch.bfloat16, flash=flash) for flash in (False, True))
    for name, truth, one, other in zip(("out", "query", "key", "value"), exact, flex, flash, strict=True):
        errors = [float((x - truth).norm() / truth.norm()) for x in (one, other)]
        assert errors[1] < 1.2 * errors[0] < 0.02, f"{name}: {errors}"
