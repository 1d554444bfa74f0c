"""What an audit says in the end."""

import msgspec

from areal_async.audit.findings import Finding


class Prompts(msgspec.Struct, frozen=True):
    """positions: asked for, of the data order. asked_again: by another group. rows: different ones that were read, each
    at least read_least and at most read_most times. ended: where the data ended, None if they did not."""

    positions: int
    asked_again: int
    rows: int
    read_least: int
    read_most: int
    ended: int | None


class Step(msgspec.Struct, frozen=True):
    """One of the surviving history. samples: trained ones with a trained token. branch: the last that trained it."""

    step: int
    branch: int
    samples: int
    lag_max: int
    lag_mean: float


class Back(msgspec.Struct, frozen=True):
    """Training went back. from_version: what it was at. resumed: by a new controller."""

    at: float
    from_version: int
    to: int
    branch: int
    resumed: bool
    why: str


class Report(msgspec.Struct, frozen=True):
    """proven: no finding. records: of the decision log. seconds: run clock of the last event. groups, samples: how many
    ended how, or are outstanding. attempts: samples by how many were started. lags: trained samples by their lag.
    dead_steps: steps that were done on a branch and that training went back behind, by branch. retrained: steps of the
    surviving history that were trained more than once. payloads: references that were followed. after_end: events that
    came when the run was over. findings: the first ones; found: all of them, by name. torn, corrupt: of the log's end,
    "" where it is whole."""

    proven: bool
    records: int
    seconds: float
    rules: dict[str, int | str]
    prompts: Prompts
    groups: dict[str, int]
    samples: dict[str, int]
    attempts: dict[int, int]
    first_version: int
    version: int
    branch: int
    steps: list[Step]
    lags: dict[int, int]
    dead_steps: dict[int, int]
    backs: list[Back]
    checkpoints: list[int]
    checkpoints_made: int
    payloads: int
    payload_bytes: int
    after_end: int
    end: str
    torn: str
    corrupt: str
    found: dict[str, int]
    findings: list[Finding]
