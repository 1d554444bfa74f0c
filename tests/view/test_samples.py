"""Samples for people: filters and order against a plain loop, texts as they are, one sample with all of its parts."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal_async.errors import ConfigError
from areal_async.log.format import PayloadRef
from areal_async.messages import SampleDone
from areal_async.trace.life import GroupLife, SampleLife
from areal_async.trace.samples import Decode
from areal_async.view import tables
from areal_async.view.api import SampleQuery, SampleRow
from areal_async.view.data_row import MOST_CHARACTERS, columns_of
from areal_async.view.made_rows import MadeRows
from areal_async.view.samples import MOST_OF_A_CHARACTER, MOST_ROWS, pieces, search

from ..audit_lies import true_log
from ..trace.written import write
from .test_index import opened, read_all

TEXTS: Final = ("100% right", "a_b", "axb", "Straße ÄÖ", "<script>alert('1')</script>", "' OR 1=1 --", "", "7+8=15")
COUNT: Final = 60


class Known(msgspec.Struct, frozen=True):
    """A row as it was put in, and its text."""

    row: SampleRow
    text: str


def known(number: int) -> Known:
    """Rows that differ in everything that can be filtered."""
    trained, verdict = number % 3 == 0, (None, "right", "wrong", "timeout")[number % 4]
    text = TEXTS[number % len(TEXTS)]
    row = SampleRow(
        **{"id": f"{number // 4}.{number % 4}", "group": number // 4, "at": float(number * 7 % COUNT)},
        **{"outcome": "trained" if trained else "filtered", "step": number // 8 if trained else None},
        **{"verdict": verdict, "reward": None if verdict is None else number % 5 / 4},
        **{
            "advantage": (number % 7 - 3.0) if trained else None,
            "lag": number // 8 - number // 12 if trained else None,
        },
        **{"length": 3 + number % 11, "prompt_tokens": 5, "oldest": number // 12, "newest": number // 12 + number % 3},
        **{"versions": 1 + number % 3, "truncated": number % 6 == 0, "server": str(number % 2), "start": text},
    )
    return Known(row, text)


ALL: Final = [known(number) for number in range(COUNT)]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with closing(tables.open_database(tmp_path_factory.mktemp("view") / "x.sqlite")) as opened_database:
        tables.make_tables(opened_database)
        for each in ALL:
            row = each.row
            group = GroupLife(row.group, row.group, 0.0, [], row=0, floor=row.oldest)
            done = SampleDone(
                **{"at": row.at, "sample": row.id, "attempt": 0, "oldest": row.oldest, "newest": row.newest},
                **{"prompt_tokens": row.prompt_tokens, "length": row.length, "loss_tokens": row.length},
                finish="length" if row.truncated else "stop",
            )
            sample = SampleLife(row.id, server=row.server, done=done, payload=PayloadRef(1, 16, 8))
            looked = tables.Looked(row.versions, {row.oldest: row.length}, row.start)
            tables.insert_answers(opened_database, [tables.answer_row(group, sample, looked)])
            opened_database.execute(
                "UPDATE samples SET outcome=?, step=?, verdict=?, reward=?, advantage=?, lag=? WHERE key=?",
                (row.outcome, row.step, row.verdict, row.reward, row.advantage, row.lag, tables.key_of(row.id)),
            )
            opened_database.execute(
                "INSERT INTO texts VALUES (?, ?)", (tables.key_of(row.id), tables.folded(f"the prompt\x1f{each.text}"))
            )
        yield opened_database


def wanted(query: SampleQuery) -> set[str]:
    """The ids that a plain loop leaves."""

    def has(each: Known) -> bool:
        row = each.row
        for field in ("step", "verdict", "outcome", "server", "group", "truncated"):
            if (value := getattr(query, field)) not in (None, "") and getattr(row, field) != value:
                return False
        for field in ("reward", "lag", "length", "versions"):
            least, most = getattr(query, f"{field}_min"), getattr(query, f"{field}_max", None)
            value = getattr(row, field)
            if (least is not None or most is not None) and value is None:
                return False
            if (least is not None and value < least) or (most is not None and value > most):
                return False
        if query.version is not None and not row.oldest <= query.version <= row.newest:
            return False
        return query.text.casefold() in f"the prompt\x1f{each.text}".casefold()

    return {each.row.id for each in ALL if has(each)}


FILTERS: Final[dict[str, st.SearchStrategy[Any]]] = {
    "step": st.integers(0, 8),
    "verdict": st.sampled_from(["right", "wrong", "timeout", "none"]),
    "outcome": st.sampled_from(["trained", "filtered"]),
    "reward_min": st.sampled_from([0.0, 0.25, 0.5]),
    "reward_max": st.sampled_from([0.5, 1.0]),
    "lag_min": st.integers(0, 3),
    "lag_max": st.integers(0, 3),
    "length_min": st.integers(3, 8),
    "length_max": st.integers(5, 12),
    "versions_min": st.integers(1, 3),
    "version": st.integers(0, 6),
    "truncated": st.booleans(),
    "server": st.sampled_from(["0", "1"]),
    "group": st.integers(0, 14),
    "text": st.sampled_from(["%", "_", "a_b", "STRASSE", "äö", "script", "' or", "--", "PROMPT", "\\", "7+8"]),
}


@st.composite
def queries(draw: st.DrawFn) -> SampleQuery:
    names = draw(st.lists(st.sampled_from(sorted(FILTERS)), max_size=2, unique=True))
    return SampleQuery(
        **{name: draw(FILTERS[name]) for name in names},
        sort=draw(st.sampled_from(SampleRow.__struct_fields__)),
        descending=draw(st.booleans()),
        limit=draw(st.sampled_from([1, 7, MOST_ROWS])),
        offset=draw(st.sampled_from([0, 0, 3, 50])),
    )


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(queries())
def test_filters_and_order_are_those_of_a_plain_loop(database: Any, query: SampleQuery) -> None:
    total, rows = search(database, query)
    ids = wanted(query)
    assert total == len(ids)
    assert len(rows) == max(0, min(query.limit, total - query.offset))
    assert len({row.id for row in rows}) == len(rows)
    by_id = {each.row.id: each.row for each in ALL}
    assert all(row == by_id[row.id] and row.id in ids for row in rows)
    if query.sort != "id":
        values = [getattr(row, query.sort) for row in rows]
        there = [value for value in values if value is not None]
        assert there == sorted(there, reverse=query.descending)
        assert values == [*there, *[None] * (len(values) - len(there))]  # what has none comes last, both ways


def test_pages_follow_one_another(database: Any) -> None:
    for sort in SampleRow.__struct_fields__:
        pages = [
            row.id
            for offset in range(0, COUNT, 7)
            for row in search(database, SampleQuery(sort=sort, limit=7, offset=offset))[1]
        ]
        assert len(set(pages)) == len(pages) == COUNT


@pytest.mark.parametrize("text", ["%", "_", "' OR", "\\", '"', "\x00", "[", "*", "?", "a_b"])
def test_a_text_is_searched_as_it_stands(database: Any, text: str) -> None:
    assert search(database, SampleQuery(text=text))[0] == len([each for each in ALL if text in each.text])


@pytest.mark.parametrize(
    ("query", "error"),
    [
        (SampleQuery(sort="at; DROP TABLE samples"), "'at; DROP TABLE samples' is no column; there is"),
        (SampleQuery(sort="key"), "'key' is no column"),
        (SampleQuery(limit=MOST_ROWS + 1), "limit: 501 is not in 1 … 500"),
        (SampleQuery(limit=0), "limit: 0 is not in 1 … 500"),
        (SampleQuery(offset=-1), "offset: -1 is below 0"),
    ],
)
def test_wrong_questions(database: Any, query: SampleQuery, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        search(database, query)


# ------------------------------------------------------------------------------------------------------------- tokens


def byte_tokens() -> Decode:
    """A tokenizer whose tokens are single bytes, as byte-level BPE has them for what it doesn't know."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(letters)}, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def stripping_tokens() -> Decode:
    """One that leaves the space before the first word out, as SentencePiece's do."""
    words = ["▁a", "▁b", "c", "▁", "<0xE2>", "<0x82>", "<0xAC>"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="c"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=20))
