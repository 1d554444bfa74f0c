"""Data files: what a row is, in JSONL and in Parquet, and how a wrong one is named."""

import subprocess
import sys
from datetime import datetime
from decimal import Decimal

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from areal_async.errors import DataError
from areal_async.rollout.data import Dataset, Row


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(*lines: str | bytes) -> Dataset:
        data = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
        (tmp_path / "d.jsonl").write_bytes(data)
        return Dataset.load("d.jsonl", "prompt", "answer")

    return load


def wrong(load, *lines):
    with pytest.raises(DataError) as caught:
        load(*lines)
    return str(caught.value).split("\n")


def test_rows_keep_lines_numbers_as_written_and_columns(load):
    data = load(
        b'\xef\xbb\xbf{"prompt": "a", "answer": 0.10}\r', "", "  ",
        '{"prompt": "b", "answer": 1e3, "tests": [{"in": [1, 2]}, {"out": null}], "id": "x"}',
        '{"prompt": "c", "answer": "7 "}', '{"prompt": "d", "answer": null}', '{"prompt": "e"}',
        '{"prompt": "f", "answer": 123456789012345678901234567890}', "",
    )  # fmt: skip
    assert [row.line for row in data.rows] == [1, 4, 5, 6, 7, 8]
    assert [row.answer for row in data.rows] == ["0.10", "1e3", "7 ", None, None, "123456789012345678901234567890"]
    columns = {key: msgspec.msgpack.decode(raw) for key, raw in data.rows[1].columns.items()}
    assert columns == {"tests": [{"in": [1, 2]}, {"out": None}], "id": "x"}
    assert data.where(1) == "d.jsonl:4"
    assert len(data) == 6


def test_columns_travel_in_msgpack(load):
    row = load('{"prompt": "b", "tests": [{"in": [1, 2]}], "x": 1.5}').rows[0]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode({"columns": row.columns})) == {
        "columns": {"tests": [{"in": [1, 2]}], "x": 1.5}
    }


def test_the_same_id_with_different_answers_is_two_rows(load):
    data = load('{"id": 1, "prompt": "a", "answer": "x"}', '{"id": 1, "prompt": "a", "answer": "y"}')
    assert [(row.prompt, row.answer) for row in data.rows] == [("a", "x"), ("a", "y")]


def test_messages(load):
    data = load(
        '{"prompt": [{"role": "system", "content": "s", "name": null}, {"role": "user", "content": "u", "x": [null]}]}',
        '{"prompt": [{"role": "user", "content": [{"type": "text", "text": "t"}]}]}',
    )
    assert data.rows[0].prompt == ({"role": "system", "content": "s"}, {"role": "user", "content": "u", "x": [None]})
    assert data.rows[1].prompt == ({"role": "user", "content": [{"type": "text", "text": "t"}]},)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: Input data was truncated"),
        ('{"prompt": "a"} x', "not JSON: JSON is malformed: trailing characters (byte 17)"),
        ('{"prompt": "a", "answer": NaN}', "not JSON: JSON is malformed: invalid character (byte 26)"),
        ("5", "not a JSON object; a row is {…} with a key for each column"),
        (b'{"prompt": "a", "x": "\xff"}', "not UTF-8 text (byte 23)"),
        ('{"promt": "a"}', "no column 'prompt'; set data.prompt_key if it is 'promt'"),
        ('{"question": "a", "b": 1}', "no column 'prompt'; set data.prompt_key if it is 'question'"),
        ('{"b": "a", "c": 1}', "no column 'prompt'; it has b, c"),
        ('{"prompt": ""}', "column 'prompt' is empty"),
        ('{"prompt": 5}', "column 'prompt' must be text or a list of messages"),
        ('{"prompt": []}', "column 'prompt' is a list without messages"),
        ('{"prompt": ["a"]}', 'prompt[0] must be a message such as {"role": "user", "content": "…"}'),
        ('{"prompt": [{"role": "user"}]}', "prompt[0] has no content that is text"),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}',
            "prompt[0] has content that isn't text; only text is supported",
        ),
        (
            '{"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}',
            "the last message of 'prompt' is the assistant's: nothing is left to be answered",
        ),
        (
            '{"prompt": "a", "answer": ["x"]}',
            "column 'answer' must be text or a number; what has more to it goes into another column: "
            "reward functions get them all",
        ),
        (
            '{"prompt": "a", "n": 99999999999999999999}',
            "column 'n': a whole number of more than 64 bits; write it as text, in quotes",
        ),
    ],
)
def test_a_wrong_line_is_named(load, line, message):
    assert wrong(load, '{"prompt": "good"}', "", line) == [f"d.jsonl:3: {message}"]


