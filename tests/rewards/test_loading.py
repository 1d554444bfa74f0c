"""A reward that can't be used is an error before anything runs, and says what to do."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_async.errors import RewardError
from areal_async.messages import RewardSpec
from areal_async.rewards.loading import load
from areal_async.rewards.verdicts import Check, Outcome

SpecOf = Callable[..., RewardSpec]
CHECK = Check(prompt="p", response="abc", answer="abc", finish="stop", columns={"level": 3, "prompt": "shadowed"})


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
        ("nan", "crash", None),
        ("nothing", "crash", 0.0),
    ],
)
def test_a_function_gets_what_it_names(spec_of: SpecOf, function: str, verdict: str, reward: float | None) -> None:
    found = load(spec_of(function))(CHECK)
    if function == "nothing":
        assert "returned None, which is not a number" in found.why
    assert (found.verdict, found.reward) == (verdict, reward)


def test_numpy_numbers_are_numbers(functions: Path, spec_of: SpecOf) -> None:
    (functions / "numbers_of_numpy.py").write_text(
        "import numpy as np\ndef one(response): return np.float32(0.5)\ndef yes(response): return np.bool_(True)\n"
    )
    spec = spec_of("one")
    for name, expected in (("one", Outcome("given", 0.5)), ("yes", Outcome("right", 1.0))):
        found = load(
            RewardSpec(
                function=f"numbers_of_numpy:{name}",
                model_path=spec.model_path,
                concurrent=1,
                timeout_s=1,
                import_paths=spec.import_paths,
            )
        )(CHECK)
        assert (found.verdict, found.reward) == (expected.verdict, expected.reward)


def test_a_row_without_a_needed_column_is_bad_data(spec_of: SpecOf) -> None:
    found = load(spec_of("needs"))(Check(prompt="", response="", answer=None, finish="stop", columns={"depth": 1}))
    assert (found.verdict, found.reward) == ("bad_data", None)
    assert "needs level; the data row has: depth" in found.why


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exakt", "no reward; write `exact`, or `module:function`"),
        ("misbehaving:", "no reward"),
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
    spec = spec_of("length")
    bad = RewardSpec(
        function=function,
        model_path=spec.model_path,
        concurrent=1,
        timeout_s=1,
        import_paths=spec.import_paths,
    )
    with pytest.raises(RewardError, match=message):
        load(bad)


@pytest.mark.parametrize("module", ["loading", "worker", "forkserver"])
def test_importing_stays_light(module: str) -> None:
    source = f"import sys, areal_async.rewards.{module}; print(sorted({{'zmq', 'torch', 'numpy'}} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", source], text=True) == "[]\n"
