"""What went wrong in a run, as its log tells it: losses, failures, checks without a verdict, steps back.

What always holds: each trouble has one line; those of a kind that may come by the thousands (attempts and checks that
fail for the same reason) share one, which says how many they are by now and which was the first. `thing` is an id that
`areal-async trace --story` understands, or "".
"""

import re
import sqlite3
from typing import Final

from areal_async.log.turns import Turn
from areal_async.messages import AnyEvent, Fail, Failed, Lost, RolledBack, Scored, StepDone
from areal_async.trace.words import first_line
from areal_async.view.api import Trouble

NO_VERDICT: Final = ("crash", "timeout", "infrastructure", "bad_data")  # verdicts that say nothing of the answer
_MANY: Final = ("sample", "group", "evaluation", "publish", "checkpoint", "swap")  # `Failed.of` that share a line
_SAYS_WHERE: Final = re.compile(r"^sample \S+, attempt \d+, on [^:\n]*: ")  # it would make equal reasons differ
_ADD: Final = """
INSERT INTO troubles (at, what, thing, text, same, times) VALUES (?, ?, ?, ?, ?, 1)
ON CONFLICT (same) DO UPDATE SET at = excluded.at, times = times + 1
"""


def note_troubles(database: sqlite3.Connection, turn: Turn) -> None:
    _note_event(database, turn.event)
    for command in turn.commands:
        if isinstance(command, Fail):
            _add(database, turn.event.at, "fail", "", f"the run fails: {first_line(command.why)}")


def note_damage(database: sqlite3.Connection, at: float, sample: str, why: str) -> None:
    """Of the log itself."""
    _add(database, at, "damage", sample, first_line(why), same="damage")


def newest_troubles(database: sqlite3.Connection, most: int) -> list[Trouble]:
    """The newest of them, the newest last."""
    rows = database.execute(
        "SELECT at, what, thing, text, times FROM troubles ORDER BY at DESC, id DESC LIMIT ?", (most,)
    ).fetchall()
    return [
        Trouble(at=at, what=what, thing=thing, text=text if times == 1 else f"{text}; {times:,} times by now")
        for at, what, thing, text, times in reversed(rows)
    ]


def _note_event(database: sqlite3.Connection, event: AnyEvent) -> None:
    match event:
        case Lost():
            label = {"server": f"server {event.id}", "rewards": f"reward worker {event.id}"}.get(event.peer, "trainer")
            thing = {"server": f"server {event.id}", "rewards": event.id}.get(event.peer, "trainer")
            _add(database, event.at, "lost", thing, f"{label} is lost: {first_line(event.why)}")
        case Failed():
            _note_failure(database, event)
        case RolledBack():
            who = "the run is resumed" if event.resumed is not None else "the trainer was lost"
            text = f"training goes back to version {event.to} ({who}): {first_line(event.why)}"
            _add(database, event.at, "rolled_back", "trainer", text)
        case Scored(verdict=verdict) if verdict in NO_VERDICT:
            text = f"a check ends with {verdict}, first that of sample {event.sample}"
            _add(database, event.at, verdict, event.sample, text, same=f"verdict {verdict}")
        case StepDone(skipped=why) if why:
            text = f"step {event.step}: its update was left out: {first_line(why)}"
            _add(database, event.at, "skipped", f"step {event.step}", text)


def _note_failure(database: sqlite3.Connection, event: Failed) -> None:
    why = first_line(event.why)
    match event.of:
        case "sample":
            why = first_line(_SAYS_WHERE.sub("", event.why))
            thing, text = event.id, f"sample {event.id}, attempt {event.attempt} failed: {why}"
        case "group":
            thing, text = event.id, f"the prompt of group {event.id} can't be used: {why}"
        case "server":
            thing, text = f"server {event.id}", f"server {event.id} is left alone for good: {why}"
        case "swap":
            thing, text = f"server {event.id}", f"server {event.id} keeps its weights, a swap failed: {why}"
        case "train":
            thing, text = f"step {event.id}", f"step {event.id} failed: {why}"
        case "evaluation":
            thing, text = "", f"the evaluation of version {event.id} failed: {why}"
        case of:
            thing, text = "trainer", f"{of} of version {event.id} failed: {why}"
    what = "quarantined" if event.of == "server" else "failed"
    place = event.id if event.of == "swap" else ""
    same = f"{event.of} {place} {why}" if event.of in _MANY else None
    _add(database, event.at, what, thing, text, same=same)


def _add(database: sqlite3.Connection, at: float, what: str, thing: str, text: str, *, same: str | None = None) -> None:
    database.execute(_ADD, (at, what, thing, text, same))
