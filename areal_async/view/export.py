"""`areal-async view RUN --export FILE`: a run as one file that opens anywhere: the page with all that it would ask for.

What always holds: the run isn't changed; the file asks no network for anything (`bundle`), is whole or isn't there, and
says of when it is; what of the run can't be read is told in it, and the rest is there.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote, urlencode

import msgspec

from areal_async import output_file
from areal_async.environment import environment
from areal_async.errors import ArealError, ConfigError
from areal_async.view import bundle
from areal_async.view.api import Lags, Overview, RunRow, SampleFull, SampleQuery, SampleRow
from areal_async.view.chosen import Chosen
from areal_async.view.curves import Row, branches
from areal_async.view.figures import FIGURES
from areal_async.view.files import INDEX, plotly_path
from areal_async.view.made_with import Made, in_words, made_with
from areal_async.view.place import scratch
from areal_async.view.run import NotThere, Run
from areal_async.view.runs import RunFolders
from areal_async.view.story import Stories
from areal_async.view.told import log_of

SAMPLES: Final = 12
SAMPLES_BYTES: Final = 1 << 22  # of all of them: long answers would make a file that nobody can send
TROUBLES: Final = 10  # whose stories are told
STORIES_S: Final = 15.0  # a story needs the whole log: those that take longer are left out
DIGITS: Final = 6  # of the numbers of a step: figures show five
LOGPROB_DIGITS: Final = 5
LAST_STEP: Final = (1 << 63) - 1
EVERY_S: Final = 0.05  # how often it is looked how far the log was read
UNQUOTED: Final = "!~*'()"  # by JavaScript's encodeURIComponent
UNUSED: Final = ("waited_for",)  # of a row: long, and nothing in the page shows it


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What report.js needs, and app.js. pages: that the file has. written: seconds since 1970. chosen, rows: of the
    samples in it. left_out: samples that would make it too large. lags: [step, tokens by lag, of unknown lag]. missing:
    why there are no texts. lives: what the run was made with. here: what wrote the file."""

    key: str
    pages: list[str]
    written: float
    folder: str
    command: str
    audit: str
    log_bytes: int
    samples: int
    chosen: list[Chosen]
    rows: list[SampleRow]
    left_out: list[str]
    lags: list[tuple[int, dict[int, int], int]]
    eta: int
    missing: str
    lives: list[Made]
    here: list[tuple[str, str]]
    versions_note: str


class Exported(NamedTuple):
    """samples: that are in the file, of so many; left_out: that were chosen, and are too long."""

    nbytes: int
    steps: int
    samples: int
    of: int
    left_out: int


class Opened(NamedTuple):
    """A run whose log was read up to its present end. overview: with all of its rows."""

    run: Run
    row: RunRow
    overview: Overview


@contextlib.asynccontextmanager
async def opened(folders: RunFolders, read: Callable[[float], None]) -> AsyncIterator[Opened]:
    """The one run of `folders`. read: is told which share of the log was read. Errors: ConfigError: it has several."""
    if not folders.single:
        raise ConfigError(f"command line: view: {folders.path}: holds several runs; name one of them for a report")
    row = (await folders.rows()).runs[0]
    folder = folders.folder(row.key)
    assert folder is not None, "a single run is always there"
    with scratch() as place:
        run = Run(folder, row.key, place / "run.sqlite", Stories())
        reading = asyncio.create_task(run.follow(), name=f"reads {folder}")
        try:
            yield Opened(run, row, await _whole(run, read))
        finally:
            reading.cancel()
            await asyncio.wait({reading})
            run.close()


async def _whole(run: Run, read: Callable[[float], None]) -> Overview:
    """With all rows that there are, once the log was read up to its end."""
    rows: list[msgspec.Raw] = []
    while True:
        overview = await run.overview(len(rows))
        rows += overview.rows
        if not overview.rows:
            read(overview.reading.nbytes / max(1, overview.reading.of))
            if overview.reading.done:
                return msgspec.structs.replace(overview, rows=rows, next=len(rows))
            await asyncio.sleep(EVERY_S)


