"""Run a function on several forked ranks over gloo, with a file for rendezvous: no ports, about a second."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(function: Callable[[int], Any], world_size: int, scratch: Path, timeout: float = 120) -> list[Any]:
    """Call ``function(rank)`` in ``world_size`` processes with an initialised default group.

    Returns:
        What each rank returned, in order.

    Raises:
        AssertionError: with the traceback of the first rank that failed, or when one does not finish in time.
    """
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    rendezvous = scratch / f"rendezvous-{os.urandom(4).hex()}"

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
            value = function(rank)
            dist.barrier()
            dist.destroy_process_group()
            results.put((rank, value, None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
            raise

    processes = [context.Process(target=work, args=(rank,), daemon=True) for rank in range(world_size)]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        for process in processes:
            process.join(timeout)
            while not results.empty():
                rank, value, error = results.get()
                assert error is None, f"rank {rank} failed:\n{error}"
                found[rank] = value
        assert sorted(found) == list(range(world_size)), f"only ranks {sorted(found)} finished within {timeout:.0f} s"
    finally:
        for process in processes:
            process.kill()
    return [found[rank] for rank in range(world_size)]
