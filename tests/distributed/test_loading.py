"""What loading a sharded target costs in host memory."""

import threading
import time
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from dflash_data.target import find_target
from dflash_data.weights import load_module
from dflash_model.taps import decoder_of
from support.ranks import run_ranks

RANKS, LAYERS = 5, 6


def anonymous_bytes() -> int:
    """Of this process: memory that no file stands behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def write_checkpoint(folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=16_000, hidden_size=768, intermediate_size=3072, num_hidden_layers=LAYERS, num_attention_heads=12,
        num_key_value_heads=4,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="40MB")


def test_ranks_together_hold_one_copy(tmp_path: Path) -> None:
    """The most that each of five ranks ever has beyond its start, summed up, is their shards and little more."""
    folder = tmp_path / "target"
    run_ranks(lambda _: write_checkpoint(folder), 1, tmp_path)  # in a process of its own, whose memory goes with it

    def work(rank: int) -> tuple[int, int]:
        target, mesh = find_target(str(folder), None), DeviceMesh("cpu", list(range(RANKS)))
        decoder = decoder_of(target.build_meta(torch.bfloat16, LAYERS))
        assert isinstance(decoder, PreTrainedModel)
        for part in (*decoder.layers, decoder):
            fully_shard(part, mesh=mesh)
        before, most, done = anonymous_bytes(), 0, threading.Event()

        def sample() -> None:
            nonlocal most
            while not done.is_set():
                most = max(most, anonymous_bytes())
                time.sleep(0.0005)

        sampler = threading.Thread(target=sample)
        sampler.start()
        load_module(decoder, target.weights(), torch.device("cpu"), torch.bfloat16)
        done.set()
        sampler.join()
        return max(most, anonymous_bytes()) - before, sum(part.numel() for part in decoder.parameters()) * 2

    results = run_ranks(work, RANKS, tmp_path)
    held, one_copy = sum(part for part, _ in results), results[0][1]
    assert one_copy > 100e6
    assert 0.9 * one_copy < held < 1.2 * one_copy, f"{held / one_copy:.2f} copies"