async def export(
    folders: RunFolders, out: Path, wanted: int | Sequence[str], read: Callable[[float], None] = lambda share: None
) -> Exported:
    """wanted: how many samples, or which. Errors: ConfigError: no such sample; ArealError: it can't be written."""
    async with opened(folders, read) as found:
        made = await _collect(found, wanted)
    text = bundle.page(*_files(), plotly_path().read_text(encoding="utf-8"), made.data, ["report.js"])
    nbytes = write(out, text.encode())
    return Exported(
        nbytes, len(found.overview.rows), len(made.report.chosen), made.report.samples, len(made.report.left_out)
    )


async def picture(folders: RunFolders, out: Path, read: Callable[[float], None] = lambda share: None) -> int:
    """The main curves, PNG or SVG by the name's end; its length. Errors: as `export`."""
    from areal_async.view.picture import Shown, draw

    async with opened(folders, read) as (run, row, overview):
        lags = None
        with contextlib.suppress(ArealError):  # of a log that can't be read: the other curves are there
            lags = await run.lags(0, LAST_STEP)
    rows: list[Row] = [msgspec.json.decode(each) for each in overview.rows]
    name = row.name if row.name in row.key else f"{row.name} ({row.key})"
    end = f", {row.end}" if row.end else ""
    title = f"{name}: step {row.version} of {row.steps}, {row.seconds:,.0f} s, {row.state}{end.replace('_', ' ')}"
    shown = Shown(title, branches(rows, overview.branch, row.version), overview.evaluations, lags)
    return write(out, draw([figure for figure in FIGURES if figure.main], shown, out.suffix.removeprefix(".")))


def write(path: Path, data: bytes) -> int:
    """A file that is whole or isn't there; its length. Errors: ArealError."""
    with output_file.whole(path) as file:
        file.write(data)
    return len(data)


def _files() -> tuple[str, dict[str, str]]:
    """index.html, and the styles and scripts beside it."""
    entries = {entry.name: entry for entry in resources.files("areal_async.view").joinpath("static").iterdir()}
    texts = {
        name: entry.read_text(encoding="utf-8") for name, entry in entries.items() if name.endswith((".js", ".css"))
    }
    return entries[INDEX].read_text(encoding="utf-8"), texts


# -------------------------------------------------------------------------------------------------------- what is in it


class _Collected(NamedTuple):
    """data: by address, what the page would ask for."""

    data: dict[str, object]
    report: Report


async def _collect(found: Opened, wanted: int | Sequence[str]) -> _Collected:
    run, row, overview = found
    base = f"/api/runs/{quote(row.key, safe=UNQUOTED)}"
    data: dict[str, object] = {
        "/api/runs": {"runs": [row], "single": True},
        "/api/figures": FIGURES,
        f"{base}/overview": msgspec.structs.replace(overview, rows=[thin(each) for each in overview.rows]),
    }
    pages = ["overview", "samples", "report"]
    with contextlib.suppress(NotThere):
        data[f"{base}/config"] = run.config()
        pages.insert(2, "config")
    samples = await _samples(run, wanted)
    for name, full in samples.full.items():
        data[f"{base}/samples/{name}"] = full
    things = [trouble.thing for trouble in reversed(overview.troubles) if trouble.thing]
    things = [*list(dict.fromkeys(things))[:TROUBLES], *(f"sample {name}" for name in samples.full)]
    for thing, story in (await _stories(run, things)).items():
        data[f"{base}/story?{urlencode({'id': thing})}"] = story
    lags, eta = await _lags(run, overview)
    data["/report"] = report = _report(found, pages, samples, lags, eta)
    return _Collected(data, report)


