"""Settings for every test, and the record of what was held against what."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

# Everything here is tiny: a second thread gains nothing, and on a busy machine its spinning cost tests a minute each.
torch.set_num_threads(1)

Hold = Callable[[str, str, float, float], None]
ROWS = pytest.StashKey[dict[tuple[str, str], tuple[float, float]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=2, help="runs that are killed at random moments")
    parser.addoption("--agreement", help="write what was held against what, with the largest difference, to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = {}
    if config.getoption("--agreement") and config.getoption("dist", "no") != "no":
        raise pytest.UsageError("--agreement is written by one process: leave --numprocesses, --dist and -d out")


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """How often the kill-anywhere test is repeated."""
    return int(request.config.getoption("--kills"))


@pytest.fixture
def hold(request: pytest.FixtureRequest) -> Hold:
    """``hold(what, against, difference, bound)`` asserts ``difference <= bound`` and records the largest one seen."""

    def check(what: str, against: str, difference: float, bound: float) -> None:
        rows = request.config.stash[ROWS]
        worst, _ = rows.get((what, against), (0.0, bound))
        rows[what, against] = (max(worst, difference), bound)
        assert difference <= bound, f"{what} differs from {against} by {difference:.3g}; at most {bound:.3g}"

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows, path = config.stash[ROWS], config.getoption("--agreement")
    if not rows or path is None:
        return
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "dflash"))
    lines = [f"Largest differences seen with {versions}.", "", "| what | against | largest difference | allowed |"]
    lines.append("|---|---|---|---|")
    lines += [f"| {what} | {against} | {worst:.1e} | {bound:.0e} |" for (what, against), (worst, bound) in rows.items()]
    Path(path).write_text("\n".join(lines).replace("0.0e+00", "0").replace("| 0e+00 |", "| 0 |") + "\n")
    terminalreporter.write_line(f"{len(rows)} comparisons written to {path}")
