"""What the page asks the view's server for, and what it gets: the structs that both sides agree on, sent as JSON.

    GET /                                       the page; /static/… its files, plotly.min.js of the package plotly
    GET /api/runs                               Runs
    GET /api/figures                            [Figure]: what the overview draws, the same for all runs
    GET /api/runs/{run}/overview?since=N        Overview; rows from line N of metrics.jsonl on
    GET /api/runs/{run}/lags?from=A&to=B        Lags: of trained tokens of the steps A … B - 1
    GET /api/runs/{run}/timeline?from=&to=&width=&open=   Timeline: seconds of the run clock, pixels; open: groups
                                                whose slots are wanted, with commas; without it those that are few
    GET /api/runs/{run}/story?id=THING          Story
    GET /api/runs/{run}/samples?…               SamplePage; the filters are the fields of `SampleQuery`
    GET /api/runs/{run}/samples/{id}            SampleFull
    GET /api/runs/{run}/peers                   Peers
    GET /api/runs/{run}/config                  text/plain: its config.yaml, and behind it those before a resume

{run}: `RunRow.key`. Errors: JSON {"error": "one line: what, where, what to do"} with status 400 (the question is
wrong), 401 (no token), 404 (there is no such thing) or 500.

What always holds: times are seconds of the run clock unless they are named otherwise; a number that JSON doesn't have
(NaN, infinite) is sent as null; texts of models are sent as they are, and it is the page that shows them as text alone.
"""

from typing import Literal, TypeAlias

import msgspec

from areal_async.messages import GroupId, SampleId, Version
from areal_async.trace.life import Outcome
from areal_async.trace.samples import SampleRecord

