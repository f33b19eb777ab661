"""Reading conversations from JSONL files, one row after the other, each with the place it came from."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_model.errors import UserError

SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class SourceRow:
    """One row of a source: where it stands, and the conversation or the reason why there is none."""

    file: str
    line: int
    row: dict[str, Any] | None
    problem: str | None = None


def check_sources(key: str, sources: list[str]) -> list[Path]:
    """The files that a key names.

    Raises:
        UserError: none given, or one is missing.
    """
    if not sources:
        raise UserError(
            f"{key} is empty; it takes one or more JSONL files of conversations: {key}=chat.jsonl,code.jsonl"
        )
    paths = [Path(source).expanduser() for source in sources]
    for path in paths:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise UserError(f"{key} names {path}, which {what}; it takes JSONL files")
    return paths


def read_rows(paths: list[Path]) -> Iterator[SourceRow]:
    """Yield every non-blank line of every file; a bad line is reported, never skipped in silence."""
    for path in paths:
        # Only "\n" ends a row: text may contain U+2028 and other characters at which str.splitlines would cut.
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield _parse(str(path), number, raw)


def _parse(file: str, line: int, raw: bytes) -> SourceRow:
    try:
        row = json.loads(raw.decode("utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError):
        return SourceRow(file, line, None, "not a JSON row")
    if not isinstance(row, dict):
        return SourceRow(file, line, None, "not a JSON object")
    if "messages" in row:
        return SourceRow(file, line, row)
    if isinstance(row.get("conversations"), list):
        return _sharegpt(file, line, row)
    return SourceRow(file, line, None, "neither messages nor conversations")


def _sharegpt(file: str, line: int, row: dict[str, Any]) -> SourceRow:
    turns = []
    for turn in row["conversations"]:
        speaker = turn.get("from") if isinstance(turn, dict) else None
        if not isinstance(speaker, str):
            return SourceRow(file, line, None, "conversations holds something without from and value")
        turns.append({"role": SHAREGPT_ROLES.get(speaker, speaker), "content": turn.get("value")})
    return SourceRow(file, line, {**row, "messages": turns})
