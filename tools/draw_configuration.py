"""Draws docs/configuration.md from the structs of `areal_async.config`, and docs/simulate-options.md from those of
`areal_async.simulate.plan`: `python tools/draw_configuration.py`.

What always holds: every option stands in its page with its type, default, limits and meaning, and nothing of it is
written twice; tests/test_config_docs.py fails while a page is out of date.
"""

from pathlib import Path
from typing import Final

import msgspec
from msgspec import inspect

from areal_async.config import Config
from areal_async.config_types import description, limits, options, plural, struct_type, unwrap, words
from areal_async.simulate.plan import Plan

_DOCS: Final = Path(__file__).resolve().parent.parent / "docs"
PAGE: Final = _DOCS / "configuration.md"
PLAN_PAGE: Final = _DOCS / "simulate-options.md"

_OPENING: Final = """# Configuration

<!-- drawn by tools/draw_configuration.py from areal_async/config.py; edit that file, then draw this one anew -->

A run is described by one YAML file; any option can be set on the command line too, as `key.path=value`:

```
areal-async check configs/mine.yaml
areal-async run configs/mine.yaml train.lr=2e-6 rollout.stop_token_ids=[13,198] reward.exact_after='####'
```

- Every mistake is reported at once, a line each: `configs/mine.yaml:22: train.minibatches: 3 does not divide
  train.batch_groups (32); try 2 or 4`. Unknown keys, keys given twice and tabs are mistakes.
- Scalars are those of YAML 1.2: `1e-6` is a number; `no`, `on` and `yes` are text; a number with a leading zero
  (`0123`) is refused. `null` (or `~`, or nothing) means none. Where text is wanted, a number is taken as it is written
  (`cores: 0`). Aliases and tags aren't supported.
- On the command line, what begins with `[`, `{`, `"` or `'` is read as YAML; anything else is the value as it stands.
- `model.path`, `data.train` and `data.eval` count from the configuration file's folder; on the command line, and
  `runs_dir` and `runtime_dir` always, from the working directory. `~` is your home.
- The run folder's `config.yaml` has every option as it was, with absolute paths; it can be run again as it is.
"""


_PLAN_OPENING: Final = """# Options of a plan

<!-- drawn by tools/draw_configuration.py from areal_async/simulate/plan.py; edit that file, then draw this one anew -->

What may stand in a plan for `areal-async simulate`, beside `sweep` ([simulate.md](simulate.md) has how to write one).
Files, overrides, mistakes and scalars are as in a run's [configuration](configuration.md); `rollout`, `train`,
`weights` and `checkpoint` have options of a run under the same names. `from_run` and `validate` count from the plan's
folder; on the command line, from the working directory.
"""


def draw() -> str:
    """docs/configuration.md, its whole text."""
    return _draw(Config, _OPENING)


def draw_plan() -> str:
    """docs/simulate-options.md, its whole text."""
    return _draw(Plan, _PLAN_OPENING)


def _draw(struct: type[msgspec.Struct], opening: str) -> str:
    fields = struct_type(struct).fields
    sections = [field for field in fields if isinstance(unwrap(field.type)[0], inspect.StructType)]
    parts = [opening, _table("At the top", [("", field) for field in fields if field not in sections])]
    for field in sections:
        inner, _ = unwrap(field.type)
        assert isinstance(inner, inspect.StructType)
        # sections within a section stand in its table, under their full names
        leaves = [(key.rpartition(".")[0] + ".", leaf) for key, leaf in options(inner, field.name)]
        parts.append(_table(f"`{field.name}`", leaves))
    return "\n".join(parts)


def _table(title: str, fields: "list[tuple[str, inspect.Field]]") -> str:
    """fields: each with the name of its section, ending in a dot."""
    rows = [f"## {title}", "", "| option | type | default | limits | meaning |", "|---|---|---|---|---|"]
    for prefix, field in fields:
        kind, optional = unwrap(field.type)
        cells = [f"`{prefix}{field.name}`", _type(kind, optional), _default(field), _limits(kind), description(field)]
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*rows, ""])


def _type(kind: inspect.Type, optional: bool) -> str:
    match kind:
        case inspect.LiteralType():
            name = ", ".join(f"`{value}`" for value in kind.values)
        case inspect.IntType():
            name = "whole number"
        case inspect.FloatType():
            name = "number"
        case inspect.TupleType():
            name = f"list of {len(kind.item_types)} {plural(words(kind.item_types[0]))}"
        case inspect.StrType():
            name = "text"
        case _:
            name = words(kind).removeprefix("a ")
    return f"{name}, or null" if optional else name


def _limits(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.StrType) and kind.pattern is not None:
        return f"`{kind.pattern}`"
    return limits(kind).strip() if isinstance(kind, inspect.IntType | inspect.FloatType) else ""


def _default(field: inspect.Field) -> str:
    if field.required:
        return "**required**"
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(default, tuple):
        default = list(default)
    return f"`{'null' if default is None else str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(draw(), encoding="utf-8")
    PLAN_PAGE.write_text(draw_plan(), encoding="utf-8")
