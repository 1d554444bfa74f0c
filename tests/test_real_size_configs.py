"""The configurations of real size load, say what the paper says, and pass `check` once model and data are there."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_async import config_check, config_machines
from areal_async.cli import main
from areal_async.config_file import load_config
from areal_async.launch.placement import place

ROOT = Path(__file__).resolve().parents[1]
GSM8K = ROOT / "configs" / "gsm8k-qwen2.5-1.5b-8gpu.yaml"
PAPER = ROOT / "configs" / "areal-paper-1.5b.yaml"
BOTH = pytest.mark.parametrize("path", [GSM8K, PAPER], ids=["gsm8k", "paper"])
Overrides = Callable[[Path], list[str]]


@pytest.fixture
def overrides(tmp_path: Path) -> Overrides:
    """A model folder of the right shape (the quickstart's tokenizer, a long context) and a few problems."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "configs" / "quickstart" / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+{n}:", "answer": str(2 * n)}) + "\n" for n in range(700)))

    def make(path: Path) -> list[str]:
        own = [f"model.path={model}", f"data.train={data}", "data.chat_template=plain", f"runs_dir={tmp_path}/runs"]
        return [*own, f"weights.folder={tmp_path}/weights" if path == PAPER else f"data.eval={data}"]

    return make


@pytest.fixture(autouse=True)
def _a_large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room in /dev/shm for eight servers."""
    monkeypatch.setattr(config_check.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))


@BOTH
def test_check_accepts_it_with_a_model_and_data(
    path: Path, overrides: Overrides, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(path), *overrides(path)]) == 0, capsys.readouterr().err
    assert "good." in capsys.readouterr().out


@BOTH
def test_without_them_check_names_them_and_nothing_else(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [f"weights.folder={tmp_path}"] if path == PAPER else []
    assert main(["check", str(path), f"runs_dir={tmp_path}", *own]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    keys = {line.split(": ")[1] for line in lines}
    assert keys <= {"model.path", "data.train", "data.eval"}, lines
    assert {"model.path", "data.train"} <= keys


def test_the_papers_table(overrides: Overrides) -> None:
    """Table 3, and the shares of the GPUs."""
    config = load_config(PAPER, [])
    rollout, train = config.rollout, config.train
    assert (train.batch_groups, rollout.group_size, train.minibatches) == (512, 16, 4)
    assert (train.clip_eps, train.lr, train.weight_decay, train.adam_eps) == (0.2, 2e-5, 0.05, 1e-5)
    assert (train.betas, train.max_grad_norm, rollout.temperature) == ((0.9, 0.95), 1.0, 1.0)
    assert (config.data.max_prompt_tokens, rollout.max_new_tokens, rollout.max_staleness) == (1024, 27648, 8)
    assert (train.advantage, train.loss, rollout.when_older) == ("areal_paper", "decoupled_ppo", "train")
    assert config.server.max_model_len == 1024 + 27648
    servers = config.own_servers + len(rollout.urls)
    assert servers / (servers + train.ranks) == 0.75


def test_where_the_gpus_go(overrides: Overrides, monkeypatch: pytest.MonkeyPatch) -> None:
    """GSM8K: six servers and two ranks. The paper's: eight servers on the controller's host, the ranks elsewhere."""
    here = tuple("01234567")
    monkeypatch.setattr(config_machines, "gpus_here", lambda: here)
    gsm8k, paper = load_config(GSM8K, []), load_config(PAPER, [])
    assert place(gsm8k, here) == (("0", "1", "2", "3", "4", "5"), "6,7")
    assert place(paper, here) == (here, None)
    assert not list(config_machines.findings(gsm8k))
    assert not list(config_machines.findings(paper))


def test_the_papers_over_nccl(overrides: Overrides, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comment in the file says."""
    monkeypatch.setattr(config_machines, "gpus_here", lambda: tuple("01234567"))
    changes = [
        "weights.transport=nccl",
        "weights.nccl_address=10.0.0.4:29600",
        "weights.wave=24",
        "weights.folder=null",
    ]
    assert not list(config_machines.findings(load_config(PAPER, changes)))


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (r"so \boxed{42}", "42", True),
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}", True),
        (r"\boxed{\dfrac{1}{2}}", r"\frac12", False),
        (r"\boxed{\dfrac{1}{2}}", r"$\boxed{\frac{1}{2}}$", True),
        (r"\boxed{1,000\text{ cm}}", "1000cm", True),
        (r"\boxed{3, 4}", "34", False),
        (r"\boxed{5.0}", "5", True),
        (r"\boxed{42", "42", False),
        ("42", "42", False),
    ],
)
def test_the_boxed_reward(response: str, answer: str, right: bool) -> None:
    spec = importlib.util.spec_from_file_location("boxed_answer", ROOT / "examples" / "boxed_answer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.boxed(response, answer, "stop") is right
    assert not module.boxed(response, answer, "length")
