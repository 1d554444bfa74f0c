"""How long the view's timeline takes to answer: python tools/bench/timeline.py [SPANS …]

A run of 128 servers with up to 64 samples each, and one of a single server with 192, is drawn into a table, as
`areal_async.view.index` does it; then the whole of it, a part, and a part with all slots are asked for, 1,200 pixels
wide and three screens at once, as the page does. Each question 5 times: the slowest, in CPU time of the one thread.
"""

import random
import resource
import sqlite3
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from areal_async.log.turns import read_turns
from areal_async.trace.drawing import Drawing
from areal_async.view import api, tables
from areal_async.view.spans import SpanTable
from areal_async.view.timeline import look

SIZES: Final = (100_000, 1_000_000)
RUNS: Final = ((1, 192), (128, 64))  # servers, samples at a time on each
TIMES: Final = 5
SCREENS: Final = 3 * 1200
US: Final = 1_000_000
LOG: Final = Path(__file__).resolve().parents[2] / "tests" / "logs" / "drop-requeue-gone-back"
READING: Final = api.Reading(nbytes=0, of=0, events=0, samples=0, done=True)


def drawn(database: sqlite3.Connection, spans: int, servers: int, slots: int) -> tuple[SpanTable, Drawing, float]:
    """Nine in ten are samples' stays, the others serving and swapping. Also seconds that a span took."""
    recorded = read_turns(LOG)
    assert recorded is not None
    table = SpanTable(database)
    drawing = Drawing(table, recorded.rules, lambda sample: False, None)
    chance = random.Random(1)
    lanes = []
    for server in range(servers):
        table.process(f"server {server}", 10 + server)
        lanes.append(table.lane(f"server {server}", "state"))
    places = [table.lane(f"server {server}", f"samples {n + 1}") for server in range(servers) for n in range(slots)]
    free = dict.fromkeys((*lanes, *places), 0)
    begun = time.process_time()
    stays = spans * 9 // 10
    for number in range(stays):
        lane = places[number % len(places)]
        begin = free[lane] + chance.randrange(1, US // 2)
        free[lane] = end = begin + chance.randrange(US // 10, 8 * US)
        table.span(lane, f"{number // 8}.{number % 8}", begin, end, {"fate": "handed to training"})
    length = max(free.values())
    for number in range(spans - stays):
        lane = lanes[number % servers]
        begin = free[lane]
        free[lane] = end = begin + max(1, length * servers // (spans - stays))
        table.span(lane, f"serving v{number}" if number % 2 else f"swapping to v{number}", begin, end, {})
    drawing.now = length
    return table, drawing, (time.process_time() - begun) / spans


def main(sizes: tuple[int, ...]) -> None:
    for size in sizes:
        for servers, slots in RUNS:
            with TemporaryDirectory() as folder:
                table, drawing, each = drawn(tables.open_database(Path(folder) / "t.sqlite"), size, servers, slots)
                print(f"{size:,} spans on {servers} servers with {slots} slots: {each * 1e6:.1f} µs a span to keep")
                whole = drawing.now / US
                everything = [f"server {n}" for n in range(servers)]
                for what, begin, end, opened in (
                    ("the whole run", 0.0, 1e12, None),
                    ("a tenth of it", whole * 0.4, whole * 0.5, None),
                    ("the whole run, one server's slots", 0.0, 1e12, ["server 0"]),
                    ("the whole run, all slots", 0.0, 1e12, everything),
                    ("30 s of it, all slots", whole / 2, whole / 2 + 30, everything),
                ):
                    slowest = 0.0
                    for _ in range(TIMES):
                        began = time.process_time()
                        answer = look(table, drawing, READING, begin, end, SCREENS, opened)
                        slowest = max(slowest, time.process_time() - began)
                    nbytes = len(msgspec.json.encode(answer))
                    print(f"  {what:36} {slowest * 1e3:7.1f} ms  {len(answer.spans):5} spans  {nbytes / 1e3:7.0f} kB")
    print(f"most memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


main(tuple(int(text.replace(",", "")) for text in sys.argv[1:]) or SIZES)
