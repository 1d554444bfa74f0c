"""Whole runs on real vLLM and DeepSpeed: learning's numbers agree, and however a run ends, nothing is left."""

import json
import re
import signal
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from areal_async.config import Config
from areal_async.controller import Controller
from areal_async.errors import HandshakeError, RunFailed
from areal_async.launch.recipes import Command, Recipes, trainer_command, vllm_command
from areal_async.messages import TrainerSpec

from .conftest import PATIENCE_S, QUICKSTART, ROOT, Program, is_rank, is_server, lines, metrics

pytestmark = pytest.mark.slow

Quickstart = Callable[..., Config]
Start = Callable[..., Program]
HEARD_S = 60.0  # until it says that a signal has come: at once, where the machine is free
GONE_S = 10.0  # after the controller's death nothing of it may live longer


@pytest.mark.parametrize(("temperature", "transport"), [(1.0, "shm"), (0.7, "disk")])
async def test_server_and_trainer_agree(
    quickstart: Quickstart, temperature: float, transport: str, tmp_path: Path
) -> None:
    """η = 0, so every token has lag 0: the server's log-probabilities are the trainer's to 1e-4, over 10,000 tokens."""
    folder = tmp_path / "weights"
    config = quickstart(
        f"weights.transport={transport}", *([f"weights.folder={folder}"] if transport == "disk" else []),
        "rollout.max_staleness=0", f"rollout.temperature={temperature}", "train.steps=3", "train.batch_groups=16",
        "rollout.group_size=8", "rollout.max_concurrent=128",
    )  # fmt: skip
    async with Controller(config) as run:
        result = await run.run()
    tokens, largest = sum(row.mismatch_tokens for row in result.rows), max(row.mismatch_max for row in result.rows)
    print(f"temperature {temperature}: mismatch_max {largest:.1e} over {tokens:,} tokens of lag 0")
    assert tokens >= 10_000
    assert largest <= 1e-4
    assert all(row.lag_max == 0 for row in result.rows)
    assert folder.exists() == (transport == "disk")
    assert not list(folder.glob("*")), "published weights outlived the run"


async def test_a_trainer_that_ignores_the_temperature_is_found_out(quickstart: Quickstart) -> None:
    def other_temperature(*, connect: str, spec: str, ranks: int, cores: str | None, gpus: str | None) -> Command:
        path = Path(spec)
        told = msgspec.json.decode(path.read_bytes(), type=TrainerSpec)
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(told, temperature=1.0)))
        return trainer_command(connect=connect, spec=spec, ranks=ranks, cores=cores)

    config = quickstart("rollout.temperature=0.7")
    with pytest.raises(RunFailed, match="its log-probabilities differ from the trainer's by"):
        async with Controller(config, recipes=Recipes(trainer=other_temperature)) as run:
            await run.run()


async def test_a_server_without_development_routes_is_refused(quickstart: Quickstart) -> None:
    def plain(**asked: object) -> Command:
        argv, env = vllm_command(**asked)  # type: ignore[arg-type]
        return argv, {name: value for name, value in env.items() if name != "VLLM_SERVER_DEV_MODE"}

    with pytest.raises(HandshakeError, match="VLLM_SERVER_DEV_MODE=1"):
        async with Controller(quickstart(), recipes=Recipes(server=plain)) as run:
            await run.run()


