"""A fault matrix: real torchrun jobs on gloo, hurt at chosen moments; what happened, and how soon everything was gone.

    python tests/faults.py [cells=NAME,NAME…] [out=docs/faults.md]

Every cell starts a small job (2 target + 2 drafter ranks, or what it says), waits for its moment, does its harm, and
holds: no process is left, the exit code says what happened, the last words name who was hurt, and the same command
afterwards runs to the end with every pack trained on exactly once.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_train.audit import audit
from dflash_train.retention import list_checkpoints

ROOT = Path(__file__).parents[1]
STEPS, LONG = 40, 4000
MARK = "DFLASH_FAULT_FOLDER"
SETTINGS = [
    "config=tools/configs/debug.yaml", "trainer.packs_per_step=2", "log.interval=1", "evaluate.interval=10",
    "evaluate.packs=8", "checkpoint.interval=10", "channel.timeout_seconds=10", "data.synthetic_documents=64",
]  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One experiment.

    Attributes:
        what: the harm.
        moment: what the log must show first, by a name in ``PATTERNS``.
        victim: rank, or ``torchrun``.
        do: the harm itself, given the process.
        fault: for ``tests/support/faulty.py``, instead of ``do``.
        expected: a pattern that the output must show.
        clean: whether the job must have stopped in order (torchrun's own code is 0 then, if it got no signal itself).
        limit: seconds until the last process must be gone.
        ranks: target and drafter ranks.
        settings: of the job, beside the common ones.
    """

    what: str
    moment: str
    victim: int | str
    expected: str
    do: Callable[[int], None] | None = None
    fault: str = ""
    clean: bool = False
    limit: float = 45.0
    ranks: tuple[int, int] = (2, 2)
    restarts: int = 0
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For the command line."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.what} {self.moment} {self.victim}".lower()).strip("-")


def send(number: signal.Signals) -> Callable[[int], None]:
    """A signal to a process."""

    def act(pid: int) -> None:
        os.kill(pid, number)

    return act


KILL, FREEZE, TERM, INT = send(signal.SIGKILL), send(signal.SIGSTOP), send(signal.SIGTERM), send(signal.SIGINT)
START, STEP, EVALUATION, SAVE = "drafter ready", "step 13", "second evaluation", "step-10 is saved"
PATTERNS = {START: START, STEP: "step 13 ", EVALUATION: "(?s)evaluating on .*evaluating on ", SAVE: "saved .*step-10"}
STOPPED = r"stopped behind step \d+ \(SIG(TERM|INT) on .*torchrun .*--nproc-per-node"
GONE = r"error: .*rank {} \(.*is gone"
CELLS = [
    *(
        Cell("SIGKILL", moment, rank, GONE.format(rank), KILL)
        for moment, ranks in ((START, (0, 3)), (STEP, (0, 1, 2, 3)), (EVALUATION, (1, 2)), (SAVE, (0, 2)))
        for rank in ranks
    ),
    *(
        Cell("SIGSTOP", moment, rank, f"rank {rank} .*is stopped", FREEZE, limit=60)
        for moment, ranks in ((STEP, (0, 3)), (EVALUATION, (1,)))
        for rank in ranks
    ),
    *(
        Cell(name, moment, "torchrun", STOPPED, act, clean=True)
        for name, act in (("SIGTERM", TERM), ("SIGINT", INT))
        for moment in (START, STEP, EVALUATION, SAVE)
    ),
    *(Cell("SIGTERM", STEP, rank, STOPPED, TERM, clean=True) for rank in (0, 3)),
    Cell("SIGINT", STEP, 2, STOPPED, INT, clean=True),
    Cell("SIGINT while rank 3 is frozen", STEP, 0, "rank 3 .*is stopped; .*SIGINT, and (the job is not|no agreement)",
         INT),
    Cell("exception in a data thread", "the 12th call", 0, "target rank 0, .*ValueError: planted in collate",
         fault="collate"),
    Cell("failing transfer", "the 12th call", 1, "target rank 1, .*planted in a transfer", fault="transfer"),
    Cell("out of memory", "the 12th call", 2, "drafter rank 2, training step .*OutOfMemoryError", fault="memory"),
    Cell("full disk", STEP, 2, "checkpoint step-10 could not be written .*No space left", fault="disk"),
    Cell("SIGKILL, colocated", STEP, 1, GONE.format(1), KILL, ranks=(2, 0)),
    Cell("SIGTERM, colocated", STEP, "torchrun", STOPPED, TERM, clean=True, ranks=(2, 0)),
    Cell("SIGKILL, --max-restarts 1", STEP, 1, "resuming at step 10", KILL, restarts=1, limit=120),
]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What was seen: seconds until the last process was gone, torchrun's exit code, the last words."""

    seconds: float
    code: int
    words: str


