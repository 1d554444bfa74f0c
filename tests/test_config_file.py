"""Configuration files: YAML 1.2 scalars, every problem with its line, paths, overrides, and the way back."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.config import (
    Config,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    ServerConfig,
    TrainConfig,
)
from areal_async.config_file import MOST_BYTES, Sources, dump_config, load_config, load_with_sources
from areal_async.errors import ConfigError

WHOLE = """\
name: mine
model:
  path: model
data:
  train: data/train.jsonl
train:
  steps: 3
  batch_groups: 8
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write the file `mine.yaml` in the working directory and give its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        Path("mine.yaml").write_bytes(text.encode())
        return "mine.yaml"

    return write


def wrong(path: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).split("\n")


def test_a_minimal_file(write, tmp_path):
    config = load_config(write(WHOLE))
    assert config.model.path == str(tmp_path / "model")
    assert config.data.train == (str(tmp_path / "data/train.jsonl"),)
    assert config.runs_dir == str(tmp_path / "runs")
    assert (config.seed, config.train.lr, config.rollout.stop_token_ids) == (0, 1e-6, ())


# ------------------------------------------------------------------------------------------------------------- scalars


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-6", 1e-6), ("1.0e-6", 1e-6), ("1E-6", 1e-6), (".5", 0.5), ("1", 1.0), ("5.", 5.0), ("+2e0", 2.0)],
)
def test_numbers_of_yaml_1_2(write, written, value):
    lr = load_config(write(WHOLE + f"  lr: {written}\n")).train.lr
    assert lr == value
    assert isinstance(lr, float)


@pytest.mark.parametrize("word", ["no", "on", "yes", "off", "y", "N", "123", "1.10", "0123", "1e3", "12_3"])
def test_text_is_what_was_written(write, word):
    assert load_config(write(WHOLE.replace("mine", word))).name == word


@pytest.mark.parametrize("written", ["0x10", "0o20", "16", "+16"])
def test_whole_numbers(write, written):
    assert load_config(write(WHOLE + f"  ranks: {written}\n")).train.ranks == 16


@pytest.mark.parametrize("written", ["", "~", "null", "NULL"])
def test_nothing_is_null(write, written):
    assert load_config(write(WHOLE + f"server:\n  cores: {written}\n")).server.cores is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seed: 0123", "seed: must be a whole number ≥ 0, not the text '0123'; write 123"),
        ("seed: 1_000", "seed: must be a whole number ≥ 0, not the text '1_000'; write 1000"),
        ("seed: 1e3", "seed: must be a whole number ≥ 0, not the number 1e3; write 1000"),
        ("seed: '5'", "seed: must be a whole number ≥ 0, not the text '5'; write 5"),
        ("seed: true", "seed: must be a whole number ≥ 0, not true"),
        ("seed: -1", "seed: must be a whole number ≥ 0, not the number -1; the nearest is 0"),
        ("seed:", "seed: must be a whole number ≥ 0, not nothing (null)"),
        ("seed: [1]", "seed: must be a whole number ≥ 0, not a list"),
        ("seed: {a: 1}", "seed: must be a whole number ≥ 0, not a section"),
        ("seed: 9223372036854775808", "seed: must be a whole number ≥ 0, not the number 9223372036854775808"),
        ("eval: {temperature: 1e999}", "eval.temperature: must be a number ≥ 0 and ≤ 10, not the number 1e999"),
        ("eval: {temperature: .nan}", "eval.temperature: must be a number ≥ 0 and ≤ 10, not the number .nan"),
        ("eval: {temperature: 11}", "eval.temperature: must be a number ≥ 0 and ≤ 10, not the number 11; the nearest is 10"),  # noqa: E501
        ("eval: {limit: none}", "eval.limit: must be a whole number ≥ 1, or null, not the text 'none'"),
        ("server: {enforce_eager: on}", "server.enforce_eager: must be true or false, not the text 'on'; write true"),
        ("server: {cores: none}", "server.cores: must be text, or null, not the text 'none'; write null for none, or 'none' in quotes if the text is meant"),  # noqa: E501
        ("server: {cores: true}", "server.cores: must be text, or null, not true; write 'true' in quotes if the text is meant"),  # noqa: E501
        ("rollout: {stop_token_ids: 5}", "rollout.stop_token_ids: must be a list of whole numbers, not the number 5; write [5]"),  # noqa: E501
        ("rollout: {stop_token_ids: [1, x]}", "rollout.stop_token_ids[1]: must be a whole number, not the text 'x'"),
        ("rollout: {when_older: wiat}", "rollout.when_older: must be drop, mask, train or wait, not the text 'wiat'; did you mean wait?"),  # noqa: E501
        ("model_path: x", "model_path: no such key; did you mean model.path?"),
        ("lr: 1", "lr: no such key; did you mean train.lr?"),
        ("laerning_rate: 1.0e-6", "laerning_rate: no such key; did you mean train.lr?"),
        ("train.lr: 1", "train.lr: no such key; write it as `lr:` indented under `train:`"),
        ("zzz: 1", "zzz: no such key; the keys here are name, seed, model, data, rollout, server, reward, train, weights, checkpoint, eval, log, metrics, import_path, runs_dir, runtime_dir"),  # noqa: E501
        ("rollout: 5", "rollout: is a section, whose keys stand indented under it; not the number 5"),
        ("log: {segment_bytes: 1}", "log.segment_bytes: must be a whole number ≥ 65536, not the number 1; the nearest is 65536"),  # noqa: E501
    ],
)  # fmt: skip
def test_a_wrong_line(write, line, message):
    assert wrong(write(WHOLE + line + "\n")) == [f"mine.yaml:9: {message}"]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("", "data.train: must be a list of at least 1 text, not nothing (null)"),
        ("[]", "data.train: must be a list of at least 1 text, not a list of 0"),
        ("[a.jsonl, null]", "data.train[1]: must be text, not nothing (null)"),
        ("{a: 1}", "data.train: must be a list of at least 1 text, not a section"),
    ],
)
def test_a_list_without_what_belongs_into_it(write, written, message):
    assert wrong(write(WHOLE.replace("data/train.jsonl", written))) == [f"mine.yaml:5: {message}"]