def test_any_bytes_join_to_the_answer(ids: list[int]) -> None:
    decode = byte_tokens()
    found = pieces(decode, ids, decode(ids))
    assert "".join(found) == decode(ids)
    assert len(found) == len(ids)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=16))
def test_pieces_of_a_tokenizer_that_strips(ids: list[int]) -> None:
    decode = stripping_tokens()
    found = pieces(decode, ids, decode(ids))
    assert "".join(found) == decode(ids)
    assert len(found) == len(ids)


def test_bytes_that_are_no_character_take_no_more_time_than_others() -> None:
    asked: list[int] = []

    def decode(ids: list[int]) -> str:
        asked.append(len(ids))
        return "\N{REPLACEMENT CHARACTER}" * len(ids)

    ids = list(range(200))
    assert "".join(pieces(decode, ids, decode(ids))) == "\N{REPLACEMENT CHARACTER}" * 200
    assert max(asked[1:]) <= 2 * MOST_OF_A_CHARACTER


def test_each_token_has_its_own_text() -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoded = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("a€ü b")[0][0]
    ids = [letters.index(letter) for letter in encoded]
    assert pieces(byte_tokens(), ids, "a€ü b") == ["a", "", "", "€", "", "ü", " ", "b"]
    strips = stripping_tokens()
    assert pieces(strips, [0, 1, 2, 0], strips([0, 1, 2, 0])) == ["a", " b", "c", " a"]
    assert pieces(strips, [0, 4, 5, 6], strips([0, 4, 5, 6])) == ["a", "", "", "€"]