def _report(
    found: Opened, pages: list[str], samples: "_Samples", lags: list[tuple[int, dict[int, int], int]], eta: int
) -> Report:
    run, row, overview = found
    lives = made_with(run.folder, log_of(run.folder))
    recorded = {name for each in lives for name, _ in each.facts}
    return Report(
        key=row.key,
        pages=pages,
        written=time.time(),
        folder=str(run.folder.resolve()),
        command=f"areal-async view {run.folder}",
        audit=f"areal-async audit {run.folder}",
        log_bytes=overview.reading.of,
        samples=overview.reading.samples,
        chosen=[each for each in samples.chosen if each.id in samples.full],
        rows=samples.rows,
        left_out=[each.id for each in samples.chosen if each.id not in samples.full],
        lags=lags,
        eta=eta,
        missing=samples.missing,
        lives=lives,
        here=in_words({**environment(), "plotly": metadata.version("plotly")}),
        versions_note="" if "torch" in recorded else "More isn't in its log: an older areal-async wrote it.",
    )


class _Samples(NamedTuple):
    chosen: list[Chosen]
    rows: list[SampleRow]
    full: dict[str, object]
    missing: str


async def _samples(run: Run, wanted: int | Sequence[str]) -> _Samples:
    """As many as fit."""
    try:
        chosen = await run.chosen(wanted)
    except ConfigError:
        raise  # there is no such sample
    except ArealError as error:
        return _Samples([], [], {}, str(error))
    rows: list[SampleRow] = []
    full: dict[str, object] = {}
    nbytes = 0
    for each in chosen:
        sample = await run.sample(each.id)
        short = brief(sample)
        nbytes += len(msgspec.json.encode(short))
        if nbytes > SAMPLES_BYTES:
            break
        full[each.id] = short
        rows += [member for member in sample.members if member.id == each.id]
    texts = await run.samples(SampleQuery(limit=1))
    return _Samples(chosen, rows, full, texts.missing)


async def _stories(run: Run, things: Sequence[str]) -> dict[str, object]:
    """Those that can be told in time."""
    told: dict[str, object] = {}

    async def tell(thing: str) -> None:
        with contextlib.suppress(ArealError):
            told[thing] = await run.story(thing)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STORIES_S):
            await asyncio.gather(*map(tell, things))
    return told


async def _lags(run: Run, overview: Overview) -> tuple[list[tuple[int, dict[int, int], int]], int]:
    """Of each step by itself, since any of them may be looked at; and η."""
    steps = sorted({msgspec.json.decode(row, type=_Step).step for row in overview.rows})
    found, eta = [], 0
    with contextlib.suppress(ArealError):  # of a log that can't be read, which the overview tells
        for step in steps:
            lags: Lags = await run.lags(step, step + 1)
            found.append((step, lags.tokens, lags.unknown))
            eta = lags.eta
    return found, eta


class _Step(msgspec.Struct):
    step: int


# ------------------------------------------------------------------------------------------------------- fewer digits


def thin(row: msgspec.Raw) -> dict[str, object]:
    """A line of metrics.jsonl, as far as the page draws it."""
    read: dict[str, object] = msgspec.json.decode(row)
    return {name: rounded(value, DIGITS) for name, value in read.items() if name not in UNUSED}


def brief(sample: SampleFull) -> object:
    """A sample whose log-probabilities have the digits that are shown."""
    record = msgspec.structs.replace(sample.record, logprobs=rounded(sample.record.logprobs, LOGPROB_DIGITS))
    return msgspec.structs.replace(sample, record=record, prox=rounded(sample.prox, LOGPROB_DIGITS))


def rounded(value: object, digits: int) -> object:
    """Floats in it have so many significant digits."""
    match value:
        case float():
            return float(f"{value:.{digits}g}")
        case list() | tuple():
            return [rounded(each, digits) for each in value]
        case dict():
            return {key: rounded(each, digits) for key, each in value.items()}
    return value