@pytest.mark.parametrize("written", ["a.jsonl", "[a.jsonl]", "\n  - a.jsonl"])
def test_one_text_is_a_list_of_one(write, tmp_path, written):
    text = WHOLE.replace("data/train.jsonl", written)
    assert load_config(write(text)).data.train == (str(tmp_path / "a.jsonl"),)
    assert load_config(write(text), ["data.train=[b.jsonl, /c d.parquet]"]).data.train == (
        str(tmp_path / "b.jsonl"),
        "/c d.parquet",
    )
    assert load_config(write(text), ["server.extra_args=--foo"]).server.extra_args == ("--foo",)


def test_name_must_be_a_folder_name(write):
    what = "must be text of the form ^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$, not the text 'my run!'; try my-run"
    assert wrong(write(WHOLE.replace("mine", "my run!"))) == [f"mine.yaml:1: name: {what}"]


# ---------------------------------------------------------------------------------------------------------- whole files


def test_all_problems_at_once_in_the_order_of_lines(write):
    text = WHOLE.replace("steps: 3", "steps: 0") + "  batch_groups: 9\n  zero_stage: 4\nrollout:\n  max_stalenes: 1\n"
    assert wrong(write(text), "train.lr=0", "train.lr=1", "foo", "rolout.retries=1", "train=4") == [
        "mine.yaml:7: train.steps: must be a whole number ≥ 1, not the number 0; the nearest is 1",
        "mine.yaml:9: train.batch_groups: given twice; first in line 8; keep one of them",
        "mine.yaml:10: train.zero_stage: must be 0, 1, 2 or 3, not the number 4",
        "mine.yaml:12: rollout.max_stalenes: no such key; did you mean rollout.max_staleness?",
        "command line: train.lr: given twice; keep one of them",
        "command line: 'foo' is not of the form key.path=value",
        "command line: train: is a section; name one of its keys, such as train.KEY=VALUE",
        "command line: train.lr: must be a number > 0, not the number 0",
        "command line: rolout: no such key; did you mean rollout?",
    ]


