"""Whether a well-formed configuration makes sense, with the files it names and the machine it is to run on.

What always holds: nothing is started, nothing written, and neither torch nor transformers is imported; all that is
wrong is found in one go, a line each, in the form of `config_file`'s errors. A check that needs what another check
found missing is left out rather than guessed.
"""

import difflib
import importlib.util
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from areal_async import config_machines, config_options, config_rewards
from areal_async.config import Config
from areal_async.config_file import Sources
from areal_async.config_options import Finding
from areal_async.errors import ConfigError, DataError
from areal_async.rollout import reasoning_gym
from areal_async.rollout.data import Dataset
from areal_async.rollout.text import Text, model_settings
from areal_async.rollout.training_data import long_prompts, prompt_limit, tokenized, told

SHM_FOLDER: Final = "/dev/shm"
SERVER_SHM_BYTES: Final = 160 << 20  # vLLM 0.32 refuses to start a worker's message queue with less
PUBLISHED_VERSIONS: Final = 3  # the one that a server loads, the newest, and the one that is being written
SOCKET_PATH_BYTES: Final = 107  # sockaddr_un.sun_path, less its ending zero
SOCKET_NAME_BYTES: Final = 32  # "/rXXXXXXXX/server 9999.sock" and its like: what the controller puts behind the folder
PROMPTS_TOKENIZED: Final = 20_000  # the longest in characters; of more data the rest is measured when it is asked

_CORES: Final = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def problems(config: Config, sources: Sources) -> list[str]:
    """Everything that is wrong: `file:line: key.path: what; nearest valid value`. Empty for a configuration to run."""
    findings = [
        *config_options.findings(config),
        *config_rewards.findings(config.reward),
        *config_rewards.machine(config.reward),
        *_machine(config),
        *config_machines.findings(config),
        *_metrics(config),
        *_folders(config),
    ]
    text, wrong = _text(config)
    lines = [f"{sources.where(key)}: {key}: {what}" for key, what in (*findings, *wrong)]
    lines += _data(config, sources, "data.train", config.data.train, text)
    if config.data.eval is not None:
        lines += _data(config, sources, "data.eval", [config.data.eval], text)
    if text is not None:
        findings = [*_weights(config), *_model(config, text), *_tokens(config, text)]
        lines += [f"{sources.where(key)}: {key}: {what}" for key, what in findings]
    return lines


def check(config: Config, sources: Sources) -> None:
    """Raise ConfigError with all `problems`, a line each; return if there are none."""
    found = problems(config, sources)
    if found:
        raise ConfigError("\n".join(found))


# ------------------------------------------------------------------------------------------------------- this machine


def _machine(config: Config) -> Iterator[Finding]:
    yield from _cores("server.cores", config.server.cores, config.own_servers, "rollout.servers")
    yield from _cores("train.cores", config.train.cores, config.train.ranks, "train.ranks")


def _cores(key: str, cores: str | None, users: int, counted: str) -> Iterator[Finding]:
    """One part for each process, separated by `|`, each as taskset writes it."""
    if cores is None:
        return
    parts = cores.split("|")
    here = os.sched_getaffinity(0)
    wrong = [part for part in parts if not _CORES.fullmatch(part)]
    if wrong:
        yield key, f"{wrong[0]!r} is no list of cores; write them as 0, 0-3 or 0,2, and | between two processes"
        return
    if len(parts) != users:
        nearest = {0: "leave it out", 1: "write one part, without |"}.get(users, f"write {users} parts, with | between")
        yield key, f"names cores for {len(parts)}, but {counted} is {users}; {nearest}"
    missing = sorted({core for part in parts for core in _core_numbers(part)} - here)
    if missing:
        allowed = ", ".join(map(str, sorted(here)))
        yield key, f"this machine lets us use the cores {allowed}, not {', '.join(map(str, missing[:8]))}"


def _core_numbers(part: str) -> Iterator[int]:
    for piece in part.split(","):
        first, _, last = piece.partition("-")
        # a range of nonsense size says enough by its two ends
        yield from (
            range(int(first), int(last or first) + 1) if int(last or first) < 1 << 16 else (int(first), int(last))
        )


