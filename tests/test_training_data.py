"""Which training prompts are asked, and what becomes of those that are too long."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.config import Config
from areal_async.controller.rollouts import Prompts, read_prompt
from areal_async.errors import DataError
from areal_async.rollout import training_data
from areal_async.rollout.text import Text
from areal_async.rollout.training_data import TrainingData, load

from .test_text import CHAT, make_model

Make = Callable[..., Config]


@pytest.fixture
def load_with(make_config: Make, tmp_path: Path) -> Callable[..., TrainingData]:
    """Files of prompts of so many characters (a token each), and options."""

    def begin(*files: list[int], **data: object) -> TrainingData:
        paths = []
        for number, lengths in enumerate(files):
            paths.append(str(tmp_path / f"{number}.jsonl"))
            rows = [json.dumps({"prompt": "1" * n, "answer": str(n)}) + "\n" for n in lengths]
            Path(paths[-1]).write_text("".join(rows))
        config = make_config()
        options = {"train": tuple(paths), "shuffle": False, "epochs": 1} | data
        config = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, **options))
        text = Text(config.model.path, config.data.chat_template)
        return load(config, text, 128)

    return begin


def asked(data: TrainingData) -> list[int]:
    """Lengths of all prompts in their order."""
    prompts, lengths, position = Prompts(data), [], 0
    while (prompt := prompts.at(position)) is not None:
        assert prompt.position == position
        assert prompt.answer == str(len(data.dataset.rows[prompt.row].prompt))
        lengths.append(len(prompt.token_ids))
        position += 1
    return lengths


def test_error_names_the_first_and_counts(load_with, tmp_path):
    with pytest.raises(DataError) as caught:
        load_with([3, 11], [12], max_prompt_tokens=10)
    assert str(caught.value) == (
        f"data.long_prompts: error: 2 of 3 prompts have more than 10 tokens, first {tmp_path}/0.jsonl:2 (11), "
        f"{tmp_path}/1.jsonl:1 (12)"
    )
    assert asked(load_with([3, 10], [9], max_prompt_tokens=10)) == [3, 10, 9]


def test_skip_leaves_them_out_and_says_how_many(load_with, tmp_path):
    data = load_with([3, 11, 10], [12, 9], max_prompt_tokens=10, long_prompts="skip")
    assert asked(data) == [3, 10, 9]
    assert data.left_out == 2
    assert data.left_out_in_words() == (
        "2 of 5 prompts are longer than 10 tokens and left out (data.long_prompts: skip)"
    )
    assert data.positions.rows_per_epoch == 3
    assert asked(load_with([11], [9], max_prompt_tokens=10, long_prompts="skip")) == [9]
    with pytest.raises(DataError, match=f"^{tmp_path}/0.jsonl: every prompt is longer than 10 tokens"):
        load_with([11], [12], max_prompt_tokens=10, long_prompts="skip")
    with pytest.raises(DataError, match=f"^{tmp_path}/1.jsonl: every prompt is longer than 10 tokens"):
        load_with([9], [12], max_prompt_tokens=10, long_prompts="skip", weights=(1.0, 1.0))


def test_cut_asks_the_end(load_with, tmp_path):
    data = load_with([3, 11], max_prompt_tokens=10, long_prompts="cut")
    assert asked(data) == [3, 10]
    prompt = Prompts(data).at(1)
    assert prompt is not None
    assert prompt.text.replace(" ", "") == "1" * 10  # this tokenizer has no decoder that would join them


@pytest.mark.parametrize("policy", ["error", "skip", "cut"])
def test_without_a_limit_the_context_less_one(load_with, policy):
    """P21: a prompt that leaves no room is never asked."""
    assert asked(load_with([127], long_prompts=policy)) == [127]
    assert asked(load_with([127], long_prompts=policy, max_prompt_tokens=500)) == [127]
    if policy == "cut":
        assert asked(load_with([128, 44_249], long_prompts=policy)) == [127, 127]
    else:
        with pytest.raises(DataError):
            load_with([128], long_prompts=policy)


def test_shares_of_what_is_left(load_with):
    data = load_with([3, 11, 4], [5], max_prompt_tokens=10, long_prompts="skip", weights=(2.0, 1.0), epochs=2)
    lengths = asked(data)
    assert len(lengths) == 6
    assert lengths.count(5) == 2
    assert [n for n in lengths if n != 5] == [3, 4, 3, 4]


def test_most_prompts_are_not_tokenized(load_with, monkeypatch):
    """What has fewer bytes than the limit has tokens fits."""
    seen: list[int] = []
    encode_all = Text.encode_all

    def noted(self: Text, prompts: list[str]) -> list[list[int]]:
        seen.append(len(prompts))
        return encode_all(self, prompts)

    monkeypatch.setattr(Text, "encode_all", noted)
    load_with([10] * 2000 + [11], max_prompt_tokens=10, long_prompts="skip")
    assert seen == [1]


def test_a_long_tokenization_says_how_far_it_is(load_with, monkeypatch, caplog):
    monkeypatch.setattr(training_data, "TELL_S", -1.0)
    monkeypatch.setattr(training_data, "TOGETHER", 2)
    with caplog.at_level(logging.INFO, "areal_async"):
        load_with([11, 12, 13, 1], max_prompt_tokens=10, long_prompts="skip")
    assert [m.rpartition(" after")[0] for m in caplog.messages] == [
        "measuring prompts: 2 of 3", "measuring prompts: 3 of 3",
    ]  # fmt: skip


def test_the_same_id_is_graded_by_its_own_answer(load_with, tmp_path, make_config):
    """P32: nothing looks at ids."""
    rows = [{"id": 7, "prompt": "1+1", "answer": "2"}, {"id": 7, "prompt": "1+1", "answer": "3"}]
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = Prompts(load_with([1], train=(str(tmp_path / "same.jsonl"),)))
    first, second = prompts.at(0), prompts.at(1)
    assert first is not None
    assert second is not None
    assert [(p.row, p.answer, msgspec.msgpack.decode(p.columns["id"])) for p in (first, second)] == [
        (0, "2", 7), (1, "3", 7),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ bounds, and cutting

messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=40)},
        optional={"name": st.text(max_size=3)},
    ),
    min_size=1,
    max_size=4,
).map(tuple)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Text]:
    folder = tmp_path_factory.mktemp("texts")
    return [Text(make_model(folder / "chat", CHAT)), Text(make_model(folder / "plain", None), "plain")]


@given(prompt=st.text(max_size=60) | messages)
def test_a_prompt_never_has_more_tokens_than_its_bound(texts, prompt):
    for text in texts:
        try:
            tokens = len(text.encode(prompt))
        except DataError:  # no tokens, or a template that isn't there
            continue
        assert tokens <= text.most_tokens(prompt)


@given(prompt=st.text(min_size=1, max_size=60), limit=st.integers(1, 20))
def test_what_is_cut_keeps_its_end_and_a_bos_that_leads(texts, prompt, limit):
    for text in texts:
        ids = text.encode(prompt)
        cut = text.cut(ids, limit)
        if len(ids) <= limit:
            assert cut == ids
            continue
        assert len(cut) == limit
        kept = cut[1:] if ids[0] == text.bos_token_id else cut
        assert kept == ids[len(ids) - len(kept) :]
        assert (cut[0] == text.bos_token_id) or ids[0] != text.bos_token_id


def test_a_template_that_writes_more_than_was_counted_is_found_when_it_is_read(tmp_path, make_config):
    """One that writes contents twice; the group fails, and nothing is sent."""
    config = make_config("data.max_prompt_tokens=100", "data.long_prompts=skip", "data.chat_template=auto")
    folder = make_model(tmp_path / "twice", "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}")
    text = Text(folder)
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "1 " * 49}) + "\n")
    config = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, train=(str(path),)))
    data = load(config, text, 1000)
    assert data.left_out == 0
    assert len(read_prompt(data.dataset, text, 0, 0).token_ids) > 100
    with pytest.raises(DataError, match=r"long\.jsonl:1: \d+ tokens, and 100 are the most"):
        Prompts(data).at(0)
