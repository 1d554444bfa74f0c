"""The process that hands a run to Weights & Biases: it reads `metrics.jsonl` and `eval/results.jsonl` as they grow.

    python -m areal_async.wandb_process ORDER        an `Order` in JSON; SIGTERM: hand over what is there, and end

Why a process of its own: the package wandb brings threads, a service process and hooks into the interpreter's end,
takes seconds to start, and waits for a network; none of that may happen to a controller.

What always holds: names are those of `metrics.jsonl` (`verdicts/right` for an entry of a field that has several); each
row and each evaluation is one entry of W&B's history, in the order in which they were made, under a number (`_step`)
that is the same whenever it is handed over, so what W&B has already it leaves out. A resumed run goes on under its id.
"""

import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import yaml

from areal_async.runfiles import CONFIG, EVALUATIONS, METRICS

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

POLL_S: Final = 1.0
# W&B's service keeps the end of what it was told in memory, a block of 32 KiB, and sends it every few seconds: what has
# been handed over before so much more, and for so long, doesn't get lost where it is killed
SETTLED_BYTES: Final = 1 << 16
SETTLED_S: Final = 60.0
STEP: Final = "step"  # x of what a step has
EVALUATED: Final = "eval_version"  # x of what an evaluation has

Value: TypeAlias = "float | int | str"
Row: TypeAlias = dict[str, object]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """folder: of the run. mode: offline or online. entity: None: the account's default."""

    folder: str
    mode: str
    project: str
    entity: str | None
    name: str


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What W&B has, kept in the run folder. id: of the run there. place: its folder here. url: its page, "" offline.
    rows, evaluations: bytes of the two files that were handed over. entries: how many that makes."""

    id: str
    place: str = ""
    url: str = ""
    rows: int = 0
    evaluations: int = 0
    entries: int = 0


def told_path(folder: Path) -> Path:
    return folder / "wandb" / "areal-async.json"


def read_told(folder: Path) -> Told | None:
    """None where nothing was told yet, or what was can't be read: then it begins from the first row."""
    try:
        return msgspec.json.decode(told_path(folder).read_bytes(), type=Told)
    except (OSError, msgspec.DecodeError):
        return None


def main(arguments: list[str]) -> int:
    order = msgspec.json.decode(arguments[0], type=Order)
    asked_to_end = _ending()
    teller = Teller(order)
    while not select.select([asked_to_end], [], [], POLL_S)[0]:
        teller.hand_over()
    teller.end()
    return 0


def _ending() -> int:
    """A descriptor that becomes readable with a SIGTERM."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    return reader


class Teller:
    """A run at W&B, from its start to `end`. Errors of all methods: those of the package wandb."""

    def __init__(self, order: Order) -> None:
        self._folder = Path(order.folder)
        told_path(self._folder).parent.mkdir(exist_ok=True)
        self._told = read_told(self._folder) or Told(id=os.urandom(8).hex())
        self._run = _begin(order, self._told.id)
        self._told = msgspec.structs.replace(self._told, place=str(Path(self._run.dir).parent), url=self._run.url or "")
        self._settling: deque[tuple[float, Told]] = deque()
        self._known: set[str] = set()
        self._keep(self._told)

    def hand_over(self) -> None:
        """What the files have, and W&B hasn't."""
        before = self._told
        rows = list(_lines(self._folder / METRICS, before.rows))
        results = list(_lines(self._folder / EVALUATIONS, before.evaluations))
        if results:  # rows that were written before them, after the rows were read
            end = rows[-1][2] if rows else before.rows
            rows += [row for row in _lines(self._folder / METRICS, end) if row[0] <= results[-1][0]]
        entries = [(at, row, STEP, end) for at, row, end in rows]
        entries += [(at, row, EVALUATED, end) for at, row, end in results]
        for _, row, axis, end in sorted(entries, key=lambda entry: entry[0]):
            self._hand_over(row_values(row) if axis == STEP else evaluation_values(row), axis)
            place = {"rows" if axis == STEP else "evaluations": end}
            self._told = msgspec.structs.replace(self._told, entries=self._told.entries + 1, **place)
        self._settle()

    def end(self) -> None:
        self.hand_over()
        self._run.finish()
        self._keep(self._told)

    def _hand_over(self, values: dict[str, Value], axis: str) -> None:
        for name in values:
            if name not in self._known:  # one by one: which of two patterns that match W&B takes isn't settled
                self._known.add(name)
                self._run.define_metric(name, step_metric=None if name == axis else axis)
        self._run.log(values, step=self._told.entries, commit=True)

    def _settle(self) -> None:
        """Note what is surely at W&B: were this process killed now, the rest would be handed over again."""
        now = time.monotonic()
        if not self._settling or self._settling[-1][1] != self._told:
            self._settling.append((now, self._told))
        settled = None
        while self._settling and self._is_settled(*self._settling[0], now):
            settled = self._settling.popleft()[1]
        if settled is not None:
            self._keep(settled)

    def _is_settled(self, at: float, told: Told, now: float) -> bool:
        further = self._told.rows + self._told.evaluations - told.rows - told.evaluations
        return further >= SETTLED_BYTES and now - at >= SETTLED_S

    def _keep(self, told: Told) -> None:
        path = told_path(self._folder)
        aside = path.with_name(f".{path.name}.new")
        aside.write_bytes(msgspec.json.encode(told))
        aside.replace(path)


def _begin(order: Order, run_id: str) -> "Run":
    import wandb

    folder = Path(order.folder)
    run = wandb.init(
        project=order.project,
        entity=order.entity,
        name=order.name,
        id=run_id,
        resume="allow",
        dir=folder,
        mode="offline" if order.mode == "offline" else "online",
        settings=wandb.Settings(console="off", disable_job_creation=True, save_code=False),
    )
    configuration = yaml.safe_load((folder / CONFIG).read_text())
    run.config.update(configuration, allow_val_change=True)  # a resume may change some of it
    return run


# ------------------------------------------------------------------------------------------------------ what they say


def _lines(path: Path, position: int) -> Iterator[tuple[float, Row, int]]:
    """When each whole line from `position` on was made (run clock), what it says, and where it ends."""
    try:
        with path.open("rb") as file:
            file.seek(position)
            data = file.read()
    except FileNotFoundError:
        return
    for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
        position += len(line)
        row = msgspec.json.decode(line)
        yield row["time_s"], row, position


def row_values(row: Row) -> dict[str, Value]:
    """Of a line of `metrics.jsonl`; evaluations come from their own file, at their own x."""
    return {name: value for name, value in _values(row) if not name.startswith("eval_")}


def evaluation_values(result: Row) -> dict[str, Value]:
    """Of a line of `eval/results.jsonl`, under the names of `metrics.jsonl`."""
    named = {EVALUATED: result["version"], "eval_score": result["score"], "eval_pass_at": result["pass_at"]}
    return dict(_values(named))


def _values(row: Row) -> Iterator[tuple[str, Value]]:
    for name, value in row.items():
        entries: dict[str, object] = {name: value}
        if isinstance(value, dict):
            entries = {f"{name}/{key}": entry for key, entry in value.items()}
        elif isinstance(value, list):
            entries = {f"{name}/{number}": entry for number, entry in enumerate(value, 1)}
        for full, entry in entries.items():
            if isinstance(entry, int | float | str):  # not null: there is no such number
                yield full, entry


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
