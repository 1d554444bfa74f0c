"""Trainer ranks that come from elsewhere: the file that they need, who is missing, whole runs with scripted ones."""

import asyncio
import contextlib
import json
import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from areal_async.cli import main
from areal_async.config import Config
from areal_async.controller import Controller
from areal_async.controller.remote_ranks import advertised, remove_published, write_connection
from areal_async.core import restarts
from areal_async.errors import LaunchError, RunFailed, WireError
from areal_async.messages import PROTOCOL, TrainerConnection
from areal_async.testing.recipes import scripted
from areal_async.testing.trainer import ScriptedRank
from areal_async.wire import beats, dealer

from ..waiting import DEADLINE_S, PATIENCE_S, until

Make = Callable[..., Config]
LISTEN = "train.listen=tcp://127.0.0.1:0"
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}


async def connection_of(config: Config) -> tuple[Path, TrainerConnection]:
    """The file, once the run has written it."""

    def find() -> list[Path]:
        return list(Path(config.runs_dir).glob("*/connect.json"))

    await until(find)
    (path,) = find()
    return path, msgspec.json.decode(path.read_bytes(), type=TrainerConnection)


class Hand:
    """A scripted rank in a thread, as a person starts it on another host."""

    def __init__(self, connection: TrainerConnection, rank: int, books: Path | None = None) -> None:
        self.error: WireError | None = None
        self._connection = connection
        self._rank = ScriptedRank(rank, connection.ranks, connection.spec, 0.0, books)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        there = self._connection
        try:
            self._rank.serve(there.address, there.secret, there.public_key)
        except WireError as error:
            self.error = error

    async def ended(self) -> None:
        await asyncio.to_thread(self._thread.join, DEADLINE_S)
        assert not self._thread.is_alive()