RunState: TypeAlias = Literal["starting", "running", "silent", "ended", "died", "unreadable"]
"""silent: its process lives, and it has told nothing for 10 s. died: it has told no end, and its process is gone (or is
on another host and silent). unreadable: `RunRow.problem` says why."""


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run in the list. key: in addresses (its folder's name). began: seconds since 1970, None where nobody knows.
    steps: that the configuration asks for, 0 where it isn't known. reward: of the newest step. end: how it ended, in
    words. problem: what is wrong with the folder, "" if nothing."""

    key: str
    name: str
    folder: str
    state: RunState
    began: float | None
    seconds: float
    version: Version
    steps: int
    reward: float | None
    end: str = ""
    problem: str = ""


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """single: the page was opened for one run, not for a folder of runs."""

    runs: list[RunRow]
    single: bool


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a figure. field: of `metrics.jsonl`; "verdicts/right" is an entry of a field that has several, and
    "verdicts/*" all of its entries. stacked: on the others of the figure. per: the field by which it is divided (tokens
    a second), "" for none."""

    field: str
    label: str
    stacked: bool = False
    per: str = ""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """about: what it shows, with the denominator. unit: of the axis, "" for none; "%": the values are shares in 0..1,
    and shown as percent. range: of the axis, None: as the values are. kind: lags is a histogram of `Lags`; busy are the
    four parts of `figures.busy_parts`, stacked to 100 %. log: the axis is logarithmic. main: it belongs to the few that
    come first."""

    key: str
    title: str
    unit: str
    about: str
    series: list[Series]
    kind: Literal["lines", "lags", "busy"] = "lines"
    range: tuple[float, float] | None = None
    log: bool = False
    main: bool = False


class EvaluationPoint(msgspec.Struct, frozen=True, kw_only=True):
    """version: that was evaluated. time_s: when it was done. score: mean reward. pass_at: by k."""

    version: Version
    time_s: float
    score: float
    pass_at: dict[int, float]


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Something that went wrong. what: as the log calls it (lost, failed, fail, rolled_back, verdict …). thing: id for
    a `Story`, "" if it has none. text: in one line."""

    at: float
    what: str
    thing: str
    text: str


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How far the log was read: bytes of decisions.log, records, samples. done: up to its present end. problem: why no
    more can be read (a torn end of a run that is over, a record of a newer version, damage), "" if all is well."""

    nbytes: int
    of: int
    events: int
    samples: int
    done: bool
    problem: str = ""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """rows: lines of metrics.jsonl as they are, from `since` on; next: the `since` of the next question. file: another
    one where another file has taken its place, and what was had of it is of no use. branch: where
    it has grown, earlier rows of the same step are of an abandoned branch (a later row of a step replaces them). waits:
    who waits for whom now, from the outermost on. phase: what the run does besides training. balance: of groups, and of
    samples (`samples_…`); each adds up to `admitted`. troubles: the newest last. problems: of the folder's files, for
    people, one line each."""

    run: RunRow
    branch: int
    rows: list[msgspec.Raw]
    next: int
    file: str
    evaluations: list[EvaluationPoint]
    waits: list[str]
    phase: str
    in_flight: int
    ready: int
    balance: dict[str, int]
    troubles: list[Trouble]
    reading: Reading
    problems: list[str]


class Lags(msgspec.Struct, frozen=True, kw_only=True):
    """tokens: trained tokens by lag in steps. eta: `max_staleness`. unknown: tokens of several versions whose arrays
    were removed before they were read, so that nobody knows their lags any more."""

    tokens: dict[int, int]
    eta: int
    unknown: int = 0


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """group: prompts, trainer, weights, server 0 …, rewards, in the order in which they are shown. kind: a state lane
    has one thing at a time; a load lane tells how many things of its group went on at a time (`Timeline.loads`); a slot
    is one of the places in which these lie, one after another. slots: of a load lane: how many there are."""

    lane: int
    group: str
    name: str
    kind: Literal["state", "load", "slot"] = "state"
    slots: int = 0


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """What was there between `begin` and `end`.

    spans: [lane, begin, end, kind, name, thing, count]; kind: an index into `kinds`, of which a later one is drawn over
    an earlier; thing: id for a `Story`, or ""; count: of spans that are drawn as one, since they are shorter than a
    pixel (1: it is a span itself). loads: [lane, values]: how many things of a
    group went on at a time, on average, in equal parts of begin … end. pixel: seconds; larger than was asked for where
    slots would have too many spans. marks: [at, name]: moments that concern all lanes. seconds: of the whole run.
    total: spans of the whole run.
    """

    begin: float
    end: float
    seconds: float
    total: int
    lanes: list[Lane]
    kinds: list[str]
    spans: list[tuple[int, float, float, int, str, str, int]]
    loads: list[tuple[int, list[float]]]
    pixel: float
    marks: list[tuple[float, str]]
    reading: Reading


class StoryLine(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    text: str


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """thing: as people call it. lines: what happened to it, in order."""

    thing: str
    lines: list[StoryLine]


class SampleQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Filters and order; None and "" are all. step: that trained them. *_min, *_max: inclusive. lag: step minus the
    oldest token's version. versions_min: different versions in one answer. truncated: cut at the token limit. text:
    is contained in prompt or answer, in any case. server: where it was placed. group: of it. sort: a column of
    `SampleRow`."""

    step: int | None = None
    verdict: str = ""
    outcome: str = ""
    reward_min: float | None = None
    reward_max: float | None = None
    lag_min: int | None = None
    lag_max: int | None = None
    length_min: int | None = None
    length_max: int | None = None
    versions_min: int | None = None
    version: int | None = None
    truncated: bool | None = None
    server: str = ""
    group: int | None = None
    text: str = ""
    sort: str = "at"
    descending: bool = True
    limit: int = 50
    offset: int = 0


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """A sample in the table. at: its answer had come. versions: how many different ones its tokens have. start: the
    first 120 characters of the answer, "" where there is no text."""

    id: SampleId
    group: GroupId
    at: float
    outcome: Outcome
    step: int | None
    verdict: str | None
    reward: float | None
    advantage: float | None
    lag: int | None
    length: int
    prompt_tokens: int
    oldest: Version
    newest: Version
    versions: int
    truncated: bool
    server: str
    start: str


class SamplePage(msgspec.Struct, frozen=True, kw_only=True):
    """total: that the filters leave. took_ms: of the search. missing: why there are no texts to search in, or ""."""

    rows: list[SampleRow]
    total: int
    took_ms: float
    missing: str
    reading: Reading


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What the check said. why: its reason. extracted: what it took as the answer. seconds: of the check."""

    verdict: str
    reward: float | None
    why: str
    extracted: str
    seconds: float


class SampleFull(msgspec.Struct, frozen=True, kw_only=True):
    """One sample. tokens: the text of each response token, so that they join to the answer; None without a tokenizer or
    arrays (`record.missing` and `missing` say why). prox: log π_prox of each response token, None where it wasn't kept;
    the ratio π_prox/π_behav follows. checks: the newest last. members: the whole group, this one included. columns:
    those of the data row (for code its tests), as text. missing: what of this can't be shown, and why, one line each.
    """

    record: SampleRecord
    prompt_tokens: list[str] | None
    tokens: list[str] | None
    prox: list[float | None] | None
    checks: list[Check]
    members: list[SampleRow]
    columns: dict[str, str]
    missing: list[str]


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A server, a reward worker or the trainer. thing: id for a `Story`. load: samples placed there. running, waiting:
    requests in the engine; cache: share of the KV cache in use; None where the engine can't be asked. verdicts: of
    checks, by verdict (reward workers all together, at the first one). pid, cpu_s, resident: of its processes on this
    host. stderr: the last lines of its file."""

    label: str
    thing: str
    kind: Literal["server", "worker", "trainer"]
    state: str
    since: float
    version: Version | None = None
    load: int | None = None
    running: int | None = None
    waiting: int | None = None
    cache: float | None = None
    restarts: int = 0
    why: str = ""
    pid: int | None = None
    cpu_s: float | None = None
    resident: int | None = None
    stderr: list[str] = []


class Peers(msgspec.Struct, frozen=True, kw_only=True):
    """at: run clock of what is told. verdicts: of all checks whose end is in the log, as far as it was read (also those
    that were made again, and those of samples that came to nothing: the table of samples may have fewer), by verdict;
    None: no log was read."""

    at: float
    peers: list[PeerRow]
    verdicts: dict[str, int] | None
    problem: str = ""