def test_what_is_missing(write):
    assert wrong(write("name: x\ntrain:\n  steps: 1\n")) == [
        "mine.yaml:1: model.path: missing; folder of a causal language model in Hugging Face form, with its "
        "tokenizer. Relative paths count from the configuration file's folder.",
        "mine.yaml:1: data.train: missing; training problems: JSONL or Parquet files, or "
        "`reasoning_gym:TASK?size=N&seed=S`.",
        "mine.yaml:2: train.batch_groups: missing; B: groups (prompts) per training step.",
    ]
    assert [line.split(":")[2] for line in wrong(write("# nothing\n"))] == [
        " name", " model.path", " data.train", " train.steps", " train.batch_groups",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\n\tseed: 1\n", "mine.yaml:2: a tab before a key; YAML indents by spaces only"),
        ("\tname: x\n", "mine.yaml:1: a tab before a key; YAML indents by spaces only"),
        ("a:\n\tb: 1\n\n\tc: 1\n", "mine.yaml:2: a tab before a key, as in line 4; YAML indents by spaces only"),
        ("\ta: 1\n" * 9, "mine.yaml:1: a tab before a key, as in 8 lines after it; YAML indents by spaces only"),
        ("name: x\ntrain:\n  \tlr: 1\n", "mine.yaml:3: a tab before a key; YAML indents by spaces only"),
        ("name:\tx\n", "mine.yaml:1: not YAML: found character '\\t' that cannot start any token, while scanning for the next token"),  # noqa: E501
        ("name: [x\n", "mine.yaml:2: not YAML: expected ',' or ']', but got '<stream end>', while parsing a flow sequence"),  # noqa: E501
        ("name: &a x\ndata: *a\n", "mine.yaml:2: not YAML: an alias (*name) isn't supported; write the value out"),
        ("- 1\n", "mine.yaml:1: must be a file of `key: value` lines, not a single value or a list"),
        ("name: a\n---\nname: b\n", "mine.yaml:2: not YAML: but found another document, expected a single document in the stream"),  # noqa: E501
        ("name: a\nseed: \x07\n", "mine.yaml:2: character #x0007 isn't allowed in YAML"),
        pytest.param(
            "name: " + "[" * 3000, "mine.yaml:1: not a configuration: nested too deeply", marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_not_yaml(write, text, message):
    assert wrong(write(text)) == [message]


def test_tags_are_not_read(write):
    lines = wrong(write(WHOLE + "seed: !!python/object/apply:os.getpid []\n"))
    assert lines[0] == (
        "mine.yaml:9: seed: a tag (tag:yaml.org,2002:python/object/apply:os.getpid) isn't supported; "
        "write the value alone"
    )


def test_unreadable_files(write, tmp_path):
    assert wrong("none.yaml") == ["none.yaml: can't be read: No such file or directory"]
    Path("data.jsonl").write_text("#" * (MOST_BYTES + 1))
    assert wrong("data.jsonl") == ["data.jsonl: larger than 1 MiB: not a configuration; name a YAML file of options"]
    (tmp_path / "latin.yaml").write_bytes(b"name: x\n# caf\xe9\n")
    assert wrong("latin.yaml") == ["latin.yaml:2: not UTF-8 text (byte 0xe9)"]


def test_windows_files(write):
    assert load_config(write("\ufeff" + WHOLE.replace("\n", "\r\n"))).name == "mine"


# ------------------------------------------------------------------------------------------------- overrides and paths


def test_overrides(write, tmp_path):
    config = load_config(
        write(WHOLE + "  lr: wrong\n"),
        [
            "train.lr=1e-6", "name=no", "rollout.stop_token_ids=[1, 2]", "reward.exact_after=#### ", "eval.limit=",
            "server.cores=0", "server.extra_args=['--a=b', \"c\"]", "server.enforce_eager=false",
        ],
    )  # fmt: skip
    assert config.train.lr == 1e-6
    assert config.name == "no"
    assert config.rollout.stop_token_ids == (1, 2)
    assert config.reward.exact_after == "#### "
    assert config.eval.limit is None
    assert config.server == ServerConfig(cores="0", extra_args=("--a=b", "c"), enforce_eager=False)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.retries=01", "rollout.retries: must be a whole number ≥ 0, not the text '01'; write 1"),
        ("rollout.stop_token_ids=[1", "rollout.stop_token_ids: not YAML: expected ',' or ']', but got '<stream end>', while parsing a flow sequence"),  # noqa: E501
        ("=1", "'=1' is not of the form key.path=value"),
        ("a..b=1", "'a..b=1' is not of the form key.path=value"),
        ("rollout.group_sice=1", "rollout.group_sice: no such key; did you mean rollout.group_size?"),
        ("weights=1", "weights: is a section, whose keys stand indented under it; not the number 1"),
    ],
)  # fmt: skip
def test_wrong_overrides(write, override, message):
    assert wrong(write(WHOLE), override) == [f"command line: {message}"]


