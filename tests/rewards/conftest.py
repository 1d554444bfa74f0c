"""A tokenizer of single characters, and reward functions that behave in every way that a function can."""

import array
import json
import string
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal_async.messages import RewardSpec, ScoreTask

FUNCTIONS = '''
import ctypes, os, signal, subprocess, sys, time, asyncio

def length(response): return len(response) / 10
def right(response, answer): return response == answer
async def later(response, **columns):
    await asyncio.sleep(0.01)
    return float(columns["level"])
def needs(response, level): return level
def sleeps(response): time.sleep(3600)
def spins(response):
    while True: pass
def raises(response): raise ValueError("no such thing as " + response)
def exits(response): sys.exit(3)
def leaves(response):
    print("last words")
    os._exit(7)
def segfaults(response): os.kill(os.getpid(), signal.SIGSEGV)
def nan(response): return float("nan")
def nothing(response): return None
def prints(response):
    while True: print("x" * 1000)
def chatty(response):
    print("y" * 500_000)
    return 0.5
def tells(response, folder):
    with open(os.path.join(folder, str(os.getpid())), "w"): pass
def stubborn(response, folder):
    """A tree with sessions of its own, deaf to SIGTERM, one of it double-forked."""
    for double in (False, True):
        if os.fork() == 0:
            if double and os.fork() != 0: os._exit(0)
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            tells(response, folder)
            time.sleep(3600)
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    while len(os.listdir(folder)) < 2: time.sleep(0.01)
    tells(response, folder)
def hangs_with_a_tree(response, folder):
    stubborn(response, folder)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)
def returns_with_a_tree(response, folder):
    stubborn(response, folder)
    return 1.0
def dies_with_a_tree(response, folder):
    stubborn(response, folder)
    os.kill(os.getpid(), signal.SIGKILL)
def kills_its_parent(response): os.kill(os.getppid(), signal.SIGKILL); time.sleep(3600)
def mixed(response):
    if response == "slow": time.sleep(3600)
    return 1.0
def needs_its_daemon(response, folder):
    """Whether its own daemon is still there after the check `quick` has ended."""
    if response == "quick": return 1.0
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            tells(response, folder)
            time.sleep(3600)
        os._exit(0)
    os.wait()
    while not os.listdir(folder): time.sleep(0.01)
    (daemon,) = os.listdir(folder)
    open(os.path.join(folder, "ready"), "w").close()
    while not os.path.exists(os.path.join(folder, "quick is over")): time.sleep(0.01)
    time.sleep(0.1)
    return open(f"/proc/{daemon}/stat").read().split()[2] != "Z"
def secret(response): return "AREAL_ASYNC_SECRET" in os.environ
def positional(response, /): return 1.0
def blind(prompt): return 1.0
CONSTANT = 3
'''


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    characters = ["<end>", *string.printable]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "misbehaving.py").write_text(FUNCTIONS)
    return folder


@pytest.fixture
def spec_of(model_path: Path, functions: Path) -> Callable[..., RewardSpec]:
    def make(function: str, *, timeout_s: float = 10.0, concurrent: int = 4) -> RewardSpec:
        return RewardSpec(
            function=function if function == "exact" else f"misbehaving:{function}",
            model_path=str(model_path),
            concurrent=concurrent,
            timeout_s=timeout_s,
            import_paths=(str(functions),),
        )

    return make


@pytest.fixture(scope="session")
def encode(model_path: Path) -> Callable[[str], bytes]:
    vocabulary = json.loads((model_path / "tokenizer.json").read_text())["model"]["vocab"]

    def make(text: str) -> bytes:
        return array.array("i", [*(vocabulary[c] for c in text), vocabulary["<end>"]]).tobytes()

    return make


@pytest.fixture
def task_of() -> Callable[..., ScoreTask]:
    import msgspec

    def make(sample: str = "0.0", answer: str | None = "42", **columns: object) -> ScoreTask:
        return ScoreTask(
            sample=sample,
            attempt=0,
            prompt="6*7=",
            answer=answer,
            finish="stop",
            columns={name: msgspec.Raw(msgspec.msgpack.encode(value)) for name, value in columns.items()},
        )

    return make
