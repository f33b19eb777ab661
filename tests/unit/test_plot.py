"""The numbers in the pictures, of a run folder that the job's own log wrote, against hand counts."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from dflash_model import UserError
from dflash_train.acceptance import Rounds
from plot import curve, draw, main, read_run, smooth
from support.runlog import log_step, open_log


def texts(*tokens: int) -> list[Rounds]:
    """One text for each number of tokens, in ten rounds that commit about equally many."""
    found = []
    for count in tokens:
        committed = np.full(10, count // 10) + (np.arange(10) < count % 10)
        found.append(Rounds(np.arange(10), committed - 1, committed, np.zeros(10, dtype=bool)))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two packs a step. Steps 3 and 4 are undone by a resume at step 2, whose evaluation is repeated."""
    log = open_log(tmp_path, 0)
    log.evaluation(0, texts(10, 10), 8, "replay")
    log_step(log, 1, 6.0, [[0, 1]], 100.0)
    log_step(log, 2, float("nan"), [[2, 3]], 100.0)
    log.evaluation(2, texts(12, 12), 8, "replay")
    log_step(log, 4, 9.0, [[4, 7]], 100.0)
    log.close()
    log = open_log(tmp_path, 2, evaluated=False)
    log.evaluation(2, texts(30, 10), 8, "replay")
    log_step(log, 4, 4.0, [[4, 5], [6, 7]], 50.0)
    log_step(log, 6, 3.0, [[8, 11]], 200.0)
    log.evaluation(5, texts(40, 40), 8, "replay")
    log.evaluation(7, texts(50, 50), 8, "replay")
    log.close()
    return tmp_path


def listed(pair: tuple[np.ndarray, np.ndarray]) -> list[list[float]]:
    return [pair[0].tolist(), pair[1].tolist()]


def test_curves_are_of_the_history_that_survives(folder: Path) -> None:
    run = read_run(folder, "a")
    assert listed(curve(run, "Train/loss")) == [[1, 4, 6], [6.0, 4.0, 3.0]]  # step 2 was skipped
    assert listed(curve(run, "Acceptance/pooled")) == [[0, 2, 5, 7], [1.0, 2.0, 4.0, 5.0]]
    assert curve(run, "Acceptance/low")[1].tolist() == [1.0, 1.0, 4.0, 5.0]  # two prompts: one of them twice, at 2.5 %
    assert curve(run, "Acceptance/high")[1].tolist() == [1.0, 3.0, 4.0, 5.0]
    assert listed(curve(run, "Train/none")) == [[], []]


def test_tokens_are_those_of_the_packs(folder: Path) -> None:
    """2 packs of 100, 2 of 100, 4 of 50, 4 of 200; the evaluation at step 5 lies half-way, that at 7 behind."""
    run = read_run(folder, "a")
    assert run.tokens == pytest.approx({0: 0, 1: 200, 2: 400, 4: 600, 6: 1400})
    assert curve(run, "Train/loss", "tokens")[0] == pytest.approx([200, 600, 1400])
    assert curve(run, "Acceptance/pooled", "tokens")[0] == pytest.approx([0, 400, 1000])


def test_positions_are_of_the_last_evaluation(folder: Path) -> None:
    axes = Figure().add_subplot()
    draw(axes, "positions", [read_run(folder, "a")], "step")
    assert listed(axes.lines[0].get_data()) == [[1, 2, 3, 4, 5, 6, 7], [1, 1, 1, 1, 0, 0, 0]]


def test_running_mean_by_hand() -> None:
    few = np.array([5.0, 1.0])
    assert listed(smooth(few, few)) == [[5, 1], [5, 1]]
    values = np.random.default_rng(0).random(1000)  # 2 %: ten points on either side, and every second mean
    places, means = smooth(np.arange(1000.0), values)
    assert places.tolist() == list(range(10, 990, 2))
    assert means[[0, 1, -1]] == pytest.approx([values[:21].mean(), values[2:23].mean(), values[978:999].mean()])


def test_acceptance_picture_holds_both_and_the_interval(folder: Path) -> None:
    axes = Figure().add_subplot()
    draw(axes, "acceptance", [read_run(folder, "a")], "step")
    streak, pooled = axes.lines[:2]
    assert np.asarray(streak.get_ydata()) == pytest.approx([1.1, 1.2, 1.4, 1.6])
    assert np.asarray(pooled.get_ydata()).tolist() == [1.0, 2.0, 4.0, 5.0]
    band = axes.collections[0].get_paths()[0].vertices
    assert {(2.0, 1.0), (2.0, 3.0)} <= {tuple(point) for point in np.asarray(band).tolist()}
    assert [line.get_label() for line in axes.lines[1:3]] == ["a", "held out, replay, with 95 % interval"]


def test_pictures_are_text_and_equal_every_time(folder: Path, tmp_path: Path) -> None:
    pictures = []
    for out in ("one", "two"):
        assert main([f"runs={folder},{folder}", "names=2.9 M tokens,9", f"out={tmp_path / out}", "x=tokens"]) == 0
        pictures.append({path.name: path.read_text() for path in (tmp_path / out).iterdir()})
    assert pictures[0] == pictures[1]
    assert sorted(pictures[0]) == ["acceptance.svg", "loss.svg", "positions.svg"]
    assert all(">2.9 M tokens</text>" in text and ">9</text>" in text for text in pictures[0].values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "runs has 0 folders; it takes 1 to 7"),
        (["runs={0}", "names=a,b"], "names has 2 for 1 runs"),
        (["runs={0}", "x=hours"], "x is hours; it takes step or tokens"),
        (["runs={0}/nothing"], "nothing; it has no folder tensorboard"),
        (["runs={0}/young"], "young; its events and metrics.jsonl have no point of Train/loss yet"),
    ],
)
def test_refusals_are_sentences(folder: Path, arguments: list[str], message: str) -> None:
    (folder / "young").mkdir()
    open_log(folder / "young", 0).close()
    with pytest.raises(UserError, match=message):
        main([argument.format(folder) for argument in arguments])
