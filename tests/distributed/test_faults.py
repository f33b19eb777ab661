"""The quick part of the fault matrix (tests/faults.py), and what a rank does with signals by itself."""

import multiprocessing
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_train import stop as stopping
from dflash_train.situation import Peer, Situation
from dflash_train.stop import Stop
from faults import CELLS, Outcome, run_cell


def test_two_jobs_at_the_same_second_one_killed_one_stopped(tmp_path: Path) -> None:
    wanted = ("sigkill-step-13-1", "sigterm-step-13-torchrun")
    cells = [replace(cell, ranks=(1, 1)) for cell in CELLS if cell.name in wanted]  # each start imports on 2 cores

    def run(number: int) -> Outcome:
        folder = tmp_path / wanted[number]
        folder.mkdir()
        return run_cell(cells[number], folder)

    with ThreadPoolExecutor(2) as pool:
        killed, stopped = pool.map(run, range(2))
    assert "drafter rank 1 (pid" in killed.words
    assert "To go on: torchrun --standalone --nproc-per-node 2 tools/train.py" in stopped.words
    shutil.rmtree(tmp_path)


def listening(signals: list[tuple[float, signal.Signals]], situation: Situation) -> tuple[int, str]:
    """A process whose main thread is busy for 20 s, and gets signals at these seconds; its exit code and last words."""
    log = situation.log
    assert log is not None

    def main() -> None:
        Stop().listen(situation)
        log.touch()
        time.sleep(20)

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    while not log.exists():
        time.sleep(0.01)
    began = time.monotonic()
    for at, number in signals:
        time.sleep(max(0.0, began + at - time.monotonic()))
        assert process.pid is not None
        os.kill(process.pid, number)
    process.join()
    assert process.exitcode is not None
    return process.exitcode, log.read_text()


def test_a_second_signal_leaves_at_once_and_an_echo_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "ECHO_SECONDS", 0.5)
    monkeypatch.setattr(stopping, "GRACE_SECONDS", 5.0)
    twice = [(0.0, signal.SIGINT), (0.1, signal.SIGINT), (1.0, signal.SIGTERM)]
    code, words = listening(twice, Situation(3, "drafter rank", tmp_path / "log", "saving step 4"))
    assert code == 128 + signal.SIGTERM
    assert words == "error: drafter rank 3, saving step 4: SIGTERM again: leaving at once, nothing more is saved\n"


def test_a_rank_that_cannot_agree_leaves_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "GRACE_SECONDS", 0.5)
    code, words = listening([(0.0, signal.SIGTERM)], Situation(0, "target rank", tmp_path / "log", "making a pack"))
    assert code == 1
    assert "no agreement within 0 s; what was saved before stays" in words


@pytest.mark.parametrize(("harm", "word"), [(signal.SIGKILL, "gone"), (signal.SIGSTOP, "stopped")])
def test_a_rank_sees_neighbours_that_are_gone_or_frozen(tmp_path: Path, harm: signal.Signals, word: str) -> None:
    neighbour = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    neighbour.start()
    assert neighbour.pid is not None
    peer = Peer(5, "drafter rank", os.uname().nodename, neighbour.pid)
    assert peer.condition() is None
    os.kill(neighbour.pid, harm)
    while peer.condition() is None:
        time.sleep(0.01)
    code, words = listening([(0.0, signal.SIGTERM)], Situation(0, "target rank", tmp_path / "log", peers=[peer]))
    neighbour.kill()
    assert code == 1
    assert f"drafter rank 5 (pid {neighbour.pid}) is {word}" in words
