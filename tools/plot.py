"""Pictures of runs for documents: python tools/plot.py runs=runs/a,runs/b names="2.9 M tokens,9 M tokens"

Of runs that are over or under way, from what they wrote: loss.svg, acceptance.svg and positions.svg.
"""

import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash_model import UserError
from dflash_train.cli import parse, run_tool
from dflash_train.config import key
from dflash_train.metrics import EVALUATIONS, METRICS, read_jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = NDArray[np.float64]
SMOOTH = 0.02  # share of a run's points that a smoothed point is the mean of
SMOOTHED = f"running mean over {100 * SMOOTH:g} % of a run"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
PLACES = {"step": "step", "tokens": "document tokens trained on"}
VALUES = {
    "loss": f"training loss ({SMOOTHED})",
    "acceptance": "acceptance length, bonus token included",
    "positions": "share of held-out rounds that accept slot k",
}
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "dflash", "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 11, "axes.labelsize": 10, "legend.fontsize": 10, "legend.frameon": False, "lines.markersize": 4,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4",
}  # fmt: skip


@dataclass
class PlotConfig:
    """Which runs, and where the pictures go."""

    config: str = key("", "YAML file that the other keys override")
    runs: list[str] = key([], f"run folders (run.dir), at most {len(COLOURS)}")
    names: list[str] = key([], "what the legends call them; default: the folders' names")
    out: str = key("", "folder of the pictures; default: plots in the first run's folder")
    x: str = key("step", "the axis of loss and acceptance: step or tokens")


@dataclass(frozen=True)
class Run:
    """What a run wrote.

    Attributes:
        name: what the legends call it.
        scalars: values by tag and step.
        tokens: document tokens trained on up to the step of each status line.
        how: how acceptance was measured; empty if it was not.
        slots: of the last evaluation, for slots 1 to K - 1.
    """

    name: str
    scalars: dict[str, dict[int, float]]
    tokens: dict[int, float]
    how: str
    slots: list[float]


def read_run(folder: Path, name: str) -> Run:
    """Read a run folder. Acceptance is from its evaluations.jsonl, where length and interval stand in one line.

    Raises:
        UserError: it has no events, or no point of the loss.
    """
    events = folder / "tensorboard"
    if not events.is_dir():
        raise UserError(f"runs has {folder}; it has no folder tensorboard, so it is no run folder")
    found = EventAccumulator(str(events), size_guidance={"scalars": 0}).Reload()
    scalars = {tag: {point.step: point.value for point in found.Scalars(tag)} for tag in found.scalars.Keys()}
    rows = [row for row in read_jsonl(folder / EVALUATIONS) if row["pooled"] is not None]
    scalars |= {f"Acceptance/{part}": {row["step"]: row[part] for row in rows} for part in ("pooled", "low", "high")}
    tokens, total = {0: 0.0}, 0.0
    for line in read_jsonl(folder / METRICS):
        if "document_tokens" not in line:
            raise UserError(f"runs has {folder}; an older version wrote its {METRICS}, without document_tokens")
        total += line["document_tokens"]
        tokens[line["step"]] = total
    slots = [float(slot["accepted"] or 0) for slot in rows[-1].get("positions", [])] if rows else []
    run = Run(name, scalars, tokens, rows[-1]["name"] if rows else "", slots)
    if not len(curve(run, "Train/loss", "tokens")[0]):
        raise UserError(f"runs has {folder}; its events and {METRICS} have no point of Train/loss yet")
    return run


def curve(run: Run, tag: str, x: str = "step") -> tuple[Values, Values]:
    """Points of a tag in order, without skipped steps and, over tokens, without those behind the last status line."""
    points = np.array(sorted(run.scalars.get(tag, {}).items()), dtype=float).reshape(-1, 2)
    places, values = points.T
    if x == "tokens":
        places = np.interp(places, list(run.tokens), list(run.tokens.values()), right=np.nan)
    kept = np.isfinite(places) & np.isfinite(values)
    return places[kept], values[kept]


