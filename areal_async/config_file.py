"""From a YAML file and `key.path=value` overrides to a `Config`, and back.

What always holds: a file that has anything wrong with it gives one `ConfigError` that names all of it, a line each:
`file:line: key.path: what is wrong; nearest valid key or value` (`command line: key.path: …` for an override).
Paths in a `Config` that was loaded are absolute: those of the file count from its folder, those of an override from
the working directory. `dump_config` writes what `load_config` reads back as an equal `Config`.
Whether the options make sense together, and what is in the files they name, is asked in `config_check`.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import yaml

from areal_async.config import Config, RewardConfig, Section
from areal_async.config_types import Plain, TypeCheck
from areal_async.config_yaml import (
    COMMAND_LINE,
    Entry,
    Place,
    Problem,
    is_null,
    read_override,
    read_tree,
)
from areal_async.errors import ConfigError
from areal_async.rollout import reasoning_gym

MOST_BYTES: Final = 1 << 20  # of a file. Ours have a few kB; PyYAML takes minutes for a data file named by mistake

# Options that name files or folders, and what relative ones count from.
_FROM_FILE: Final = ("model.path", "data.train", "data.eval", "train.reference_path", "import_path")
_FROM_WORKING_DIRECTORY: Final = ("runs_dir", "runtime_dir", "weights.folder")


class Sources:
    """Where each option of a `Config` was written, for messages about it."""

    def __init__(self, name: str, places: Mapping[str, Place]) -> None:
        """name: the file (or what stands for one). places: dotted key of each option and section that was given."""
        self._name = name
        self._places = places

    @classmethod
    def in_code(cls) -> "Sources":
        """For a `Config` that was made in a program."""
        return cls("Config", {"": Place("Config", 0)})

    def where(self, key: str) -> str:
        """`configs/mine.yaml:22` or `command line`; of an option that was left out, the line of its section."""
        while key and key not in self._places:
            key = key.rpartition("[" if key.endswith("]") else ".")[0]
        return str(self._places.get(key, Place(self._name, 1)))

    def given(self, key: str) -> bool:
        """Whether the option was written, rather than left to its default."""
        return key in self._places


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file; overrides: `key.path=value`. Raises ConfigError with all that is wrong."""
    return load_with_sources(path, overrides)[0]


def load_with_sources(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, Sources]:
    """The same, and where each option was written."""
    source = str(path)
    tree, problems = read_tree(read_text(source), source)
    if problems and not tree.value:  # not YAML: whatever else could be said would only be a consequence
        raise_problems(problems)
    problems += override(tree, overrides)
    check = TypeCheck(Config)
    values = check.config(tree)
    problems += check.problems
    if problems:
        raise_problems(problems)
    _resolve(values, check.places, Path(source).absolute().parent)
    return msgspec.convert(values, Config), Sources(source, check.places)


class _RewardAlone(Section, frozen=True, kw_only=True):
    reward: RewardConfig = RewardConfig()


def reward_of_command_line(overrides: Sequence[str]) -> tuple[RewardConfig, Sources]:
    """The section `reward` by itself; overrides: `reward.KEY=VALUE`. Raises ConfigError with all that is wrong."""
    place = Place(COMMAND_LINE, 0)
    tree = Entry(place, {})
    problems = override(tree, overrides)
    check = TypeCheck(_RewardAlone)
    values = check.config(tree)
    if problems := problems + check.problems:
        raise_problems(problems)
    return msgspec.convert(values, _RewardAlone).reward, Sources(COMMAND_LINE, {"": place, **check.places})


def dump_config(config: Config) -> str:
    """The configuration as YAML, every option written out, paths absolute (counted from the working directory)."""
    values: dict[str, Plain] = msgspec.to_builtins(config)
    for key in (*_FROM_FILE, *_FROM_WORKING_DIRECTORY):
        section, leaf = _holder(values, key)
        section[leaf] = _absolute(section[leaf], Path.cwd())
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_NO_FOLDING)