def _metrics(config: Config) -> Iterator[Finding]:
    metrics = config.metrics
    if metrics.tensorboard and importlib.util.find_spec("tensorboard") is None:
        install = "pip install 'areal-async[tensorboard]', or leave it out"
        yield "metrics.tensorboard", f"the package tensorboard is not installed; {install}"
    if metrics.wandb != "off" and not _is_package("wandb"):
        yield "metrics.wandb", "the package wandb is not installed; pip install 'areal-async[wandb]', or leave it out"
    if metrics.port is not None:
        try:
            socket.create_server((metrics.host, metrics.port)).close()
        except OSError as error:
            why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
            what = f"{metrics.host}:{metrics.port} can't be opened: {why}"
            yield "metrics.port", f"{what}; try another, or 0 for any free one"


def _is_package(name: str) -> bool:
    """A mere folder of this name in the working directory (W&B's own runs make one) is none."""
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None


def _folders(config: Config) -> Iterator[Finding]:
    for key, path in (("runs_dir", config.runs_dir), ("weights.folder", config.weights.folder)):
        if path is not None:
            parent = next(folder for folder in (Path(path), *Path(path).absolute().parents) if folder.exists())
            if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
                yield key, f"{parent} isn't a folder that you may write to"
    for number, url in enumerate(config.rollout.urls):
        path = url.removeprefix("unix:")
        if path != url and not Path(path).is_socket():
            yield f"rollout.urls[{number}]", f"no such socket: {path}; start that server first (docs/servers.md)"
    folder = Path(tempfile.gettempdir() if config.runtime_dir is None else config.runtime_dir).absolute()
    room = SOCKET_PATH_BYTES - SOCKET_NAME_BYTES
    if len(os.fsencode(folder)) > room:
        what = f"{folder} has {len(os.fsencode(folder))} bytes; sockets in it would have too long a path"
        yield "runtime_dir", f"{what} (at most {room} for the folder); try /tmp/areal-{os.getuid()}"
    if config.runtime_dir is None or not folder.exists():
        return
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        yield "runtime_dir", f"{folder} is not a folder"
    elif status.st_uid != os.getuid():
        yield "runtime_dir", f"{folder} belongs to another user; name a folder of your own"
    elif status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        yield "runtime_dir", f"others may enter {folder} (mode {mode:04o}); chmod 700 it, or name a new folder"


# ---------------------------------------------------------------------------------------------------- model and tokens


def _text(config: Config) -> tuple[Text | None, list[Finding]]:
    """The model's tokenizer; None, with the reason, if it can't be had."""
    folder = Path(config.model.path)
    if not folder.is_dir():
        beside = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        close = difflib.get_close_matches(folder.name, beside, 1)
        hint = f"did you mean {folder.parent / close[0]}?" if close else "name a folder with a downloaded model"
        return None, [("model.path", f"no such folder: {folder}; {hint}")]
    if not (folder / "config.json").exists():
        return None, [("model.path", f"{folder} has no config.json; it isn't a model in Hugging Face form")]
    try:
        text = Text(config.model.path, config.data.chat_template)
        _ = text.context
    except ConfigError as error:
        return None, [("model.path", str(error))]
    return text, []


def _weights(config: Config) -> Iterator[Finding]:
    """The model's weights are there, and shared memory has room for those that are on their way to the servers."""
    folder = Path(config.model.path)
    files = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if not files:
        yield "model.path", f"{folder} has no weights (*.safetensors); a download may have been broken off"
        return
    versions = PUBLISHED_VERSIONS * sum(file.stat().st_size for file in files)
    transport, mib = config.weights.transport, 1 << 20
    needed = config.own_servers * SERVER_SHM_BYTES + (versions if transport == "shm" else 0)
    free = shutil.disk_usage(SHM_FOLDER).free
    if free < needed:
        what = "three versions of the weights, and what vLLM takes" if transport == "shm" else "what vLLM takes"
        yield (
            "weights.transport",
            f"{SHM_FOLDER} has {free // mib:,} MiB free, and this run needs about {-(-needed // mib):,} MiB of it "
            f"({what}); remove what was left in it, or make it larger: "
            f"mount -o remount,size=…, or --shm-size of the container",
        )
    if transport == "disk" and config.weights.folder is not None:
        folder = Path(config.weights.folder).absolute()
        disk = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(disk).free
        if free < versions:
            yield (
                "weights.folder",
                f"{disk} has {free // mib:,} MiB free, and three versions of the weights take about "
                f"{-(-versions // mib):,} MiB; make room there, or name another folder",
            )


