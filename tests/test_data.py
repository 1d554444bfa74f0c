"""Datasets and their order."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.errors import DataError
from areal_async.rollout.data import Dataset, Positions, order


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


# ------------------------------------------------------------------------------------------------------------ the order


def test_the_order_is_pinned():
    """It must never change, or a resumed run would go through its data in another order."""
    assert [list(order(8, 0, epoch)) for epoch in (0, 1)] == PINNED
    assert list(order(8, 1, 0)) != PINNED[0]
    assert list(order(1, 0, 0)) == [0]


PINNED = [[0, 7, 2, 5, 6, 3, 1, 4], [3, 2, 0, 7, 1, 4, 5, 6]]


def test_the_order_is_fair():
    """Each row comes first about equally often: 6,000 orders of 6 rows; 1,000 ± 5 standard deviations (29)."""
    first = Counter(order(6, seed, 0)[0] for seed in range(6000))
    assert all(855 < first[row] < 1145 for row in range(6))


@given(n=st.integers(1, 40), seed=st.integers(0, 2**63), epochs=st.integers(1, 4), data=st.data())
def test_each_epoch_has_every_row_once_in_whatever_order_it_is_asked(n, seed, epochs, data):
    positions = Positions(n, seed, shuffle=True, epochs=epochs)
    rows: dict[int, int | None] = {}
    for position in data.draw(st.permutations(range(n * epochs))):
        rows[position] = positions.row(position)
    for epoch in range(epochs):
        assert [rows[epoch * n + i] for i in range(n)] == list(order(n, seed, epoch))
        assert sorted(order(n, seed, epoch)) == list(range(n))
    assert positions.row(n * epochs) is None
    assert positions.row(n * epochs + 7) is None


def test_five_prompts_for_a_batch_of_eight_repeat():
    positions = Positions(5, 0, shuffle=True, epochs=None)
    batch = [positions.row(position) for position in range(8)]
    assert sorted(batch[:5]) == list(range(5))
    assert None not in batch


def test_without_shuffling_rows_come_in_order():
    positions = Positions(3, 0, shuffle=False, epochs=2)
    assert [positions.row(position) for position in range(7)] == [0, 1, 2, 0, 1, 2, None]
