"""Every format gives the same rows with their places; what cannot be read is reported there and then."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from dflash_data import sources
from dflash_data.sources import check_sources, read_rows
from dflash_model import UserError

ROWS: list[dict[str, Any]] = [
    {"id": f"row {n}", "messages": [{"role": "user", "content": 'é漢👍🏽 [1, {}] " \\ ' * n}]} for n in range(1, 8)
]


def zstd(path: Path, content: bytes) -> None:
    with pa.output_stream(str(path), compression="zstd") as file:
        file.write(content)


def written(folder: Path, kind: str) -> Path:
    path = folder / f"rows{kind}"
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
    array = json.dumps(ROWS, ensure_ascii=False, indent=1).encode()
    if kind == "":
        Dataset.from_list(ROWS).save_to_disk(str(path))
    elif kind == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        content = array if ".json" in kind and ".jsonl" not in kind else lines
        if kind.endswith(".zst"):
            zstd(path, content)
        else:
            path.write_bytes(gzip.compress(content) if kind.endswith(".gz") else content)
    return path


KINDS = [".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst", ".parquet", ""]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_every_format_gives_the_same_rows(
    kind: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a JSON array is cut in the middle of a row, a number or a character."""
    monkeypatch.setattr(sources, "CHUNK", chunk)
    path = written(tmp_path, kind)
    found = list(read_rows(check_sources("data.sources", [str(path)])))
    assert [source.row for source in found] == ROWS
    assert [source.line for source in found] == list(range(1, 8))
    assert {source.file for source in found} == {str(path)}


def test_bad_lines_are_told_and_the_rest_is_read(tmp_path: Path) -> None:
    """A cut line, a blank one, a byte order mark, an array, bytes that are no UTF-8, a raw U+2028 and U+0085."""
    good = b'{"text": "a\xe2\x80\xa8b\xc2\x85c"}'
    content = [b'{"te', b"", b"\xef\xbb\xbf" + good, b"[1]", b'{"text": "\xff"}', good]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(content))
    found = [(source.line, source.row, source.problem) for source in read_rows([path])]
    row = {"text": "a\u2028b\u0085c"}
    assert found == [
        (1, None, "not a JSON row"), (3, row, None), (4, None, "not a JSON object"), (5, None, "not a JSON row"),
        (6, row, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "rows", "problem"),
    [
        ('[{"a": 1}, {"a": 2', 1, "not a JSON array from here on"),
        ('[{"a": 1}, {"a" 2}, {"a": 3}]', 1, "not a JSON array from here on"),
        ('{"a": 1}', 0, "not a JSON array from here on"),
        ("", 0, "not a JSON array from here on"),
        ('[{"a": 1}, 5]', 1, "not a JSON object"),
    ],
)
def test_a_fault_in_an_array_is_one_bad_row(content: str, rows: int, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    found = list(read_rows([path]))
    assert [source.row for source in found if source.row is not None] == [{"a": 1}] * rows
    assert [source.problem for source in found if source.row is None] == [problem]
    assert not list(read_rows([_with(tmp_path, "[]")]))


def _with(folder: Path, text: str) -> Path:
    path = folder / "empty.json"
    path.write_text(text)
    return path


def test_a_damaged_archive_gives_what_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    lines = "".join(json.dumps({"text": f"{n} {n * 7919}"}) + "\n" for n in range(20000)).encode()
    path.write_bytes(gzip.compress(lines)[:-3000])
    found = list(read_rows([path]))
    assert found[0].row == {"text": "0 0"}
    assert found[-1].problem in ("not readable from here on", "not a JSON row")
    assert len(found) > 1000


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.jsonl", "which does not exist"), ("data/gone.parquet", "which does not exist"),
        ("a/b/c", "which does not exist"), ("./x", "which does not exist"), ("rows.csv", "it takes .jsonl"),
        ("folder", "it takes files, or a folder that save_to_disk"),
    ],
)  # fmt: skip
def test_what_is_no_source_is_refused(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("a")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=message):
        check_sources("data.sources", [name])
    with pytest.raises(UserError, match=r"data\.sources is empty"):
        check_sources("data.sources", [])
