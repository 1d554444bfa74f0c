"""A reward that can't be used is an error before anything runs, and says what to do."""

import contextlib
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from areal_async.errors import RewardError
from areal_async.messages import HttpOptions, RewardSpec, RewardTable
from areal_async.rewards.loading import load, verify
from areal_async.rewards.verdicts import Check, Outcome, reward_of

SpecOf = Callable[..., RewardSpec]
CHECK = Check(prompt="p", response="abc", answer="abc", finish="stop", columns={"level": 3, "prompt": "shadowed"})


def of(spec_of: SpecOf, function: str) -> RewardSpec:
    return msgspec.structs.replace(spec_of("exact"), function=function)


@pytest.fixture(autouse=True)
def path_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "misbehaving", raising=False)


@pytest.mark.parametrize(
    ("function", "verdict", "reward"),
    [
        ("length", "given", 0.3),
        ("right", "right", 1.0),
        ("later", "given", 3.0),
        ("needs", "given", 3.0),
        ("nan", "bad_data", None),
        ("nothing", "crash", 0.0),
    ],
)
def test_a_function_gets_what_it_names(spec_of: SpecOf, function: str, verdict: str, reward: float | None) -> None:
    found = load(spec_of(function))(CHECK)
    if function == "nothing":
        assert "returned None, which is not a number" in found.why
    if function == "nan":
        assert found.why == "nan is no reward; misbehaving:nan returned it"
    assert (found.verdict, reward_of(found, RewardTable())) == (verdict, reward)


def test_numpy_numbers_are_numbers(functions: Path, spec_of: SpecOf) -> None:
    (functions / "numbers_of_numpy.py").write_text(
        "import numpy as np\ndef one(response): return np.float32(0.5)\ndef yes(response): return np.bool_(True)\n"
    )
    found = [load(of(spec_of, f"numbers_of_numpy:{name}"))(CHECK) for name in ("one", "yes")]
    assert [(outcome.verdict, outcome.reward) for outcome in found] == [("given", 0.5), ("right", None)]


@pytest.mark.parametrize(
    ("returned", "outcome"),
    [
        ('{"score": 0.5}', Outcome("given", "", "", 0.5)),
        ('{"score": 1.0, "acc": True, "pred": 7}', Outcome("given", "acc: True", "7", 1.0)),
        ('{"score": False, "pred": None}', Outcome("wrong", "of_verl:f returned False", "")),
        ('{"score": True, "why": "as it says"}', Outcome("right", "why: as it says", "")),
        ('{"reward": 1}', Outcome("crash", "of_verl:f returned a dict without 'score'; it has: reward")),
        ('{"score": None}', Outcome("crash", "of_verl:f returned None, which is not a number")),
        ('{"score": float("inf")}', Outcome("bad_data", "inf is no reward; of_verl:f returned it")),
    ],
)
def test_a_dict_is_read_as_verl_does(
    functions: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch, returned: str, outcome: Outcome
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the next of these is written within the same second
    (functions / "of_verl.py").write_text(f"def f(response): return {returned}\n")
    monkeypatch.delitem(sys.modules, "of_verl", raising=False)
    importlib.invalidate_caches()
    assert load(of(spec_of, "of_verl:f"))(CHECK) == outcome


@pytest.mark.parametrize(
    ("function", "verdict", "reward", "why"),
    [
        ("1*misbehaving:right", "right", None, "misbehaving:right returned True"),
        ("2*misbehaving:right", "given", 2.0, "2 × misbehaving:right: right, misbehaving:right returned True"),
        ("exact + http", "given", 1.0, "exact: right"),
        ("0.5*exact - misbehaving:length", "given", 0.2, "0.5 × exact: right.*; -1 × misbehaving:length: given 0.3"),
        ("exact + misbehaving:nan", "bad_data", None, "exact: right.*; misbehaving:nan: bad_data, nan is no reward"),
        ("exact + misbehaving:raises", "crash", None, "exact: right.*; misbehaving:raises: crash, Traceback"),
        ("misbehaving:raises + misbehaving:needs", "bad_data", None, "misbehaving:raises: crash, Traceback"),
    ],
)
def test_a_sum_is_graded_part_by_part(
    spec_of: SpecOf, function: str, verdict: str, reward: float | None, why: str
) -> None:
    found = load(of(spec_of, function))(msgspec.structs.replace(CHECK, columns={}))
    assert (found.verdict, found.reward) == (verdict, reward if reward is None else pytest.approx(reward))
    assert re.match(why, found.why)


def test_a_row_without_a_needed_column_is_bad_data(spec_of: SpecOf) -> None:
    found = load(spec_of("needs"))(Check(prompt="", response="", answer=None, finish="stop", columns={"depth": 1}))
    assert (found.verdict, found.reward) == ("bad_data", None)
    assert "needs level; the data row has: depth" in found.why


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exakt", "'exakt' is no reward; write one of exact, .*http, or `module:function`.*did you mean 'exact'"),
        ("misbehaving:", "'misbehaving:' is no reward; write one of"),
        ("0.5*exact + 2*misbehaving:lenght", "'misbehaving:lenght': .*did you mean 'length'"),
        ("misbehavin:f", "no module 'misbehavin' in .*functions.*; did you mean 'misbehaving'"),
        ("no_such_module:f", "no module 'no_such_module' in .*functions.*beside the configuration"),
        ("misbehaving:lenght", "misbehaving.py has no 'lenght'; did you mean 'length'"),
        ("misbehaving:CONSTANT", "is int, not a function"),
        ("misbehaving:positional", r"takes \(response\); 'response' can't be given by name"),
        ("misbehaving:blind", r"takes \(prompt\), so it never sees the answer; it needs `response`"),
        ("broken:f", "importing broken failed:\n(.*\n)*ZeroDivisionError"),
        ("wants:f", "importing wants failed:\n(.*\n)*ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
def test_what_can_not_be_used_is_said(functions: Path, spec_of: SpecOf, function: str, message: str) -> None:
    (functions / "broken.py").write_text("1 / 0\n")
    (functions / "wants.py").write_text("import no_such_package\n")
    with pytest.raises(RewardError, match=message):
        load(of(spec_of, function))


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("http", HttpOptions(), "reward.http.url is not set; write where"),
        ("0.5*http + exact", HttpOptions(url="http://u:p@host/"), "reward.http.url has a password"),
        ("0.5*exakt + http", HttpOptions(url="http://127.0.0.1/"), "did you mean 'exact'"),
        ("misbehaving:lenght + http", HttpOptions(url="http://127.0.0.1/"), "did you mean 'length'"),
        ("0.5*misbehaving:length + http", HttpOptions(url="http://127.0.0.1:1/"), None),
        ("http", HttpOptions(url="http://127.0.0.1:1/"), None),
    ],
)
def test_all_parts_are_looked_at_before_anything_runs(
    spec_of: SpecOf, function: str, options: HttpOptions, message: str | None
) -> None:
    spec = msgspec.structs.replace(of(spec_of, function), http=options)
    with pytest.raises(RewardError, match=message) if message else contextlib.nullcontext():
        verify(spec)


@pytest.mark.parametrize("module", ["sums", "loading", "worker", "forkserver"])
def test_importing_stays_light(module: str) -> None:
    heavy = "{'zmq', 'torch', 'numpy', 'aiohttp', 'asyncio'}"
    source = f"import sys, areal_async.rewards.{module}; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", source], text=True) == "[]\n"