def _model(config: Config, text: Text) -> Iterator[Finding]:
    """Whether the model can be shared among GPUs as asked, and the reference model is one for the same tokens."""
    heads, shared = model_settings(config.model.path).get("num_attention_heads"), config.server.tensor_parallel
    if isinstance(heads, int) and heads % shared:
        what = f"{shared} does not divide the model's attention heads ({heads})"
        yield "server.tensor_parallel", f"{what}; try {config_options.near_divisors(heads, shared)}"
    reference = config.train.reference_path
    if reference is None or not config.train.kl_coef:
        return
    if not (Path(reference) / "config.json").is_file():
        yield "train.reference_path", f"{reference} has no config.json; name a model's folder, or null for model.path"
        return
    try:
        size = model_settings(reference).get("vocab_size")
    except ConfigError as error:
        yield "train.reference_path", str(error)
        return
    if size != text.vocab_size:
        what = f"its vocabulary has {size} entries, that of model.path {text.vocab_size}"
        yield "train.reference_path", f"{what}: log-probabilities of the two can't be compared"


def _tokens(config: Config, text: Text) -> Iterator[Finding]:
    """Token ids and lengths that the model must have room for."""
    rollout, longest_context = config.rollout, config.server.max_model_len
    longest_prompt = config.data.max_prompt_tokens
    if longest_prompt is not None and longest_prompt >= _context(config, text):
        what = f"{longest_prompt} leaves no room for an answer in the context ({_context(config, text)})"
        yield "data.max_prompt_tokens", f"{what}; try {_context(config, text) - 1} or less, or null"
    wrong = [token for token in rollout.stop_token_ids if not 0 <= token < text.vocab_size]
    if wrong:
        what = f"{', '.join(map(str, wrong))}: the model's vocabulary ends at {text.vocab_size - 1}"
        yield "rollout.stop_token_ids", what
    if not text.eos_token_ids and not rollout.stop_token_ids:
        yield "rollout.stop_token_ids", "empty, and the model names no end of sequence: no answer would ever stop"
    if longest_context is not None and longest_context > text.context:
        what = f"{longest_context} is more than the model's context ({text.context})"
        yield "server.max_model_len", f"{what}; try {text.context}"


# ---------------------------------------------------------------------------------------------------------------- data


class _Longest(NamedTuple):
    """The longest prompt of some files. tokens: its length. where: `file:line`."""

    tokens: int
    where: str


def _data(config: Config, sources: Sources, key: str, paths: Sequence[str], text: Text | None) -> list[str]:
    """Problems of the files of one option; lines of a file itself are named where they are what is wrong."""
    place = sources.where(key)
    missing = [path for path in paths if not reasoning_gym.is_source(path) and not Path(path).is_file()]
    if missing:
        return [f"{place}: {key}: no such file: {path}; {_nearest_file(Path(path))}" for path in missing]
    try:
        dataset = Dataset.load_all(paths, config.data.prompt_key, config.data.answer_key)
        findings = [*_rows(config, key, dataset), *_held_out(config, key)]
        if text is not None:
            findings += _lengths(config, key, dataset, text)
    except DataError as error:
        return str(error).split("\n")
    return [f"{sources.where(option)}: {option}: {what}" for option, what in findings]


