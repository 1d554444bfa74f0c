"""reasoning-gym's problems in the place of a file: the same text gives the same rows, and mistakes are told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from areal_async.config_check import problems
from areal_async.config_file import dump_config, load_config, load_with_sources
from areal_async.errors import DataError
from areal_async.rollout import reasoning_gym
from areal_async.rollout.data import Dataset

SUMS = "reasoning_gym:chain_sum?size=20&seed=7&min_terms=2&max_terms=2"


def dataset(text: str) -> Dataset:
    return Dataset.load(text, "question", "solution")  # keys of files: a source has its own


def test_a_source_is_read() -> None:
    found = reasoning_gym.parsed(
        'reasoning_gym:basic?seed=7&size=2&operators=["+"]&a=true&b=x%26y&c=-1.5&system_prompt=default'
    )
    assert found == ("basic", 2, 7, "default", {"operators": ["+"], "a": True, "b": "x&y", "c": -1.5})


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("chain_sum", "size must be given, as a whole number, such as reasoning_gym:chain_sum?size=2000&seed=7"),
        ("chain_sum?size=10", "seed must be given"),
        ("chain_sum?size=10&seed=", "seed must be given"),
        ("chain_sum?size=many&seed=1", "size must be given"),
        ("chain_sum?size=true&seed=1", "size must be given"),
        ("chain_sum?size=0&seed=1", "size must be at least 1"),
        ("chain_sum?size=10&seed=1&seed=2", "'seed=2' is given twice"),
        ("chain_sum?size=10&seed=1&terms", "'terms' is not of the form option=value"),
    ],
)
def test_what_is_wrong_with_a_source_is_said(text: str, what: str) -> None:
    with pytest.raises(DataError, match=f"^reasoning_gym:chain_sum.*: {what.replace('?', '.')}"):
        reasoning_gym.parsed(f"reasoning_gym:{text}")


@pytest.mark.parametrize(
    ("train", "held_out", "shares"),
    [
        ("chain_sum?size=100&seed=0", "chain_sum?size=10&seed=100", False),
        ("chain_sum?size=100&seed=0", "chain_sum?size=10&seed=99", True),
        ("chain_sum?size=100&seed=0&max_terms=3", "chain_sum?size=10&seed=7", True),
        ("chain_sum?size=100&seed=10", "chain_sum?size=10&seed=0", False),
        ("chain_sum?size=100&seed=10", "chain_sum?size=11&seed=0", True),
        ("chain_sum?size=100&seed=0", "basic_arithmetic?size=10&seed=0", False),
    ],
)
def test_held_out_problems_that_are_trained_on_are_found(train: str, held_out: str, shares: bool) -> None:
    found = reasoning_gym.shared(["some.jsonl", f"reasoning_gym:{train}"], f"reasoning_gym:{held_out}")
    assert (found is not None) == shares


def test_a_source_is_no_path(tmp_path: Path) -> None:
    """In the file, on the command line, and in the file that a run writes."""
    file = tmp_path / "config.yaml"
    file.write_text(
        f'name: x\nmodel: {{path: model}}\ndata: {{train: ["{SUMS}", a.jsonl], eval: "{SUMS}"}}\n'
        "train: {steps: 1, batch_groups: 1}\n"
    )
    config = load_config(file)
    assert config.data.train == (SUMS, f"{tmp_path}/a.jsonl")
    assert load_config(file, [f"data.train={SUMS}"]).data.train == (SUMS,)
    file.write_text(dump_config(config))
    again = load_config(file)
    assert (again.data.train, again.data.eval) == (config.data.train, SUMS)


@pytest.mark.slow
def test_check_makes_the_problems_and_looks_whether_they_are_held_out(tmp_path: Path) -> None:
    quickstart = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"
    own = [f"runs_dir={tmp_path}", f"data.train={SUMS}", "data.max_prompt_tokens=200", "server.cores=null"]
    for held_out, wrong in (
        (SUMS, [f"command line: data.eval: draws problems of {SUMS}"]),
        (SUMS.replace("=7", "=99"), []),
    ):
        config, sources = load_with_sources(quickstart, [*own, f"data.eval={held_out}", "train.cores=null"])
        found = [line for line in problems(config, sources) if "data." in line]
        assert [line[: len(start)] for line, start in zip(found, wrong, strict=True)] == wrong


# ------------------------------------------------------------------------------------- with the package, in its process


@pytest.mark.slow
def test_rows_are_the_packages_own() -> None:
    rows = dataset(SUMS)
    made = json.loads(
        subprocess.check_output(
            [sys.executable, "-c", "import reasoning_gym, json; print(json.dumps(list(reasoning_gym.create_dataset("
             "'chain_sum', size=20, seed=7, min_terms=2, max_terms=2))))"], text=True,
        )
    )  # fmt: skip
    assert [(row.prompt, row.answer) for row in rows.rows] == [(entry["question"], entry["answer"]) for entry in made]
    columns = {name: msgspec.msgpack.decode(raw) for name, raw in rows.rows[3].columns.items()}
    assert columns == {
        "question": made[3]["question"],
        "metadata": made[3]["metadata"],
        "task_options": {"min_terms": 2, "max_terms": 2},
    }
    assert rows.where(3) == f"{SUMS}:4"


@pytest.mark.slow
def test_the_same_text_gives_the_same_rows_whatever_the_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The questions of this task go through a set of words."""
    text = "reasoning_gym:isomorphic_strings?size=8&seed=7&system_prompt=default"
    found = []
    for seed in ("1", "2"):
        monkeypatch.setitem(os.environ, "PYTHONHASHSEED", seed)
        found.append([(row.prompt, row.answer) for row in dataset(text).rows])
    assert found[0] == found[1]
    system, user = found[0][0][0]
    assert isinstance(system, dict)
    assert isinstance(user, dict)
    assert (system["role"], user["role"]) == ("system", "user")
    assert "<answer>" in str(system["content"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("chain_sm?size=1&seed=1", "no task 'chain_sm'; did you mean chain_sum"),
        ("chain_sum?size=1&seed=1&min_term=2", "chain_sum has no option 'min_term'; did you mean min_terms"),
        ("chain_sum?size=1&seed=1&min_terms=0", "chain_sum: AssertionError: min_terms must be positive"),
        ("chain_sum?size=1&seed=1&system_prompt=defalt", "no system_prompt 'defalt'; did you mean default"),
    ],
)
def test_what_the_package_does_not_have_is_said(text: str, what: str) -> None:
    with pytest.raises(DataError, match=what):
        dataset(f"reasoning_gym:{text}")


@pytest.mark.slow
def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "reasoning_gym.py").write_text("raise ModuleNotFoundError('No module named reasoning_gym')\n")
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(tmp_path))
    with pytest.raises(DataError, match=r"pip install 'areal-async\[reasoning\]'"):
        dataset(SUMS)