async def test_a_server_with_another_model_is_refused(quickstart: Quickstart, tmp_path: Path) -> None:
    """Half the layers: the message names what differs."""
    import transformers

    other = tmp_path / "other"
    config = quickstart()
    model = transformers.AutoModelForCausalLM.from_pretrained(config.model.path)
    model.config.num_hidden_layers //= 2
    model.config.layer_types = model.config.layer_types[: model.config.num_hidden_layers]
    transformers.AutoModelForCausalLM.from_config(model.config).save_pretrained(other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((Path(config.model.path) / name).read_bytes())

    def server(**asked: object) -> Command:
        return vllm_command(**{**asked, "model": str(other)})  # type: ignore[arg-type]

    with pytest.raises(RunFailed, match=r"(?s)layers\.\d"):
        async with Controller(config, recipes=Recipes(server=server)) as run:
            await run.run()


async def test_two_ranks_and_a_server_that_dies(quickstart: Quickstart) -> None:
    """ZeRO 1 over two ranks trains; then the server is killed. No restart is allowed: the error has its last words."""
    config = quickstart(
        "train.ranks=2", "train.zero_stage=1", "train.cores=null", "train.steps=1000", "server.max_restarts=0"
    )
    killed = False

    async def train_until_it_dies() -> None:
        nonlocal killed
        async with Controller(config) as run:
            async for row in run.steps():
                assert row.lag_max <= config.rollout.max_staleness
                if row.step == 2 and not killed:
                    killed = True
                    servers = [p for p in psutil.Process().children(recursive=True) if is_server(p)]
                    servers[0].send_signal(signal.SIGKILL)

    with pytest.raises(RunFailed, match=r"(?s)no rollout server is left at step .*SIGKILL.*stderr/server-0\.log"):
        await train_until_it_dies()
    assert killed


def test_kill_9_of_the_controller_leaves_no_child(start: Start, tmp_path: Path) -> None:
    program = start("run", "train.steps=1000")
    program.wait_for(lambda: lines(metrics(tmp_path)) >= 2)
    (runtime,) = {Path(argument[6:]).parent for argument in program.arguments() if argument.startswith("ipc://")}
    assert (runtime / "wire.sock").is_socket()
    assert len(program.look()) >= 6  # guards, server, engine core, torchrun, rank, reward worker
    program.process.send_signal(signal.SIGKILL)
    program.process.wait()
    print(f"gone after {program.gone_after_s(GONE_S):.1f} s")
    assert not runtime.exists()  # nor is anything left in /dev/shm: conftest looks after each test


def test_ctrl_c_once_finishes_the_step_and_saves(start: Start, tmp_path: Path) -> None:
    program = start("run", "train.steps=1000")
    program.wait_for(lambda: lines(metrics(tmp_path)) >= 1)
    program.process.send_signal(signal.SIGINT)
    assert program.process.wait(timeout=PATIENCE_S) == 0, program.text()
    assert "stopped on request" in program.text()
    model = metrics(tmp_path).parent / "model"
    assert (model / "model.safetensors").exists()
    assert (model / "tokenizer.json").exists()
    program.gone_after_s(1.0)


def test_ctrl_c_twice_in_the_middle_leaves_now(start: Start, tmp_path: Path) -> None:
    program = start("run", "train.steps=1000")
    program.wait_for(lambda: lines(metrics(tmp_path)) >= 1)
    for process in filter(is_rank, program.look()):
        process.suspend()  # the step that is running doesn't end before the second one
    program.process.send_signal(signal.SIGINT)
    program.wait_for(lambda: "once more to leave now" in program.text(), HEARD_S)
    program.process.send_signal(signal.SIGINT)
    assert program.process.wait(timeout=20) == 130, program.text()
    program.gone_after_s(GONE_S)
    assert not (metrics(tmp_path).parent / "model").exists()


def test_ctrl_c_twice_while_everything_starts(start: Start, tmp_path: Path) -> None:
    program = start("run", "train.steps=1000")
    program.wait_for(lambda: len(program.look()) >= 5)
    program.process.send_signal(signal.SIGINT)
    program.wait_for(lambda: "once more to leave now" in program.text() or program.process.poll() is not None, HEARD_S)
    program.process.send_signal(signal.SIGINT)
    # nothing is trained yet, so the first one may have ended the run: then the second meets a program that is leaving,
    # and Python lets it die of the signal, which is 130 in a shell too
    assert program.process.wait(timeout=20) in (0, 130, -signal.SIGINT), program.text()
    program.gone_after_s(GONE_S)


def test_embedded_in_a_web_application(tmp_path: Path) -> None:
    """examples/embed.py: its own workflow and reward, a page while it trains, and nothing left after SIGTERM."""
    config = tmp_path / "config.yaml"
    text = QUICKSTART.read_text().replace("quickstart/", f"{QUICKSTART.parent}/quickstart/")
    config.write_text(text + f"\nruns_dir: {tmp_path}/runs\n")
    program = Program([sys.executable, str(ROOT / "examples" / "embed.py"), str(config), "0"], tmp_path)
    try:
        program.wait_for(lambda: lines(metrics(tmp_path)) >= 1)
        address = re.search(r"http://127\.0\.0\.1:\d+", program.text())
        assert address is not None, program.text()
        with urllib.request.urlopen(f"{address[0]}/progress", timeout=PATIENCE_S) as answer:
            progress = json.load(answer)
        assert progress["steps"][0]["step"] == 0
        program.process.send_signal(signal.SIGTERM)
        program.process.wait(timeout=30)
        program.gone_after_s(GONE_S)
    finally:
        program.end()
