"""Rows from files, one after the other, each with the place it came from. Memory does not grow with a file.

JSONL and JSON arrays (both also .gz and .zst), Parquet, folders that ``datasets`` saved, names of its hub. A row that
cannot be read is reported with its place, never skipped in silence.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetNotFoundError

from dflash_model.errors import UserError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
FORMATS = (".jsonl", ".ndjson", ".json", ".parquet")
CHUNK = 1 << 20  # characters of a JSON array decoded at a time
UNREADABLE = "not readable from here on"
NO_ARRAY = "not a JSON array from here on"
BUFFER = 1 << 16  # bytes read at a time: what is lost where an archive is damaged


@dataclass(frozen=True)
class RawRow:
    """One row as it lies in its source.

    Attributes:
        file: the source.
        line: line of the file or number of the row, from 1.
        content: the bytes of a JSON line, or an object.
        problem: why there is no content.
    """

    file: str
    line: int
    content: bytes | dict[str, Any] | None
    problem: str | None = None


@dataclass(frozen=True)
class SourceRow:
    """One row of a source: where it stands, and the object or the reason why there is none."""

    file: str
    line: int
    row: dict[str, Any] | None
    problem: str | None = None


def check_sources(key: str, sources: list[str]) -> list[Path]:
    """The files, folders and hub names that a key names; hub names stay as they are.

    Raises:
        UserError: none given, or one is missing or of a kind that is not read.
    """
    if not sources:
        raise UserError(f"{key} is empty; it takes one or more files of conversations: {key}=chat.jsonl,code.parquet")
    return [_check_source(key, source) for source in sources]


def _check_source(key: str, source: str) -> Path:
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "state.json").is_file():
            raise UserError(
                f"{key} names the folder {path}; it takes files, or a folder that save_to_disk of datasets wrote"
            )
    elif path.is_file():
        if _kind(path)[0] not in FORMATS:
            raise UserError(f"{key} names {path}; it takes {', '.join(FORMATS)}, the JSON ones also with .gz or .zst")
    elif source.count("/") != 1 or source.startswith((".", "/", "~")) or _kind(path)[0] in FORMATS:
        raise UserError(f"{key} names {path}, which does not exist")  # not even a name of the hub
    return path


def _kind(path: Path) -> tuple[str, str | None]:
    """Suffix of the format, and compression."""
    compression = COMPRESSIONS.get(path.suffix)
    return (Path(path.stem).suffix if compression else path.suffix), compression


def read_rows(paths: list[Path]) -> Iterator[SourceRow]:
    """Every row of every source."""
    return map(parse, read_raw(paths))


def read_raw(paths: list[Path]) -> Iterator[RawRow]:
    """Every row of every source, JSON lines not yet parsed: that is left to whoever has the time."""
    for path in paths:
        suffix, compression = _kind(path)
        if path.is_dir():
            yield from _dataset_rows(path)
        elif not path.is_file():
            yield from _hub_rows(path)
        elif suffix == ".parquet":
            yield from _parquet_rows(path)
        else:
            with pa.input_stream(str(path), compression=compression) as file:
                yield from (_array_rows if suffix == ".json" else _line_rows)(str(path), file)


def parse(raw: RawRow) -> SourceRow:
    """Read a JSON line."""
    if raw.problem is not None or isinstance(raw.content, dict):
        return SourceRow(raw.file, raw.line, raw.content if isinstance(raw.content, dict) else None, raw.problem)
    try:
        row = json.loads((raw.content or b"").decode("utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        return SourceRow(raw.file, raw.line, None, "not a JSON row")
    if not isinstance(row, dict):
        return SourceRow(raw.file, raw.line, None, "not a JSON object")
    return SourceRow(raw.file, raw.line, row)


def _line_rows(name: str, file: Any) -> Iterator[RawRow]:  # noqa: ANN401 - pyarrow's stream
    """Non-blank lines. Only a newline ends one: text may hold U+2028 and others at which str.splitlines would cut."""
    number = 0
    try:
        for number, line in enumerate(io.BufferedReader(file, BUFFER), 1):
            if line.strip():
                yield RawRow(name, number, line)
    except OSError:  # a damaged archive
        yield RawRow(name, number + 1, None, UNREADABLE)


def _array_rows(name: str, file: Any) -> Iterator[RawRow]:  # noqa: ANN401 - pyarrow's stream
    """Elements of one JSON array, decoded as they come; what follows a fault cannot be told apart: one bad row."""
    reader = io.TextIOWrapper(io.BufferedReader(file, BUFFER), encoding="utf-8-sig")
    decoder, text, number, opened = json.JSONDecoder(), "", 0, False
    while True:
        try:
            chunk = reader.read(CHUNK)
        except (UnicodeDecodeError, OSError):
            yield RawRow(name, number + 1, None, UNREADABLE)
            return
        text += chunk
        while text := text.lstrip(" \t\r\n" + ("," if opened else "")):
            if not opened:
                if text[0] != "[":
                    break
                opened, text = True, text[1:]
                continue
            try:
                row, end = decoder.raw_decode(text)
            except json.JSONDecodeError:
                break
            number, text = number + 1, text[end:]
            is_object = isinstance(row, dict)
            yield RawRow(name, number, row if is_object else None, None if is_object else "not a JSON object")
        if not chunk:
            if not opened or text.strip() != "]":
                yield RawRow(name, number + 1, None, NO_ARRAY)
            return


def _parquet_rows(path: Path) -> Iterator[RawRow]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield RawRow(str(path), number, row)
    except (pa.ArrowInvalid, OSError):
        yield RawRow(str(path), number + 1, None, UNREADABLE)


def _dataset_rows(path: Path) -> Iterator[RawRow]:
    rows = load_from_disk(str(path))
    assert isinstance(rows, Dataset)  # state.json lies in it: one split
    for number, row in enumerate(rows, 1):
        yield RawRow(str(path), number, dict(row))


def _hub_rows(name: Path) -> Iterator[RawRow]:
    """Rows of ``owner/name`` or ``owner/name:split`` (train by default), streamed."""
    repository, _, split = str(name).partition(":")
    try:
        rows = load_dataset(repository, split=split or "train", streaming=True)
    except (DatasetNotFoundError, ConnectionError, OSError, ValueError) as error:
        raise UserError(
            f"data.sources names {name}; it is no file here, and the hub did not provide it:"
            f" {str(error).splitlines()[0]}"
        ) from error
    for number, row in enumerate(rows, 1):
        yield RawRow(str(name), number, dict(row))
