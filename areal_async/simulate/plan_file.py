"""From a plan's YAML file and `key.path=value` overrides to `Plan`s: one, or one for each row of its sweep.

What always holds: what is wrong is told as in a run's configuration (`config_file`), all at once, with file and line; a
row's plan is what the file would be with the row's values written into it. An override of a key that is swept takes the
place of its values. Folders of runs are absolute: those of the file count from its folder, those of the command line
from the working directory.

    sweep:                                   sweep:
      rollout.max_staleness: [0, 4]            - {system: sync, cluster.gpus: [32, 64]}
      trainer.gpus: [16, 32]                   - {system: async, cluster.gpus: [32, 64]}

Left: a grid of four rows, the last key the fastest. Right: one grid after the other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Final

import msgspec

from areal_async.config_file import Sources, override, put, raise_problems, read_text
from areal_async.config_types import TypeCheck, join, options, struct_type
from areal_async.config_yaml import COMMAND_LINE, Entry, Place, Problem, Scalar, is_null, read_tree, scalar
from areal_async.simulate.plan import Plan

SWEEP: Final = "sweep"
MOST_ROWS: Final = 1000  # of a sweep; more is a slip
_OF_SWEEP: Final = f"{SWEEP}."
_FOLDERS: Final = ("from_run", "validate")
_NOT_SWEPT: Final = ("title", "baseline", "warm_up", "validate")


@dataclass(frozen=True, slots=True)
class Row:
    """values: of the swept keys, as they were written; empty without a sweep."""

    values: Mapping[str, str]
    plan: Plan
    sources: Sources


def load_rows(path: str | Path, overrides: Sequence[str] = ()) -> list[Row]:
    """At least one. Raises ConfigError with all that is wrong."""
    source = str(path)
    tree, problems = read_tree(read_text(source), source)
    if problems and not tree.value:
        raise_problems(problems)
    swept = [text.removeprefix(_OF_SWEEP) for text in overrides if text.startswith(_OF_SWEEP)]
    problems += override(tree, [text for text in overrides if not text.startswith(_OF_SWEEP)])
    assert isinstance(tree.value, dict)
    written = tree.value.pop(SWEEP, Entry(Place(source, 1), {}))
    grids = _grids(written, swept, tree, problems)
    rows = []
    for values in _combinations(grids):
        row = _row(tree, values, source, problems)
        if row is not None:
            rows.append(row)
    if problems:
        raise_problems(list(dict.fromkeys(problems)))
    return rows


def _row(tree: Entry, values: Mapping[str, Entry], source: str, problems: list[Problem]) -> Row | None:
    copy = _copy(tree)
    for key, entry in values.items():
        put(copy, key.split("."), entry)
    check = TypeCheck(Plan)
    plain = check.config(copy)
    problems += check.problems
    if check.problems:
        return None
    for key in _FOLDERS:
        if isinstance(plain.get(key), str):
            base = Path.cwd() if check.places[key].source == COMMAND_LINE else Path(source).absolute().parent
            plain[key] = str(base / Path(str(plain[key])).expanduser())
    shown = {key: _shown(entry) for key, entry in values.items()}
    return Row(shown, msgspec.convert(plain, Plan), Sources(source, check.places))


# -------------------------------------------------------------------------------------------------------- the sweep


Grid = dict[str, list[Entry]]


def _grids(written: Entry, overrides: Sequence[str], tree: Entry, problems: list[Problem]) -> list[Grid]:
    """Keys with their values, of each grid; one empty grid where nothing is swept. overrides: `KEY=VALUES`, of each."""
    if is_null(written):
        written = Entry(written.place, {})
    grids: list[Grid] = []
    for part in written.value if isinstance(written.value, list) else [written]:
        if not isinstance(part.value, dict):
            what = "must be a section of `key.path: [values]`, or a list of such sections"
            problems.append(Problem(part.place, SWEEP, what))
            continue
        problems += override(part, overrides)
        grid: Grid = {}
        for key, entry in _flat(part, ""):
            if _written_over(tree, key):
                continue
            if why := _unknown(key):
                problems.append(Problem(entry.place, join(SWEEP, key), why))
            elif isinstance(entry.value, list) and not entry.value:
                problems.append(Problem(entry.place, join(SWEEP, key), "has no values; leave it out"))
            else:
                grid[key] = entry.value if isinstance(entry.value, list) else [entry]
        grids.append(grid)
    if sum(prod(map(len, grid.values())) for grid in grids) > MOST_ROWS:
        problems.append(Problem(written.place, SWEEP, f"has more than {MOST_ROWS} rows; leave some values out"))
        return []
    return grids or [{}]


def _flat(entry: Entry, path: str) -> Iterator[tuple[str, Entry]]:
    """`rollout: {max_staleness: …}` is `rollout.max_staleness: …`; a key that comes again is an override's."""
    assert isinstance(entry.value, dict)
    found: dict[str, Entry] = {}
    for name, inner in entry.value.items():
        key = join(path, name)
        found |= dict(_flat(inner, key)) if isinstance(inner.value, dict) else {key: inner}
    yield from found.items()


def _unknown(key: str) -> str:
    """What is wrong with a key that is to be swept; empty: nothing."""
    if key in _NOT_SWEPT:
        return "isn't of a row; it can't be swept"
    known = dict(options(struct_type(Plan)))
    if key in known:
        return ""
    if inside := [option for option in known if option.startswith(f"{key}.")]:
        return f"is a section; name one of its keys, such as {inside[0]}"
    place = Place("", 0)
    *sections, leaf = key.split(".")
    entry = Entry(place, {leaf: Entry(place, Scalar("", quoted=True))})
    for section in reversed(sections):
        entry = Entry(place, {section: entry})
    check = TypeCheck(Plan)
    check.config(entry)
    return check.problems[0].what


def _written_over(tree: Entry, key: str) -> bool:
    """Whether the command line sets it."""
    entry = tree
    for name in key.split("."):
        if not isinstance(entry.value, dict) or name not in entry.value:
            return False
        entry = entry.value[name]
    return entry.place.source == COMMAND_LINE


def _combinations(grids: Sequence[Grid]) -> Iterator[dict[str, Entry]]:
    for grid in grids:
        for values in product(*grid.values()):
            yield dict(zip(grid, values, strict=True))


def _copy(entry: Entry) -> Entry:
    """Sections anew; values, which nobody changes, are shared."""
    if not isinstance(entry.value, dict):
        return entry
    return Entry(entry.place, {name: _copy(inner) for name, inner in entry.value.items()})


def _shown(entry: Entry) -> str:
    if isinstance(entry.value, Scalar):
        return "null" if scalar(entry.value) is None else entry.value.text
    if isinstance(entry.value, list):
        return "[" + ", ".join(map(_shown, entry.value)) + "]"
    return "…"