def smooth(places: Values, values: Values) -> tuple[Values, Values]:
    """Centred running mean where all of its points are there, eight times in its length: a fine enough line."""
    half = int(len(values) * SMOOTH / 2)
    means = np.convolve(values, np.full(2 * half + 1, 1 / (2 * half + 1)), "valid")
    thin = slice(None, None, max(half // 4, 1))
    return places[half : len(places) - half][thin], means[thin]


def draw(axes: "Axes", picture: str, runs: list[Run], x: str) -> None:
    """Fill one picture."""
    for run, colour in zip(runs, COLOURS, strict=False):
        if picture == "positions":
            axes.plot(np.arange(1, len(run.slots) + 1), run.slots, "o-", color=colour, label=run.name, clip_on=False)
            continue
        places, values = smooth(*curve(run, "Train/loss" if picture == "loss" else "Train/streak", x))
        if picture == "loss":
            axes.plot(places, values, color=colour, label=run.name)
            continue
        axes.plot(places, values + 1, "--", color=colour, linewidth=0.9)
        places, pooled = curve(run, "Acceptance/pooled", x)
        low, high = (curve(run, f"Acceptance/{bound}", x)[1] for bound in ("low", "high"))
        axes.plot(places, pooled, "o-", color=colour, label=run.name)
        axes.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0)
    if picture == "acceptance":
        how = " or ".join(sorted({run.how for run in runs if run.how})) or "never measured"
        axes.plot([], [], "o-", color="#777777", label=f"held out, {how}, with 95 % interval")
        axes.plot([], [], "--", color="#777777", linewidth=0.9, label=f"training blocks, {SMOOTHED}")
    if picture == "positions":
        axes.set_ylim(bottom=0)
    if picture == "loss":  # drawn weights begin far above where it is decided
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="slot k of a block" if picture == "positions" else PLACES[x], ylabel=VALUES[picture])


def write(path: Path, runs: list[Run], x: str) -> None:
    """One picture: the same bytes for the same numbers."""
    import matplotlib as mpl  # only here: the job and the other tools do without
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE}):
        figure = Figure(figsize=(7.3, 4.1), layout="constrained")
        axes = figure.add_subplot()
        draw(axes, path.stem, runs, x)
        over_slots = path.stem == "positions"
        axes.xaxis.set_major_locator(MaxNLocator(16 if over_slots else 8, steps=[1, 2, 5, 10], integer=True))
        low, high = axes.get_ylim()
        if path.stem == "loss" and high < 16 * low:  # too few powers of two to read by
            axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
        if x == "tokens" and not over_slots:
            axes.xaxis.set_major_formatter(billions := EngFormatter())
            billions.ENG_PREFIXES = EngFormatter.ENG_PREFIXES | {9: "B"}
        axes.legend()
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    print(path)


def main(argv: list[str]) -> int:
    """Plot."""
    config = parse(PlotConfig, argv, __doc__ or "")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("matplotlib is not installed; pip install -c constraints.txt matplotlib")
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of every resume
    folders, names = [Path(folder).expanduser() for folder in config.runs], config.names
    if not 1 <= len(folders) <= len(COLOURS):
        raise UserError(f"runs has {len(folders)} folders; it takes 1 to {len(COLOURS)}")
    if names and len(names) != len(folders):
        raise UserError(f"names has {len(names)} for {len(folders)} runs; give one for each, or none")
    if config.x not in PLACES:
        raise UserError(f"x is {config.x}; it takes {' or '.join(PLACES)}")
    names = names or [folder.resolve().name for folder in folders]
    runs = [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    out = Path(config.out).expanduser() if config.out else folders[0] / "plots"
    out.mkdir(parents=True, exist_ok=True)
    for picture in VALUES:
        write(out / f"{picture}.svg", runs, config.x)
    return 0


if __name__ == "__main__":
    run_tool(main)
