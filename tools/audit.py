"""Check that a run trained on every pack exactly once: python tools/audit.py run.dir=runs/a"""

from dataclasses import dataclass, field
from pathlib import Path

from dflash_train.audit import audit, report
from dflash_train.cli import parse, run_tool
from dflash_train.config import RunSection, key


@dataclass
class AuditConfig:
    """Which run."""

    config: str = key("", "YAML file that the other keys override")
    run: RunSection = field(default_factory=RunSection)


def main(argv: list[str]) -> int:
    """Exit code 0 if it did, 1 if not."""
    run_dir = Path(parse(AuditConfig, argv, __doc__ or "").run.dir).expanduser()
    found = audit(run_dir)
    print(report(run_dir, found))
    return 0 if found.exact else 1


if __name__ == "__main__":
    run_tool(main)