def start(folder: Path, cell: Cell, steps: int, *, fault: str = "", restarts: int = 0) -> subprocess.Popen[bytes]:
    """A job whose processes all carry the folder in their environment; its output in ``output.txt``."""
    targets, drafters = cell.ranks
    mesh = [f"mesh.target={targets}", f"mesh.drafter={drafters}"] if drafters else ["mesh.colocated=true"]
    script = "tests/support/faulty.py" if fault else "tools/train.py"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(targets + drafters),
        "--max-restarts", str(restarts), script, *SETTINGS, *cell.settings, *mesh, f"run.dir={folder / 'run'}",
        f"data.path={folder / 'data'}", f"trainer.steps={steps}", "resume.allow=[trainer.steps]",
    ]  # fmt: skip
    environment = os.environ | {"DFLASH_FAULT": fault, MARK: str(folder), "OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, env=environment, start_new_session=True
        )  # fmt: skip


def members(folder: Path) -> dict[int, int]:
    """Living processes of a job: pid to rank (-1 for torchrun and helpers)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{MARK}={folder}".encode() in environment and state != "Z":
            ranks = [item[5:] for item in environment if item.startswith(b"RANK=")]
            found[int(entry.name)] = int(ranks[0]) if ranks else -1
    return found


def wait_for(what: Callable[[], bool], limit: float) -> bool:
    """Whether it became true in time."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.05)
    return False


def run_cell(cell: Cell, folder: Path) -> Outcome:
    """Do one experiment and hold what it must show.

    Raises:
        AssertionError: it did not.
    """
    output = folder / "output.txt"
    output.touch()

    def shows(pattern: str) -> bool:
        return re.search(pattern, output.read_text(errors="replace")) is not None

    steps = STEPS if cell.restarts else LONG
    job = start(folder, cell, steps, fault=cell.fault and f"{cell.fault}:{cell.victim}", restarts=cell.restarts)
    moment = cell.expected if cell.fault else PATTERNS[cell.moment]
    assert wait_for(lambda: shows(moment), 120), f"never saw {moment!r}: {output.read_text()[-3000:]}"
    began = time.monotonic()
    if cell.do is not None:
        ranks = {rank: pid for pid, rank in sorted(members(folder).items(), reverse=True) if rank >= 0}  # not a child
        if cell.what.endswith("is frozen"):
            os.kill(ranks[3], signal.SIGSTOP)
        cell.do(job.pid if cell.victim == "torchrun" else ranks[int(cell.victim)])
    assert wait_for(lambda: job.poll() is not None and not members(folder), cell.limit), (
        f"still there after {cell.limit} s: {members(folder)}; {output.read_text()[-3000:]}"
    )
    seconds = time.monotonic() - began
    text = output.read_text(errors="replace")
    assert re.search(cell.expected, text), f"no {cell.expected!r} in {text[-4000:]}"
    if cell.clean:
        assert "error:" not in text, [line for line in text.splitlines() if "error:" in line]
    assert (job.returncode == 0) == (bool(cell.restarts) or (cell.clean and cell.victim != "torchrun")), job.returncode
    words = [line for line in text.splitlines() if re.search(cell.expected, line)]
    # The same command goes on, to an early end.
    step = max(list_checkpoints(folder / "run" / "checkpoints"), default=0)
    again = start(folder, cell, step + 5)
    assert again.wait(120) == 0, output.read_text()[-3000:]
    found = audit(folder / "run")
    assert found.exact, found
    assert found.position.step == max(step + 5, STEPS if cell.restarts else 0)
    return Outcome(seconds, job.returncode, words[0].replace(str(folder), "…"))


def main(argv: list[str]) -> int:
    """Run the cells that are named, or all; write the table."""
    given = dict(argument.split("=", 1) for argument in argv)
    wanted = given.get("cells", "").split(",") if given.get("cells") else [cell.name for cell in CELLS]
    rows, failed = [], 0
    for cell in (cell for cell in CELLS if cell.name in wanted):
        folder = Path(tempfile.mkdtemp(prefix="fault-"))
        try:
            seen = run_cell(cell, folder)
            told = f"{seen.seconds:.1f} | {seen.code} | {seen.words[:230].replace('|', '/')}"
        except AssertionError as error:
            failed += 1
            told = f"| | FAILED: {str(error)[:100]}"
            print(error, file=sys.stderr)
        finally:
            for pid in members(folder):
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)
        rows.append(f"| {cell.what} | {cell.moment} | {cell.victim} | {told} |")
        print(rows[-1], flush=True)
    if given.get("out"):
        head = "| what | when the log shows | rank | seconds until all are gone | torchrun's code | who said what |"
        Path(given["out"]).write_text(TITLE + head + "\n|---|---|---|---|---|---|\n" + "\n".join(rows) + "\n")
    return 1 if failed else 0


TITLE = """# Faults

Written by `python tests/faults.py out=docs/faults.md`: real `torchrun` jobs on gloo, 2 target and 2 drafter ranks on
two CPU cores, `channel.timeout_seconds=10`. After each the same command ran to an early end, and `tools/audit.py` found
each pack trained on exactly once. torchrun's own code is 1 if it was signalled itself, whatever its ranks return. A
frozen rank is noticed by the timeout, and killed by torchrun 30 s later.

"""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
