"""Every row of a plan simulated, and each compared with the row that it is to be compared with.

What always holds: rows stand in the order of the sweep; nothing of one row changes another; the same plan and seed give
the same rows on any machine. A row whose run the core has ended with an error says why, and the others go on.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from areal_async.errors import ConfigError, RunFailed
from areal_async.simulate import colocated
from areal_async.simulate.engine import Progress, simulate
from areal_async.simulate.figures import Figures
from areal_async.simulate.fit import Fitted
from areal_async.simulate.plan_file import Row
from areal_async.simulate.scenario import Scenario, scenario


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A row. values: of the swept keys. gpus: of servers and trainer (colocated: both are the same ones). step_s: mean
    time of a step, steps_per_s and tokens_per_s (trained) follow from it; of what `warm_up` leaves. speed_up: by
    steps_per_s, against the row `against` (counted from 0). failed: why there are no figures."""

    values: Mapping[str, str]
    system: str
    max_staleness: int
    servers: int
    trainer_ranks: int
    gpus: int
    step_s: float = 0.0
    steps_per_s: float = 0.0
    tokens_per_s: float = 0.0
    against: int | None = None
    speed_up: float | None = None
    figures: Figures | None = None
    failed: str = ""


class Prepared(NamedTuple):
    row: Row
    scenario: Scenario


def prepare(rows: Sequence[Row], fit: Callable[[Path], Fitted]) -> list[Prepared]:
    """fit: reads a run; each is read once. Raises ConfigError for what is wrong with any row, all at once."""
    fitted: dict[str, Fitted] = {}
    prepared: list[Prepared] = []
    wrong: dict[str, None] = {}
    for row in rows:
        run = row.plan.from_run
        if run is not None and run not in fitted:
            fitted[run] = fit(Path(run))
        try:
            prepared.append(Prepared(row, scenario(row.plan, row.sources, None if run is None else fitted[run])))
        except ConfigError as error:
            wrong |= dict.fromkeys(str(error).split("\n"))
    if wrong:
        raise ConfigError("\n".join(wrong))
    return prepared


def simulate_rows(prepared: Sequence[Prepared], progress: Callable[[int], Progress] | None = None) -> Iterator[Result]:
    """progress: what is told of the steps of a row (its number)."""
    for number, (row, made) in enumerate(prepared):
        tell = None if progress is None else progress(number)
        result = Result(
            values=row.values,
            system=row.plan.system,
            max_staleness=made.rules.max_staleness,
            servers=made.cluster.servers,
            trainer_ranks=made.rules.ranks,
            gpus=made.gpus,
        )
        try:
            if row.plan.system == "colocated":
                figures = colocated.simulate(made.rules, made.cluster, made.reshard_s, tell)
            else:
                figures = simulate(made.rules, made.cluster, row.plan.seed, tell)
        except (RunFailed, ValueError) as error:  # ended by the core; or no run could follow such rules
            yield msgspec.structs.replace(result, failed=str(error))
            continue
        if not 0 < figures.seconds < math.inf:
            why = "all of it takes no time" if not figures.seconds else "it takes longer than any number of seconds"
            yield msgspec.structs.replace(result, failed=f"{why}; some option is much too large or too small")
            continue
        yield _with_rates(result, figures, row.plan.warm_up)


def _with_rates(result: Result, figures: Figures, warm_up: int) -> Result:
    steps = figures.step_s[warm_up : -1 - result.max_staleness] if warm_up else figures.step_s
    step_s = sum(steps) / max(len(steps), 1)
    per_s = 1 / step_s if step_s else 0.0
    return msgspec.structs.replace(
        result,
        step_s=step_s,
        steps_per_s=per_s,
        tokens_per_s=figures.tokens_trained / max(figures.steps, 1) * per_s,
        figures=figures,
    )


def compared(rows: Sequence[Row], results: Sequence[Result]) -> list[Result]:
    """The same with their speed-ups. Raises ConfigError where a baseline is no row."""
    places = baselines(rows)
    done = []
    for result, place in zip(results, places, strict=True):
        other = results[place].steps_per_s
        speed_up = result.steps_per_s / other if other and result.steps_per_s else None
        done.append(msgspec.structs.replace(result, against=place, speed_up=speed_up))
    return done


def baselines(rows: Sequence[Row]) -> list[int]:
    """For each row the number of the one that it is compared with: that which differs from it in the baseline's values
    alone; else the first that has these values."""
    first = rows[0]
    wanted: dict[str, str] = {}
    for text in first.plan.baseline:
        key, equals, value = text.partition("=")
        key, value = key.strip(), value.strip()
        found = {row.values[key] for row in rows if key in row.values}
        if not equals or value not in found:
            nearest = f"{key} is swept over {', '.join(sorted(found))}" if found else (
                f"swept are {', '.join(first.values) or 'no keys'}"
            )  # fmt: skip
            raise ConfigError(
                f"{first.sources.where('baseline')}: baseline: {text!r} is no value of the sweep; {nearest}"
            )
        wanted[key] = value
    having = [number for number, row in enumerate(rows) if wanted.items() <= row.values.items()]
    if not having:
        raise ConfigError(
            f"{first.sources.where('baseline')}: baseline: no row has all of {', '.join(first.plan.baseline)}"
        )
    by_values = {tuple(sorted(rows[number].values.items())): number for number in reversed(having)}
    return [by_values.get(tuple(sorted({**row.values, **wanted}.items())), having[0]) if wanted else 0 for row in rows]