# --------------------------------------------------------------------------------------------------- a sample in full


def letters(ids: list[int]) -> str:
    return "".join(chr(ord("A") + number % 58) for number in ids)


def test_a_sample_in_full(tmp_path: Path) -> None:
    run = write(tmp_path, true_log())
    (run / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2", "tests": ["f(1)"]}\n' * 40)
    (run / "config.yaml").write_text(f"data: {{train: [{run / 'train.jsonl'}], prompt_key: prompt}}\n")
    checks = [
        {"sample": "0.0", "attempt": 1, "at": 1.0, "verdict": "right", "reward": 1.0, "why": "so", "extracted": "2"},
        {"sample": "0.1", "attempt": 0, "at": 1.0, "verdict": "wrong", "reward": 0.0, "seconds": 0.5},
    ]
    (run / "checks.jsonl").write_text("".join(json.dumps(check) + "\n" for check in checks))
    with opened(run, decode=letters) as (index, samples):
        read_all(index, 10.0)
        full = samples.full("0.0")
        assert full is not None
        assert full.record.response is not None
        assert "".join(full.tokens or []) == full.record.response == letters(full.record.response_ids or [])
        assert "".join(full.prompt_tokens or []) == full.record.prompt
        assert [row.id for row in full.members] == ["0.0", "0.1"]
        assert [(check.verdict, check.why, check.extracted) for check in full.checks] == [("right", "so", "2")]
        assert full.columns == {"answer": "2", "tests": '["f(1)"]'}
        assert full.missing == [
            "log π_prox of step 1 wasn't kept, or was removed with the step's arrays",
            "row 0 of the data has another prompt by now: its file was changed, or prompts are rewritten",
        ]
        for name in ("99.0", "0.1048577", f"{1 << 70}.0"):
            assert samples.full(name) is None
        found = samples.page(SampleQuery(text=(full.record.response or "")[:4].lower()))
        assert "0.0" in [row.id for row in found.rows]
        assert found.missing == ""
        assert next(row for row in found.rows if row.id == "0.0").start == full.record.response


def test_log_probabilities_of_the_trainer(tmp_path: Path) -> None:
    run = write(tmp_path, true_log())
    (run / "prox").mkdir()
    with opened(run) as (index, samples):
        read_all(index, 10.0)
        record = samples.full("0.0").record  # type: ignore[union-attr]
        values = np.full(record.response_tokens, -0.25, np.float32)
        values[0] = np.nan
        np.savez(run / "prox" / "step-000001.npz", **{"0.0": values, "0.1": np.zeros(9, np.float32)})  # type: ignore[arg-type]
        full, short = samples.full("0.0"), samples.full("0.1")
        assert full is not None
        assert full.prox == [None, *[-0.25] * (record.response_tokens - 1)]
        assert short is not None
        assert short.prox is None
        assert any("log π_prox of 9 tokens was kept, the answer has" in line for line in short.missing)
        (run / "prox" / "step-000001.npz").write_bytes(b"nothing")
        damaged = samples.full("0.0")
        assert damaged is not None
        assert any("step-000001.npz: can't be read" in line for line in damaged.missing)
        filtered = samples.full("1.0")
        assert filtered is not None
        assert not [line for line in filtered.missing if "prox" in line]  # nobody trained it


def test_arrays_that_have_left_the_disk(tmp_path: Path) -> None:
    run = write(tmp_path, true_log())
    (run / "log" / "payload-000001.seg").unlink()
    with opened(run, missing="no model.path") as (index, samples):
        read_all(index, 10.0)
        full = samples.full("1.0")
        assert full is not None
        assert (full.tokens, full.prompt_tokens, full.record.response_ids) == (None, None, None)
        assert (full.record.outcome, full.record.verdict, len(full.members)) == ("filtered", "right", 2)
        assert full.missing == [
            "released: payload-000001.seg was deleted when nobody could ask for its samples again",
            "no texts, tokens only: no model.path",
            f"what the check said isn't known: {run / 'checks.jsonl'} has no line of this sample",
            f"no columns of the data's row {full.record.row}: {run / 'config.yaml'} names no data.train",
        ]
        page = samples.page(SampleQuery())
        assert (page.total, page.missing) == (26, "no texts to search in: no model.path")
        lags, unknown = index.lags(0, 100)
        several = [row for row in page.rows if row.outcome == "trained" and row.oldest != row.newest]
        assert unknown >= 0
        assert sum(lags.values()) + unknown == sum(
            row.length for row in search(index.database, SampleQuery(outcome="trained", limit=500))[1]
        )
        assert bool(unknown) == any(samples.full(row.id).record.missing for row in several)  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------------ the data's row


def config_of(run: Path, *files: Path) -> None:
    (run / "config.yaml").write_text(json.dumps({"data": {"train": [str(file) for file in files]}}))


def test_rows_are_numbered_through_the_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_bytes(b'\xef\xbb\xbf{"prompt": "p0", "n": 0}\n\n  \n{"prompt": "p1", "n": 1.50}\n')
    second.write_text('{"prompt": "p2", "n": [2], "text": "x"}')
    config_of(tmp_path, first, second)
    missing: list[str] = []
    found = [columns_of(tmp_path, row, None, missing, MadeRows()) for row in range(3)]
    assert found == [{"n": "0"}, {"n": "1.5"}, {"n": "[2]", "text": "x"}]
    assert (columns_of(tmp_path, None, None, missing, MadeRows()), missing) == ({}, [])
    assert columns_of(tmp_path, 3, None, missing, MadeRows()) == {}
    assert missing == [f"no columns of the data's row 3: {first}, {second}: 3 rows are there; the files have changed"]


@pytest.mark.slow
def test_rows_of_a_parquet_file(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    table = arrow.table({"prompt": [f"p{n}" for n in range(10)], "n": [None, *range(1, 10)]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    (tmp_path / "b.jsonl").write_text('{"prompt": "q", "n": "after"}\n')
    config_of(tmp_path, tmp_path / "a.parquet", tmp_path / "b.jsonl")
    missing: list[str] = []
    assert [columns_of(tmp_path, row, None, missing, MadeRows()) for row in (0, 2, 3, 9, 10)] == [
        {}, {"n": "2"}, {"n": "3"}, {"n": "9"}, {"n": "after"},
    ]  # fmt: skip
    assert missing == []


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "can't be read: No such file or directory"),
        (b"{", "not JSON"),
        (b"[1]\n", "not a JSON object"),
        (b'{"prompt": "\xff"}\n', "not UTF-8"),
        pytest.param(b"PAR1 but nothing else", "not a Parquet file that can be read", marks=pytest.mark.slow),
    ],
)
def test_data_that_can_not_be_read_is_a_line(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_bytes(content)
    config_of(tmp_path, path)
    missing: list[str] = []
    assert columns_of(tmp_path, 0, None, missing, MadeRows()) == {}
    assert why in missing[0]


def test_a_row_that_is_another_by_now_has_a_warning(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": f"{'long ' * 20} What is\n2 + 3?", "answer": "5"}) + "\n")
    config_of(tmp_path, tmp_path / "a.jsonl")
    missing: list[str] = []
    for prompt in (
        "<|user|>long long What is 2 + 3?<|assistant|>" + "long" * 20,
        f"{'long' * 20}What is\n2 + 3?",
        None,
    ):
        assert columns_of(tmp_path, 0, prompt, missing, MadeRows()) == {"answer": "5"}
    assert len(missing) == 1  # the first is cut where there are 30 characters to compare
    missing.clear()
    assert columns_of(tmp_path, 0, "<|user|>What is 2 + 4?", missing, MadeRows()) == {"answer": "5"}
    assert missing == ["row 0 of the data has another prompt by now: its file was changed, or prompts are rewritten"]


def test_a_long_column_is_cut(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "p", "tests": "x" * (MOST_CHARACTERS + 5)}) + "\n")
    config_of(tmp_path, tmp_path / "a.jsonl")
    assert columns_of(tmp_path, 0, None, [], MadeRows())["tests"].endswith("x… (5 more characters)")
