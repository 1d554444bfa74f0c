"""Whether a well-formed configuration makes sense, with the files it names and the machine it is to run on.

What always holds: nothing is started, nothing written, and neither torch nor transformers is imported; all that is
wrong is found in one go, a line each, in the form of `config_file`'s errors. A check that needs what another check
found missing is left out rather than guessed.
"""

import difflib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from areal_async import config_machines
from areal_async.config import Config
from areal_async.config_file import Sources
from areal_async.errors import ConfigError, DataError
from areal_async.rollout.data import Dataset
from areal_async.rollout.text import Text

Finding: TypeAlias = tuple[str, str]
"""Key of the option to change, and what is wrong with it."""

SHM_FOLDER: Final = "/dev/shm"
SERVER_SHM_BYTES: Final = 160 << 20  # vLLM 0.32 refuses to start a worker's message queue with less
PUBLISHED_VERSIONS: Final = 3  # the one that a server loads, the newest, and the one that is being written
SOCKET_PATH_BYTES: Final = 107  # sockaddr_un.sun_path, less its ending zero
SOCKET_NAME_BYTES: Final = 32  # "/rXXXXXXXX/server 9999.sock" and its like: what the controller puts behind the folder
PROMPTS_TOKENIZED: Final = 20_000  # the longest in characters; of more data the rest is measured when it is asked

_TOGETHER: Final = 512  # prompts tokenized at a time: enough for all cores, little enough for the memory

_IMPORT_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_CORES: Final = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")

# Arguments of the vLLM command that the run sets itself: another value would break what the trainer relies on.
_OUR_ARGUMENTS: Final = {
    "--uds": "",
    "--host": "",
    "--port": "",
    "--model": "model.path",
    "--dtype": "model.dtype",
    "--max-model-len": "server.max_model_len",
    "--max-num-seqs": "server.max_num_seqs",
    "--stream-interval": "server.stream_interval",
    "--seed": "seed",
    "--logprobs-mode": "",
    "--weight-transfer-config": "",
    "--generation-config": "",
}


def problems(config: Config, sources: Sources) -> list[str]:
    """Everything that is wrong: `file:line: key.path: what; nearest valid value`. Empty for a configuration to run."""
    findings = [
        *_data_flow(config),
        *_optimiser(config),
        *_imports(config),
        *_machine(config),
        *config_machines.findings(config),
        *_folders(config),
    ]
    text, wrong = _text(config)
    lines = [f"{sources.where(key)}: {key}: {what}" for key, what in (*findings, *wrong)]
    for key, path in (*(("data.train", path) for path in config.data.train), ("data.eval", config.data.eval)):
        if path is not None:
            lines += _data(config, sources, key, path, text)
    if text is not None:
        findings = [*_weights(config), *_tokens(config, text)]
        lines += [f"{sources.where(key)}: {key}: {what}" for key, what in findings]
    return lines


def check(config: Config, sources: Sources) -> None:
    """Raise ConfigError with all `problems`, a line each; return if there are none."""
    found = problems(config, sources)
    if found:
        raise ConfigError("\n".join(found))


# --------------------------------------------------------------------------------------------- options with each other


