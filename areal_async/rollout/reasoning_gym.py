"""Problems that reasoning-gym makes, named in the place of a file: `reasoning_gym:TASK?size=N&seed=S&option=value…`.

    data: {train: "reasoning_gym:chain_sum?size=2000&seed=7&min_terms=2"}

`size` and `seed` must be there; the others are the task's own options, in JSON (`operators=["+"]`) or as text, `&` and
`%` within one written `%26` and `%25`. `system_prompt=NAME` puts one of reasoning-gym's own before each question
(`default`, `DeepSeekZero`, …), which asks for `<answer>…</answer>`.

What always holds: the same text gives the same rows, on any machine, in any process: they are made in a process of its
own with a fixed hash seed, since the order of Python's sets shows in some tasks. So nothing of the package, and of what
it loads, comes into the controller.
"""

import dataclasses
import difflib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import unquote

import msgspec

from areal_async.errors import DataError
from areal_async.rollout.values import Json

SCHEME: Final = "reasoning_gym:"
EXAMPLE: Final = f"{SCHEME}chain_sum?size=2000&seed=7"
INSTALL: Final = "pip install 'areal-async[reasoning]'"
SYSTEM_PROMPT: Final = "system_prompt"
HASH_SEED: Final = "0"  # PYTHONHASHSEED of whoever makes them


class Source(NamedTuple):
    """options: of the task."""

    task: str
    size: int
    seed: int
    system_prompt: str | None
    options: dict[str, Json]


def is_source(path: str) -> bool:
    return path.startswith(SCHEME)


def parsed(text: str) -> Source:
    """Errors: DataError `text: what`."""
    task, _, query = text.removeprefix(SCHEME).partition("?")
    options: dict[str, Json] = {}
    for part in filter(None, query.split("&")):
        name, equals, value = part.partition("=")
        if not equals or name in options:
            raise DataError(f"{text}: {part!r} is {'given twice' if equals else 'not of the form option=value'}")
        options[name] = _value(unquote(value))
    size, seed = (_whole_number(text, name, options.pop(name, None)) for name in ("size", "seed"))
    if size < 1:
        raise DataError(f"{text}: size must be at least 1")
    system = options.pop(SYSTEM_PROMPT, None)
    return Source(task, size, seed, None if system is None else str(system), options)


def _whole_number(text: str, name: str, value: Json) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise DataError(f"{text}: {name} must be given, as a whole number, such as {EXAMPLE}")


def _value(text: str) -> Json:
    try:
        value: Json = json.loads(text)
    except ValueError:
        return text
    return value


def rows(text: str) -> list[dict[str, Json]]:
    """The rows: prompt, answer, metadata, and task_options where there are any. Errors: DataError `text: what`."""
    parsed(text)
    child = subprocess.run(
        [sys.executable, "-m", "areal_async.rollout.reasoning_gym", text],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": HASH_SEED},
    )
    if child.returncode:
        what = child.stderr.decode(errors="replace").strip()
        raise DataError(f"{text}: {what or f'its process ended with {child.returncode}'}")
    made: list[dict[str, Json]] = msgspec.msgpack.decode(child.stdout)
    return made


def shared(train: Sequence[str], held_out: str) -> str | None:
    """Why problems of `held_out` are in the training data, too; None if no two sources tell so."""
    other = parsed(held_out)
    for text in filter(is_source, train):
        source = parsed(text)
        # Problem i of a task is drawn with seed + i
        apart = source.seed + source.size <= other.seed or other.seed + other.size <= source.seed
        if source.task == other.task and not apart:
            free = source.seed + source.size
            return f"draws problems of {text} (a problem for each seed from `seed` on); try seed={free} or more"
    return None


# ------------------------------------------------------------------------------------------------- in its own process


def main(text: str) -> int:
    """Write the rows to standard output, in msgpack; what is wrong to standard error."""
    try:
        made = _made(parsed(text))
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(made)
    return 0


def _made(source: Source) -> bytes:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
        from reasoning_gym.utils import SYSTEM_PROMPTS
    except ImportError as error:
        raise DataError(f"the package reasoning-gym is not there ({error}): {INSTALL}") from None
    if source.task not in DATASETS:
        raise DataError(f"no task {source.task!r}; {_nearest(source.task, DATASETS)}")
    if source.system_prompt is not None and source.system_prompt not in SYSTEM_PROMPTS:
        raise DataError(
            f"no {SYSTEM_PROMPT} {source.system_prompt!r}; {_nearest(source.system_prompt, SYSTEM_PROMPTS)}"
        )
    fields = {field.name: field for field in dataclasses.fields(DATASETS[source.task][1])}
    options = {}
    for name, value in source.options.items():
        if name not in fields:
            known = fields.keys() - {"size", "seed"}
            raise DataError(f"{source.task} has no option {name!r}; {_nearest(name, sorted(known))}")
        options[name] = tuple(value) if isinstance(value, list) and isinstance(fields[name].default, tuple) else value
    try:
        entries = list(reasoning_gym.create_dataset(source.task, size=source.size, seed=source.seed, **options))
    except Exception as error:  # whatever the task says of its options, or breaks with
        raise DataError(f"{source.task}: {type(error).__name__}: {error}") from error
    system = [] if source.system_prompt is None else [_message("system", SYSTEM_PROMPTS[source.system_prompt])]
    try:
        return msgspec.msgpack.encode([_row(entry, system, source.options) for entry in entries], enc_hook=_plain)
    except OverflowError:
        raise DataError(
            f"{source.task}: a whole number of more than 64 bits; choose options for smaller ones"
        ) from None


def _plain(value: object) -> object:
    """Of numpy's scalars, which some tasks have in their metadata, Python's; TypeError for what is none."""
    if type(value).__module__ != "numpy":
        raise TypeError(f"{type(value).__name__} in the metadata of a problem")
    return value.item()  # type: ignore[attr-defined]


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def _message(role: str, content: str) -> dict[str, Json]:
    return {"role": role, "content": content}


def _row(entry: Mapping[str, Json], system: list[dict[str, Json]], options: dict[str, Json]) -> dict[str, Json]:
    question = str(entry["question"])
    row: dict[str, Json] = {
        "prompt": [*system, _message("user", question)] if system else question,
        "answer": entry["answer"],
        "question": question,
        "metadata": entry["metadata"],
    }
    return {**row, "task_options": options} if options else row


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