def test_many_wrong_lines(load):
    lines = wrong(load, *["x"] * 12)
    assert lines[9].startswith("d.jsonl:10: not JSON")
    assert lines[10:] == ["d.jsonl: and 2 more such lines"]


def test_files_that_are_no_data(load):
    assert wrong(load, "", " ") == ["d.jsonl: holds no rows; a JSONL file has one JSON object a line"]
    assert wrong(load, "[{}]") == [
        "d.jsonl:1: begins a JSON list; a JSONL file has one JSON object a line, without commas between"
    ]
    with pytest.raises(DataError, match=r"^none\.jsonl: can't be read: No such file"):
        Dataset.load("none.jsonl", "prompt", "answer")


# -------------------------------------------------------------------------------------------------------- several files


def test_several_files_are_one_after_another(load, tmp_path):
    load('{"prompt": "a"}', "", '{"prompt": "b"}')
    (tmp_path / "e.jsonl").write_text('\n{"prompt": "c"}\n')
    data = Dataset.load_all(["d.jsonl", "e.jsonl", "d.jsonl"], "prompt", "answer")
    assert [row.prompt for row in data.rows] == ["a", "b", "c", "a", "b"]
    assert data.files == (range(2), range(2, 3), range(3, 5))
    assert [data.where(row) for row in range(5)] == ["d.jsonl:1", "d.jsonl:3", "e.jsonl:2", "d.jsonl:1", "d.jsonl:3"]