def read_text(source: str) -> str:
    try:
        with Path(source).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{source}: can't be read: {error.strerror}") from error
    if len(data) > MOST_BYTES:
        raise ConfigError(
            f"{source}: larger than {MOST_BYTES >> 20} MiB: not a configuration; name a YAML file of options"
        )
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{source}:{line}: not UTF-8 text (byte 0x{data[error.start]:02x})") from error


def raise_problems(problems: list[Problem]) -> None:
    """In the order of the lines, the command line last."""
    ordered = sorted(problems, key=lambda problem: (problem.place.source == COMMAND_LINE, problem.place.line))
    raise ConfigError("\n".join(str(problem) for problem in ordered))


def override(tree: Entry, overrides: Sequence[str]) -> list[Problem]:
    """Put overrides into the tree; what isn't an option is found by the type check that follows."""
    problems: list[Problem] = []
    place = Place(COMMAND_LINE, 0)
    seen: set[str] = set()
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        entry, broken = read_override(text)
        if not equals or not all(key.split(".")):
            problems.append(Problem(place, "", f"{override!r} is not of the form key.path=value"))
        elif key in seen:
            problems.append(Problem(place, key, "given twice; keep one of them"))
        elif entry is None:
            problems.append(Problem(place, key, broken))
        elif not put(tree, key.split("."), entry):
            problems.append(Problem(place, key, f"is a section; name one of its keys, such as {key}.KEY=VALUE"))
        seen.add(key)
    return problems


def put(tree: Entry, path: Sequence[str], entry: Entry) -> bool:
    """Set the value at `path`; False if a section of the file stands there."""
    keys = tree.value
    for name in path[:-1]:
        assert isinstance(keys, dict)
        if name not in keys or is_null(keys[name]):
            keys[name] = Entry(keys[name].place if name in keys else entry.place, {})
        keys = keys[name].value
        if not isinstance(keys, dict):
            return True  # the file has a value where a section belongs: the type check names that line
    assert isinstance(keys, dict)
    if path[-1] in keys and isinstance(keys[path[-1]].value, dict):
        return False
    keys[path[-1]] = entry
    return True


def _resolve(values: dict[str, Plain], places: Mapping[str, Place], folder: Path) -> None:
    for key in _FROM_FILE:
        if key in places:
            section, leaf = _holder(values, key)
            base = Path.cwd() if places[key].source == COMMAND_LINE else folder
            section[leaf] = _absolute(section[leaf], base)
    for key in _FROM_WORKING_DIRECTORY:
        if key in places:
            section, leaf = _holder(values, key)
            section[leaf] = _absolute(section[leaf], Path.cwd())
    if "runs_dir" not in places:
        values["runs_dir"] = _absolute("runs", Path.cwd())
    if "import_path" not in places:
        values["import_path"] = _absolute(".", folder)


def _holder(values: dict[str, Plain], key: str) -> tuple[dict[str, Plain], str]:
    section, _, leaf = key.rpartition(".")
    inner = values[section] if section else values
    assert isinstance(inner, dict)
    return inner, leaf


def _absolute(path: Plain, base: Path) -> Plain:
    """The path (or each of a list) from the root, links kept (a user's names should stay recognisable)."""
    if path is None or (isinstance(path, str) and reasoning_gym.is_source(path)):
        return path
    if isinstance(path, list | tuple):
        return [_absolute(item, base) for item in path]
    return os.path.normpath(base / Path(str(path)).expanduser())


_NO_FOLDING: Final = 1 << 30


class _Dumper(yaml.SafeDumper):
    """Quotes every text that isn't plainly a word or a path, so that no reader takes it for anything else."""


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    words = text.replace("/", "").replace("-", "").replace("_", "").replace(".", "")
    plain = words.isascii() and words.isalnum() and words[0].isalpha() and text[0] not in "-."
    reserved = text.lower() in ("null", "none", "true", "false", "yes", "no", "on", "off", "y", "n")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain and not reserved else '"')


_Dumper.add_representer(str, _quoted)