def test_paths_count_from_the_file_or_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/mine.yaml").write_text(WHOLE.replace("path: model", "path: ../model"))
    monkeypatch.chdir(tmp_path)
    config = load_config("configs/mine.yaml", ["data.train=other.jsonl", "data.eval=~/eval.jsonl"])
    assert config.model.path == str(tmp_path / "model")
    assert config.data.train == (str(tmp_path / "other.jsonl"),)
    assert config.data.eval == str(Path.home() / "eval.jsonl")


def test_sources_know_the_line(write):
    _, sources = load_with_sources(write(WHOLE), ["train.minibatches=2"])
    assert sources.where("train.steps") == "mine.yaml:7"
    assert sources.where("train.minibatches") == "command line"
    assert sources.where("train.lr") == "mine.yaml:6"  # left out: the line of its section
    assert sources.where("rollout.retries") == "mine.yaml:1"
    assert sources.where("train.betas[1]") == "mine.yaml:6"
    _, sources = load_with_sources(write(WHOLE + "  betas:\n  - 0.9\n  - 0.5\n"))
    assert [sources.where(f"train.betas{item}") for item in ("", "[0]", "[1]")] == [
        f"mine.yaml:{n}" for n in (9, 10, 11)
    ]
    assert sources.given("train.steps")
    assert not sources.given("train.lr")
    assert Sources.in_code().where("train.lr") == "Config"


# ---------------------------------------------------------------------------------------------------------- and back

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30)
words = st.sampled_from(
    ["no", "none", "None", "null", "~", "true", "1e-6", "0123", "12", "- a", "#", "a: b", "'", " x "]
)
paths = st.text("abc d'#:é-", min_size=1, max_size=10).map(lambda name: f"/{name}x")
positive = st.floats(min_value=1e-300, max_value=1e300)
configs = st.builds(
    Config,
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    seed=st.integers(0, 2**63 - 1),
    runs_dir=paths,
    import_path=paths,
    runtime_dir=st.none() | paths,
    model=st.builds(ModelConfig, path=paths),
    data=st.builds(
        DataConfig,
        train=st.lists(paths, min_size=1).map(tuple),
        eval=st.none() | paths,
        prompt_key=texts | words,
        shuffle=st.booleans(),
    ),
    train=st.builds(
        TrainConfig,
        steps=st.integers(1, 10**6),
        batch_groups=st.integers(1, 10**6),
        lr=positive,
        betas=st.tuples(positive, positive),
        zero_stage=st.sampled_from([0, 1, 2, 3]),
    ),
    rollout=st.builds(RolloutConfig, stop_token_ids=st.lists(st.integers(-(2**63) + 1, 2**63 - 1)).map(tuple)),
    reward=st.builds(RewardConfig, exact_after=st.none() | texts | words, function=texts | words),
    server=st.builds(
        ServerConfig, cores=st.none() | texts | words, extra_args=st.lists(texts | words, max_size=3).map(tuple)
    ),
)


@pytest.mark.slow
@given(config=configs)
def test_a_dump_loads_back_equal(config, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.slow
@given(
    text=st.text(max_size=60) | st.lists(st.sampled_from([*" :-[]{}#'\"&*!|>\n\t", "train", "lr", "1"])).map("".join)
)
def test_any_text_is_a_configuration_or_a_configuration_error(text, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=r"any\.yaml"):
        load_config(path)


def test_a_relative_path_made_in_code_is_dumped_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = Config(
        name="x",
        model=ModelConfig(path="m"),
        data=DataConfig(train=("d",)),
        train=TrainConfig(steps=1, batch_groups=1),
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/config.yaml").write_text(dump_config(config))
    loaded = load_config("sub/config.yaml")
    assert loaded.model.path == str(tmp_path / "m")
    assert loaded.runs_dir == str(tmp_path / "runs")
    assert (
        msgspec.structs.replace(loaded, model=config.model, data=config.data, import_path=".", runs_dir="runs")
        == config
    )