def _data_flow(config: Config) -> Iterator[Finding]:
    """Groups, batches and their parts."""
    rollout, train = config.rollout, config.train
    if train.batch_groups % train.minibatches:
        what = f"{train.minibatches} does not divide train.batch_groups ({train.batch_groups})"
        yield "train.minibatches", f"{what}; try {_near_divisors(train.batch_groups, train.minibatches)}"
    else:
        samples = train.batch_groups // train.minibatches * rollout.group_size
        if train.ranks > samples:
            what = f"{train.ranks} ranks, but a minibatch has only {samples} samples"
            yield "train.ranks", f"{what} (groups × rollout.group_size / train.minibatches); try {samples}"
    if rollout.group_size == 1 and train.advantage in ("grpo", "dr_grpo", "rloo"):
        what = f"1: under {train.advantage} a sample alone has no advantage and nothing is learned"
        yield "rollout.group_size", f"{what}; try 8"
    if rollout.min_group is not None and rollout.min_group > rollout.group_size:
        what = f"{rollout.min_group} is more than rollout.group_size ({rollout.group_size})"
        yield "rollout.min_group", f"{what}; try {rollout.group_size}"
    if rollout.max_concurrent < rollout.group_size:
        what = f"{rollout.max_concurrent} is less than one group (rollout.group_size is {rollout.group_size})"
        yield "rollout.max_concurrent", f"{what}; try {rollout.group_size * train.batch_groups}"
    servers = config.own_servers + len(rollout.urls)
    if config.eval.every_steps is not None and config.data.eval is None:
        yield "eval.every_steps", "there is nothing to evaluate on; name a file of held-out problems in data.eval"
    if config.weights.wave > servers:
        yield "weights.wave", f"{config.weights.wave} is more than there are servers ({servers}); try {servers}"


def _near_divisors(whole: int, wanted: int) -> str:
    divisors = [d for d in range(1, whole + 1) if whole % d == 0]
    below = [str(d) for d in divisors if d < wanted][-1:]
    above = [str(d) for d in divisors if d > wanted][:1]
    return " or ".join(below + above)


def _optimiser(config: Config) -> Iterator[Finding]:
    train = config.train
    if train.lr > 1:
        # AdamW moves each weight by about lr a step: above 1 it can only be a slip, such as 1e6 for 1e-6
        yield "train.lr", f"{train.lr:g} is no learning rate; it must be at most 1; try {1 / train.lr:g}"
    for number, beta in enumerate(train.betas):
        if not 0 <= beta < 1:
            yield f"train.betas[{number}]", f"must be ≥ 0 and < 1, not {beta:g}; try {(0.9, 0.95)[number]}"


def _imports(config: Config) -> Iterator[Finding]:
    """Import paths by their form; what stands behind them is loaded when the run starts."""
    reward, workflow = config.reward, config.rollout.workflow
    yield from _import_path("reward.function", reward.function, "exact", "function")
    yield from _import_path("rollout.workflow", workflow, "single_turn", "Class")
    if reward.exact_after is not None and reward.function != "exact":
        yield "reward.exact_after", f"is only read by `exact`, and reward.function is {reward.function}; leave it out"
    for argument in config.server.extra_args:
        name = argument.partition("=")[0]
        if name in _OUR_ARGUMENTS:
            instead = f"; set {_OUR_ARGUMENTS[name]} instead" if _OUR_ARGUMENTS[name] else "; leave it out"
            yield "server.extra_args", f"{name} is set by the run itself{instead}"


def _import_path(key: str, value: str, builtin: str, kind: str) -> Iterator[Finding]:
    if value == builtin or _IMPORT_PATH.fullmatch(value):
        return
    module, _, name = value.replace("/", ".").replace(".py:", ":").rpartition(":" if ":" in value else ".")
    nearest = f"{module}:{name}" if _IMPORT_PATH.fullmatch(f"{module}:{name}") else builtin
    yield key, f"must be {builtin}, or an import path module:{kind}, not {value!r}; try {nearest}"


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
        nearest = f"write {users} parts with | between them" if users > 1 else "write one part, without |"
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