def test_the_wrong_lines_of_all_files_are_named(load, tmp_path):
    (tmp_path / "e.jsonl").write_text('{"prompt": "c"}\n\n5\n')
    (tmp_path / "d.jsonl").write_text("x")
    with pytest.raises(DataError) as caught:
        Dataset.load_all(["d.jsonl", "e.jsonl", "none.jsonl"], "prompt", "answer")
    assert [line.partition(": ")[0] for line in str(caught.value).split("\n")] == [
        "d.jsonl:1", "e.jsonl:3", "none.jsonl",
    ]  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- Parquet


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Write rows as a Parquet file and read it back; columns and their types are found as pyarrow finds them."""
    monkeypatch.chdir(tmp_path)

    def table(rows: list[dict[str, object]], schema: pa.Schema | None = None) -> Dataset:
        if schema is None:  # pyarrow takes the columns of the first row
            rows = [{key: None for other in rows for key in other} | row for row in rows]
        parquet.write_table(pa.Table.from_pylist(rows, schema=schema), "d.parquet")
        return Dataset.load("d.parquet", "prompt", "answer")

    return table


def values(row: Row) -> dict[str, object]:
    return {key: msgspec.msgpack.decode(raw) for key, raw in row.columns.items()}


def test_keys_that_a_table_filled_in_are_dropped_again(table):
    """P32: nested dicts with different keys, and test lists."""
    data = table([
        {"prompt": "a", "answer": "1", "tests": [{"in": [1, 2], "out": "x"}, {"in": [3]}], "meta": {"deep": {"a": 1}}},
        {"prompt": "b", "answer": "2", "tests": [], "meta": {"deep": {"b": [None, 2]}, "other": True}},
        {"prompt": "c", "answer": None, "only": "c"},
    ])  # fmt: skip
    assert [values(row) for row in data.rows] == [
        {"tests": [{"in": [1, 2], "out": "x"}, {"in": [3]}], "meta": {"deep": {"a": 1}}},
        {"tests": [], "meta": {"deep": {"b": [None, 2]}, "other": True}},
        {"only": "c"},
    ]
    assert [(row.line, row.prompt, row.answer) for row in data.rows] == [(1, "a", "1"), (2, "b", "2"), (3, "c", None)]
    assert data.where(1) == "d.parquet:2"


def test_messages_of_a_table(table):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "me"}]
    data = table([{"prompt": messages, "answer": 5}, {"prompt": messages[1:], "answer": -7}])
    assert data.rows[0].prompt == ({"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "me"})
    assert [row.answer for row in data.rows] == ["5", "-7"]


def test_types_of_a_table(table):
    schema = pa.schema([
        ("prompt", pa.dictionary(pa.int32(), pa.large_string())),
        ("answer", pa.decimal128(10, 2)),
        ("map", pa.map_(pa.string(), pa.int64())),
        ("when", pa.timestamp("us")),
        ("list", pa.list_(pa.float32(), 2)),
        ("bytes", pa.binary()),
    ])  # fmt: skip
    when = datetime(2024, 2, 3)
    (row,) = table(
        [
            {
                "prompt": "p", "answer": Decimal("0.10"), "map": [("a", 1)], "when": when, "list": [0.5, 1.0],
                "bytes": b"x",
            }
        ],
        schema,
    ).rows  # fmt: skip
    assert (row.prompt, row.answer) == ("p", "0.10")
    assert values(row) == {"map": {"a": 1}, "when": when.isoformat(), "list": [0.5, 1.0], "bytes": b"x"}


def test_wrong_rows_of_a_table_are_named(table, tmp_path):
    with pytest.raises(DataError) as caught:
        table([{"prompt": "", "answer": 1}, {"prompt": "b", "answer": 1}, {"answer": 2}])
    assert str(caught.value).split("\n") == [
        "d.parquet:1: column 'prompt' is empty",
        "d.parquet:3: no column 'prompt'; it has answer",
    ]
    with pytest.raises(DataError, match=r"^d\.parquet:1: column 'prompt' must be text or a list of messages$"):
        table([{"prompt": 5}])
    with pytest.raises(DataError, match=r"^d\.parquet: holds no rows$"):
        table([], pa.schema([("prompt", pa.string())]))
    (tmp_path / "d.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"^d\.parquet: not a Parquet file that can be read, after row 0: "):
        Dataset.load("d.parquet", "prompt", "answer")


def test_many_rows_of_a_table_in_many_groups(tmp_path):
    path = str(tmp_path / "d.parquet")
    table = pa.table({"prompt": [f"p{i}" for i in range(5000)], "answer": range(5000)})
    parquet.write_table(table, path, row_group_size=700)
    data = Dataset.load(path, "prompt", "answer")
    assert [(row.line, row.prompt, row.answer) for row in data.rows] == [(i + 1, f"p{i}", str(i)) for i in range(5000)]


def test_reading_a_table_loads_nothing_heavy(tmp_path):
    parquet.write_table(pa.table({"prompt": ["a"]}), tmp_path / "d.parquet")
    program = (
        "import sys; from areal_async.rollout.data import Dataset; assert 'pyarrow' not in sys.modules;"
        f"Dataset.load({str(tmp_path / 'd.parquet')!r}, 'prompt', 'answer');"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# what JSON can say, as tables can hold it: one type a column
texts = st.text(max_size=5)
structs = st.dictionaries(st.sampled_from("abc"), st.integers(-9, 9) | st.none(), max_size=3)


@settings(max_examples=50)
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {"prompt": texts.filter(bool)}, optional={"x": structs, "y": st.lists(structs, max_size=2)}
        ),
        min_size=1,
        max_size=5,
    )
)
def test_a_table_gives_back_what_json_says_without_nulls(tmp_path_factory, rows):
    """A struct is never filled in, and one that is wholly empty stays if it was there."""
    path = str(tmp_path_factory.getbasetemp() / "any.parquet")
    fields = pa.struct([(name, pa.int64()) for name in "abc"])
    schema = pa.schema([("prompt", pa.string()), ("x", fields), ("y", pa.list_(fields))])
    parquet.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    data = Dataset.load(path, "prompt", "answer")

    def bare(struct: dict[str, int | None]) -> dict[str, int]:
        return {key: value for key, value in struct.items() if value is not None}

    assert [values(row) for row in data.rows] == [
        ({"x": bare(row["x"])} if "x" in row else {}) | ({"y": [bare(s) for s in row["y"]]} if "y" in row else {})
        for row in rows
    ]
