"""On a GPU: what is compiled computes what the plain code does, and copies to the device do not wait for it."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dflash_data.packs import TokenPack, staged
from dflash_data.schedule import Stream, WorkItem
from dflash_data.target import ShardedTarget, find_target
from dflash_model.config import FULL
from dflash_model.drafter import rope_tables
from dflash_train.loss import ROW_LOSSES, frozen_head_loss
from support.tiny import DFLASH2, FAMILIES, tiny_config, tiny_drafter, tiny_target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("kind", ROW_LOSSES)
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_compiled_loss(kind: str, softcap: float | None) -> None:
    """In bf16, for several numbers of rows; the plain one is held against fp64 elsewhere."""
    generator = torch.Generator("cuda").manual_seed(0)
    head = torch.randn(50_001, 64, device="cuda", generator=generator).bfloat16()
    for rows in (700, 513, 1, 1024):
        hidden, state = torch.randn(2, rows, 64, device="cuda", generator=generator).bfloat16()
        taught = torch.randint(0, 50_001, (rows,), device="cuda", generator=generator) if kind == "ce" else state
        results = []
        for compiled in (False, True):
            mine = hidden.clone().requires_grad_()
            loss, choice, *_ = frozen_head_loss(mine, head, taught, 256, kind=kind, softcap=softcap, compiled=compiled)
            loss.sum().backward()
            assert mine.grad is not None
            results.append((loss, mine.grad, choice))
        (loss, grad, choice), (fused_loss, fused_grad, fused_choice) = results
        torch.testing.assert_close(fused_loss, loss, rtol=1e-3, atol=1e-3)
        assert (fused_grad - grad).norm() < 1e-2 * grad.norm()
        assert (fused_choice == choice).float().mean() > 0.99  # equal logits may be told apart either way


def test_candidates_give_their_gradient_back() -> None:
    """Logits of the likeliest 16 tokens in bf16, and what goes back through their rows of the head alone."""
    generator = torch.Generator("cuda").manual_seed(0)
    head, hidden = (torch.randn(size, 64, device="cuda", generator=generator).bfloat16() for size in (50_001, 700))
    mine, plain = (hidden.clone().requires_grad_() for _ in range(2))
    label = torch.zeros(700, dtype=torch.long, device="cuda")
    rows = frozen_head_loss(mine, head, label, 256, softcap=20.0, compiled=True, top_k=16)
    logits = torch.tanh(plain.float() @ head.float().T / 20.0) * 20.0
    weight = torch.randn(700, 16, device="cuda", generator=generator)
    (rows.unary_RJ * weight).sum().backward()
    expected = logits.gather(1, rows.candidate_RJ)
    (expected * weight).sum().backward()
    assert mine.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(rows.unary_RJ, expected, rtol=1e-2, atol=1e-1)  # logits are made in bf16
    assert (mine.grad - plain.grad).norm() < 2e-2 * plain.grad.norm()
    found = rows.unary_RJ.sort(descending=True).values
    torch.testing.assert_close(found, logits.topk(16).values, rtol=1e-2, atol=1e-1)


def test_compiled_convolutions() -> None:
    """A DFlash2 layer, compiled whole: outputs and gradients of the plain one."""
    config = tiny_config((FULL,), dflash2=DFLASH2)
    plain, compiled = (tiny_drafter(config).cuda() for _ in range(2))
    compiled.layers[0].compile(dynamic=False, fullgraph=True)
    generator = torch.Generator("cuda").manual_seed(0)
    block, context = (torch.randn(1, length, 64, device="cuda", generator=generator) for length in (32, 20))
    rope = rope_tables(torch.arange(52, device="cuda")[None], 24, 1e4)
    outs = [drafter.layers[0](block, context, rope, None, None) for drafter in (plain, compiled)]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-3, atol=1e-3)
    for out in outs:
        out.square().mean().backward()
    for (name, one), other in zip(plain.layers.named_parameters(), compiled.layers.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (other.grad - one.grad).norm() < 2e-3 * one.grad.norm(), name


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cuda", [0])
    dist.destroy_process_group()


def packed(lengths: list[int]) -> TokenPack:
    """A row of documents with random tokens."""
    ids = np.random.default_rng(0).integers(0, 130, sum(lengths)).astype(np.int32)
    position = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    doc = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    nothing = torch.zeros(0)
    item = WorkItem(0, Stream.TRAIN, 0)
    fields = (torch.from_numpy(array) for array in (ids, position, doc))
    return TokenPack(item, *fields, nothing, nothing, nothing, nothing, nothing)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3_5_vl"])
def test_compiled_target(family: str, mesh: DeviceMesh, tmp_path: Path) -> None:
    """Rows of several documents and of one; a family that cannot be traced says so and stays right."""
    tiny_target(family).save_pretrained(tmp_path)
    target = ShardedTarget(find_target(str(tmp_path), None), (0, 2, 4), mesh=mesh, dtype=torch.float32, reshard=False)
    packs = [packed([100, 20, 8]), packed([128])]
    plain = [target(pack) for pack in packs]
    reason = target.compile(128)
    for before, pack in zip(plain, packs, strict=True):
        torch.testing.assert_close(target(pack), before, rtol=1e-3, atol=1e-3)
    if "moe" not in family:
        assert reason is None


def test_staged_copies_do_not_wait() -> None:
    """A copy of a megabyte behind half a second of work returns at once, and arrives whole."""
    work = torch.randn(8192, 8192, device="cuda")
    host = torch.arange(1 << 18, dtype=torch.int32)
    staged(host, work.device)  # the page-locked block is there from now on
    torch.cuda.synchronize()
    for _ in range(40):
        work = work @ work * 1e-4
    began = time.perf_counter()
    found = staged(host, work.device)
    launched = time.perf_counter() - began
    torch.cuda.synchronize()
    waited = time.perf_counter() - began
    assert launched < waited / 2
    assert torch.equal(found.cpu(), host)
