"""The command line: exit codes, messages, and that nothing heavy is loaded for it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_async.cli import main
from areal_async.config import Config

Make = Callable[..., Config]


@pytest.fixture
def config_file(make_config: Make, tmp_path: Path) -> str:
    make_config()
    return str(tmp_path / "config.yaml")


def test_check_says_good(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", config_file]) == 0
    assert "good. 4 steps of 4 prompts × 2 samples, η = 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "rollout.max_stalenes=2",
            "command line: rollout.max_stalenes: no such key; did you mean rollout.max_staleness?",
        ),
        ("train.minibatches=3", "train.minibatches: 3 does not divide train.batch_groups (4); try 2 or 4"),
        ("model.path=/nowhere", "/nowhere"),
        ("data.train=/nowhere.jsonl", "/nowhere.jsonl"),
        ("reward.function=no_such_module:f", "reward.function"),
        ("rollout.max_new_tokens=100000", "rollout.max_new_tokens"),
    ],
)
@pytest.mark.parametrize("command", ["check", "run"])
def test_what_is_wrong_is_known_before_anything_starts(
    config_file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, override: str, message: str
) -> None:
    assert main([command, config_file, override]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_options_may_stand_behind_others(config_file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", config_file, "--run-dir", str(tmp_path / "r"), "train.minibatches=3"]) == 2
    assert "train.minibatches: 3 does not divide" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["check", config_file, "--run-dir", "r"])
    assert end.value.code == 2


def test_a_broken_data_line_is_named(config_file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text(data.read_text() + "not json\n")
    assert main(["check", config_file]) == 2
    assert f"{data}:65:" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["check", "--help"], ["eval", "--help"]])
def test_help_has_an_example(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    assert "areal-async run configs/quickstart.yaml" in capsys.readouterr().out.replace("check", "run").replace(
        "eval", "run"
    )


def test_an_unknown_command_is_bad_usage() -> None:
    with pytest.raises(SystemExit) as end:
        main(["trian"])
    assert end.value.code == 2


def test_eval_of_a_folder_without_a_model(config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", config_file, "--model", str(tmp_path)]) == 2
    assert "holds no config.json" in capsys.readouterr().err


@pytest.mark.slow
def test_the_library_is_light() -> None:
    """`import areal_async`, and even the controller, load no torch, vLLM or transformers."""
    code = (
        "import sys, areal_async; areal_async.Controller; import areal_async.cli;"
        "print([name for name in ('torch', 'vllm', 'transformers', 'deepspeed') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@pytest.mark.parametrize("module", ["engines", "rewards"])
def test_other_processes_code_has_one_name(module: str) -> None:
    """`import engines` would shadow, or be shadowed by, a user's own module: nothing here says it."""
    root = Path(__file__).parent.parent
    for path in [*root.glob("areal_async/**/*.py"), *root.glob("tests/**/*.py"), *root.glob("tools/**/*.py")]:
        lines = path.read_text().splitlines()
        assert not [line for line in lines if line.startswith((f"import {module}", f"from {module}"))], path