def _held_out(config: Config, key: str) -> Iterator[Finding]:
    """Problems of `data.eval` that reasoning-gym draws for the training data, too."""
    held_out = config.data.eval
    if key == "data.eval" and held_out is not None and reasoning_gym.is_source(held_out):
        what = reasoning_gym.shared(config.data.train, held_out)
        if what is not None:
            yield key, what


def _nearest_file(path: Path) -> str:
    close = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*")], 1)
    return f"did you mean {path.parent / close[0]}?" if close else "paths in the file count from its folder"


def _rows(config: Config, key: str, dataset: Dataset) -> Iterator[Finding]:
    if key == "data.train":
        yield from _enough(config, len(dataset))
    yield from config_rewards.rows(config, key, dataset)


def _enough(config: Config, prompts: int) -> Iterator[Finding]:
    epochs, batch = config.data.epochs, config.train.batch_groups
    if epochs is not None and prompts * epochs < batch:
        what = f"{epochs}: {prompts} prompts × {epochs} never fill a batch of train.batch_groups ({batch})"
        yield "data.epochs", f"{what}; try {-(-batch // prompts)}, or null for as often as needed"


def _lengths(config: Config, key: str, dataset: Dataset, text: Text) -> Iterator[Finding]:
    """Prompts that are too long, and whether the longest one that is asked leaves room for its answer."""
    longest = _longest(dataset, text)
    if key == "data.train":
        limit, policy = prompt_limit(config, _context(config, text)), config.data.long_prompts
        if longest.tokens > limit:
            long = {} if policy == "cut" else long_prompts(dataset, text, limit, PROMPTS_TOKENIZED)
            if policy == "error":
                advice = "data.long_prompts: skip leaves them out, cut asks their ends"
                yield "data.long_prompts", f"error: {told(dataset, long, limit)}; {advice}"
                return
            left = [sum(row not in long for row in file) for file in dataset.files]
            for path, rows in zip(dataset.paths, left, strict=True):
                if not rows and (config.data.weights or not any(left)):
                    yield "data.long_prompts", f"skip: {path} has no prompt of at most {limit} tokens"
            if any(left):
                yield from _enough(config, sum(left))
            longest = _Longest(limit, "data.max_prompt_tokens")
    yield from _room(config, key, longest, text)


def _longest(dataset: Dataset, text: Text) -> _Longest:
    """Errors: DataError with file and line for a prompt that can't be rendered, or has a token the model hasn't."""
    rows: Sequence[int] = range(len(dataset))
    if len(rows) > PROMPTS_TOKENIZED:
        rows = sorted(rows, key=lambda row: len(str(dataset.rows[row].prompt)), reverse=True)[:PROMPTS_TOKENIZED]
    longest = _Longest(0, "")
    for row, ids in tokenized(dataset, text, rows):
        if len(ids) > longest.tokens:
            longest = _Longest(len(ids), dataset.where(row))
    return longest


def _context(config: Config, text: Text) -> int:
    return min(text.context, config.server.max_model_len or text.context)


def _room(config: Config, key: str, longest: _Longest, text: Text) -> Iterator[Finding]:
    """Whether the longest prompt and its answer fit the context and, of training data, a micro-batch."""
    limit, train = config.rollout.max_new_tokens, key == "data.train"
    option = "rollout.max_new_tokens" if train else "eval.max_new_tokens"
    if not train and config.eval.max_new_tokens is not None:
        limit = config.eval.max_new_tokens
    context = _context(config, text)
    left = context - longest.tokens
    prompt = f"the longest prompt ({longest.where}) has {longest.tokens} tokens"
    if left < 1:
        yield key, f"{prompt}, and the context {context}: there is no room for an answer; leave it out or shorten it"
        return
    if limit > left:
        yield option, f"{limit}: {prompt}, which leaves {left} of the context ({context}); try {left}"
    needed, microbatch = longest.tokens + min(limit, left), config.train.max_tokens_per_microbatch
    if train and needed > microbatch:
        what = f"{microbatch} has no room for one whole sample: {prompt}, its answer up to {min(limit, left)}"
        yield "train.max_tokens_per_microbatch", f"{what}; try {needed} or more"