@pytest.mark.slow
async def test_a_run_with_ranks_from_elsewhere(
    make_config: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    config, books = make_config(LISTEN, "train.ranks=2"), tmp_path / "books.jsonl"
    async with Controller(config, recipes=scripted()) as run:
        path, connection = await connection_of(config)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (connection.protocol, connection.ranks) == (PROTOCOL, 2)
        hands = [Hand(connection, rank, books) for rank in (1, 0)]
        result = await run.run()
        for hand in hands:
            await hand.ended()
            assert hand.error is None
    assert result.steps == 4
    assert not path.exists(), "a secret outlived its run"
    assert {line["rank"] for line in map(json.loads, books.read_text().splitlines())} == {0, 1}
    assert f"worker trainer --connect {path}" in caplog.text
    assert connection.secret not in caplog.text
    assert connection.secret not in repr(connection)
    for file in path.parent.rglob("*"):
        assert not file.is_file() or connection.secret.encode() not in file.read_bytes(), f"the secret is in {file}"


@pytest.mark.slow
async def test_missing_ranks_are_named(make_config: Make) -> None:
    config = make_config(LISTEN, "train.ranks=3", "train.start_timeout_s=4")
    with pytest.raises(LaunchError, match=r"2 trainer rank\(s\) have not joined .* = 4 s: trainer\.0, trainer\.2; "):  # noqa: PT012
        async with Controller(config, recipes=scripted()) as run:
            _, connection = await connection_of(config)
            hand = Hand(connection, 1)
            try:
                await run.run()
            finally:
                await hand.ended()


@pytest.mark.slow
async def test_a_rank_too_many_is_told(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(LISTEN, "train.ranks=1")
    async with Controller(config, recipes=scripted()) as run:
        _, connection = await connection_of(config)
        stranger = Hand(msgspec.structs.replace(connection, ranks=2), 1)
        await stranger.ended()
        assert "this run has trainer ranks trainer.0; trainer.1 of 2 is none of them" in str(stranger.error)
        guess = Hand(msgspec.structs.replace(connection, secret="guess"), 0)
        await guess.ended()
        assert "has not the secret" in str(guess.error)
        monkeypatch.setattr(dealer, "RECONNECT_S", 0.2)
        monkeypatch.setattr(beats, "BEAT_S", 0.1)
        other = Hand(msgspec.structs.replace(connection, public_key="r" * 40), 0)
        await other.ended()
        assert "public key isn't that of this controller" in str(other.error)
        monkeypatch.undo()
        hand = Hand(connection, 0)
        assert (await run.run()).steps == 4
        await hand.ended()


@pytest.mark.slow
async def test_ranks_are_started_again_by_hand(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One is killed: the others are told to end, and whoever starts them is told how to; one that comes with the file
    of before is refused. The run goes on from the checkpoint."""
    monkeypatch.setattr(beats, "BEAT_S", 0.5)
    monkeypatch.setattr(beats, "LOST_AFTER_S", 6.0)  # the other ranks beat every two seconds
    monkeypatch.setattr(restarts, "FIRST_RESTART_S", 0.2)
    config = make_config(LISTEN, "train.ranks=2", "train.steps=6", "checkpoint.every_steps=2")
    books = tmp_path / "books.jsonl"
    program = (
        "import sys, pathlib, msgspec; from areal_async.messages import TrainerConnection as C;"
        "from areal_async.testing.trainer import ScriptedRank; p = pathlib.Path(sys.argv[1]);"
        "c = msgspec.json.decode(p.read_bytes(), type=C);"
        "ScriptedRank(1, 2, c.spec, 0.05, None).serve(c.address, c.secret, c.public_key)"
    )
    async with asyncio.timeout(PATIENCE_S), Controller(config, recipes=scripted()) as run:
        path, connection = await connection_of(config)
        first = Hand(connection, 0, books)
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(path))
        hands: list[Hand] = []

        async def start_again() -> None:
            await child.wait()
            await first.ended()
            assert first.error is None  # it was told to end
            old = msgspec.json.decode(path.read_bytes(), type=TrainerConnection)
            while old.spec.checkpoint == connection.spec.checkpoint:
                await asyncio.sleep(0.05)
                with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                    old = msgspec.json.decode(path.read_bytes(), type=TrainerConnection)
            late = Hand(connection, 0)
            await late.ended()
            assert "trainer.0 begins with version 0, but the run goes on from version 2" in str(late.error)
            hands.extend(Hand(old, rank, books) for rank in (0, 1))

        async with asyncio.TaskGroup() as group:
            async for row in run.steps():
                if row.step == 2 and child.returncode is None and not hands:
                    child.kill()
                    group.create_task(start_again())
        for hand in hands:
            await hand.ended()
            assert hand.error is None
        result = run.result()
    assert result.reason == "steps_done"
    assert result.model is not None
    assert (result.model / "version").read_text() == "6"
    assert "trainer.1 is dead or stands still" in caplog.text
    assert "this run can't start ranks on other hosts" in caplog.text
    assert f"worker trainer --connect {path}" in caplog.text
    assert not path.exists(), "a secret outlived its run"


@pytest.mark.slow
async def test_ranks_that_nobody_starts_again_end_the_run(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_RESTART_S", 0.1)
    config = make_config(LISTEN, "train.ranks=1", "train.steps=1000", "train.max_restarts=1")
    hurried = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, start_timeout_s=1.0))
    with pytest.raises(RunFailed, match=r"(?s)The last one: .*1 trainer rank\(s\) have not joined .*docs/nodes\.md"):  # noqa: PT012
        async with asyncio.timeout(PATIENCE_S), Controller(config, recipes=scripted()) as run:
            _, connection = await connection_of(config)
            hand = Hand(connection, 0)
            async for row in run.steps():
                if row.step == 1:
                    run._parts._trainer._config = hurried  # the first ones could take their time
                    run._parts._trainer.on_lost("trainer.0", "it was pulled out")
                    await hand.ended()


def test_where_others_connect_to() -> None:
    assert advertised("tcp://10.0.0.1:5700") == "tcp://10.0.0.1:5700"
    assert advertised("tcp://0.0.0.0:5700").endswith(f"{os.uname().nodename}:5700")
    assert advertised("tcp://[::1]:5700") == "tcp://[::1]:5700"


# ---------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def connection(tmp_path: Path, make_config: Make) -> TrainerConnection:
    from areal_async.specs import trainer_spec

    spec = trainer_spec(make_config(), "areal-x")
    return TrainerConnection(
        protocol=PROTOCOL, address="tcp://127.0.0.1:9", public_key="k" * 40, secret="s3cret", ranks=2, spec=spec
    )


def worker(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["worker", "trainer", "--connect", str(path)])
    return code, capsys.readouterr().err


@pytest.fixture
def file(tmp_path: Path, connection: TrainerConnection) -> Callable[..., Path]:
    def write(**changes: object) -> Path:
        path = tmp_path / "connect.json"
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(connection, **changes)))
        return path

    return write


@pytest.mark.parametrize("name", sorted(TORCHRUN))
def test_without_torchrun(
    name: str, file: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in TORCHRUN.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv(name)
    code, error = worker(file(), capsys)
    assert code == 2
    assert f"{name} isn't in the environment: start it by torchrun" in error
    assert "--nproc-per-node=2" in error


def test_what_can_be_wrong_with_the_file(
    file: Callable[..., Path],
    tmp_path: Path,
    connection: TrainerConnection,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, value in TORCHRUN.items():
        monkeypatch.setenv(variable, value)
    cases: list[tuple[Path, str]] = [(tmp_path / "none", "No such file")]
    (tmp_path / "half").write_bytes(file().read_bytes()[:50])
    cases.append((tmp_path / "half", "this is no connect.json of this release"))
    for path, what in cases:
        code, error = worker(path, capsys)
        assert (code, what in error) == (2, True), error
    for changes, what in [
        ({"protocol": PROTOCOL + 1}, f"speaks protocol {PROTOCOL + 1}, this installation {PROTOCOL}"),
        ({"ranks": 4}, "starts 2 rank(s) in all, the run wants 4"),
        ({"spec": msgspec.structs.replace(connection.spec, model_path="/no/model")}, "has no model at /no/model"),
    ]:
        code, error = worker(file(**changes), capsys)
        assert (code, what in error) == (2, True), error
        assert "s3cret" not in error


def test_the_process_becomes_the_rank_and_the_secret_is_no_argument(
    file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[list[str]] = []

    def execv(_: str, argv: list[str]) -> None:
        became.append(argv)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    for variable, value in TORCHRUN.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit):
        main(["worker", "trainer", "--connect", str(file())])
    assert became == [[sys.executable, "-m", "areal_async.engines.deepspeed.rank", "--connection", str(file())]]


@pytest.mark.parametrize("words", [["worker", "--help"], ["worker", "trainer", "--help"]])
def test_help_has_an_example(words: list[str]) -> None:
    said = subprocess.run([sys.executable, "-m", "areal_async", *words], capture_output=True, text=True, check=True)
    assert "torchrun --standalone --nproc-per-node=8 -m areal_async worker trainer --connect" in said.stdout


def test_a_file_is_never_readable_by_others(tmp_path: Path, connection: TrainerConnection) -> None:
    class Listening:
        listening, public_key = "tcp://127.0.0.1:1", "k" * 40

    old = os.umask(0)
    try:
        path = write_connection(tmp_path, Listening(), "s3cret", 2, connection.spec)  # type: ignore[arg-type]
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(LaunchError, match="can't be written for the trainer ranks"):
        write_connection(tmp_path, Listening(), "s3cret", 2, connection.spec)  # type: ignore[arg-type]


def test_what_killed_ranks_have_left_is_removed(tmp_path: Path, connection: TrainerConnection) -> None:
    spec = msgspec.structs.replace(connection.spec, publish_folder=str(tmp_path), shm_prefix="areal-ab")
    kept = tmp_path / "areal-cd-v3.safetensors"
    for name in ("areal-ab-v3.safetensors", "areal-ab-v4.partial", kept.name):
        (tmp_path / name).touch()
    remove_published(spec)
    assert list(tmp_path.glob("areal-*")) == [kept]