def _folders(config: Config) -> Iterator[Finding]:
    runs = Path(config.runs_dir)
    parent = next(folder for folder in (runs, *runs.absolute().parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        yield "runs_dir", f"{parent} isn't a folder that you may write to"
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


def _tokens(config: Config, text: Text) -> Iterator[Finding]:
    """Token ids and lengths that the model must have room for."""
    rollout, longest_context = config.rollout, config.server.max_model_len
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
    """The longest prompt of a file. tokens: its length. where: `file:line`."""

    tokens: int
    where: str


def _data(config: Config, sources: Sources, key: str, path: str, text: Text | None) -> list[str]:
    """Problems of one data file; lines of the file itself are named where they are what is wrong."""
    place = sources.where(key)
    if not Path(path).is_file():
        folder = Path(path).parent
        close = difflib.get_close_matches(Path(path).name, [f.name for f in folder.glob("*")], 1)
        hint = f"did you mean {folder / close[0]}?" if close else "paths in the file count from its folder"
        return [f"{place}: {key}: no such file: {path}; {hint}"]
    try:
        dataset = Dataset.load(path, config.data.prompt_key, config.data.answer_key)
    except ConfigError as error:
        return str(error).split("\n")
    lines = [f"{sources.where(option)}: {option}: {what}" for option, what in _rows(config, key, dataset)]
    if text is None:
        return lines
    try:
        longest = _longest(dataset, text)
    except ConfigError as error:
        return [*lines, str(error)]
    return lines + [f"{sources.where(o)}: {o}: {what}" for o, what in _room(config, key, longest, text)]


def _rows(config: Config, key: str, dataset: Dataset) -> Iterator[Finding]:
    epochs, batch = config.data.epochs, config.train.batch_groups
    if key == "data.train" and epochs is not None and len(dataset) * epochs < batch:
        what = f"{epochs}: {len(dataset)} prompts × {epochs} never fill a batch of train.batch_groups ({batch})"
        yield "data.epochs", f"{what}; try {-(-batch // len(dataset))}, or null for as often as needed"
    if config.reward.function == "exact":
        lacking = [number for number, row in enumerate(dataset.rows) if row.answer is None]
        if lacking:
            where = f"{len(lacking)} of {len(dataset)} rows have no {config.data.answer_key!r}"
            columns = ", ".join(dataset.rows[lacking[0]].columns) or "none"
            first = f"{dataset.where(lacking[0])} is the first; its other columns are {columns}"
            yield "data.answer_key", f"{where}, which reward.function exact compares with ({first})"


def _longest(dataset: Dataset, text: Text) -> _Longest:
    """Errors: DataError with file and line for a prompt that can't be rendered, or has a token the model hasn't."""
    rows: Sequence[int] = range(len(dataset))
    if len(rows) > PROMPTS_TOKENIZED:
        rows = sorted(rows, key=lambda row: len(str(dataset.rows[row].prompt)), reverse=True)[:PROMPTS_TOKENIZED]
    longest = _Longest(0, "")
    for first in range(0, len(rows), _TOGETHER):
        part = rows[first : first + _TOGETHER]
        for row, ids in zip(part, _encode(dataset, part, text), strict=True):
            if max(ids) >= text.vocab_size:
                what = f"token {max(ids)} of the prompt is outside the model's vocabulary ({text.vocab_size})"
                raise DataError(f"{dataset.where(row)}: {what}; model.path holds another model's tokenizer")
            if len(ids) > longest.tokens:
                longest = _Longest(len(ids), dataset.where(row))
    return longest


def _encode(dataset: Dataset, rows: Sequence[int], text: Text) -> list[list[int]]:
    try:
        return text.encode_all([dataset.rows[row].prompt for row in rows])
    except DataError:
        for row in rows:  # once more, one by one, to name the line
            try:
                text.encode(dataset.rows[row].prompt)
            except DataError as error:
                raise DataError(f"{dataset.where(row)}: {error}") from error
        raise


def _room(config: Config, key: str, longest: _Longest, text: Text) -> Iterator[Finding]:
    """Whether the longest prompt of a file and its answer fit the context and, of training data, a micro-batch."""
    limit, train = config.rollout.max_new_tokens, key == "data.train"
    option = "rollout.max_new_tokens" if train else "eval.max_new_tokens"
    if not train and config.eval.max_new_tokens is not None:
        limit = config.eval.max_new_tokens
    context = min(text.context, config.server.max_model_len or text.context)
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
