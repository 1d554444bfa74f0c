"""Who waits for whom, in one line: for the watchdog, `why` and a person at 2 a.m.

What always holds: it only looks, and it may look at everything in flight, so nothing on the way of an event calls it.
"""

from collections.abc import Sequence
from heapq import nsmallest
from typing import Final

from areal_async.core import admission
from areal_async.core.fleet import Fleet, Server
from areal_async.core.ledger import Group, Ledger, Sample
from areal_async.core.parts import Parts
from areal_async.core.restarts import Restarted
from areal_async.core.trainer import Trainer

NAMED: Final = 3  # groups, samples or servers that are named before "and N more"


def explain(parts: Parts, now: float) -> str:
    """Such as "step 41 waits for group 1307 (floor 37, deadline 41) <- sample 1307.5 on server 2, for 40 s", and after
    it which servers and reward workers are not as they should be, and what that holds up. now: the run clock, of which
    the words give durations, since it means nothing to whoever reads them."""
    return "; ".join(
        [
            _trainer(parts, now),
            *_checkpoints(parts.trainer),
            *_servers(parts.fleet, now),
            *_workers(parts, now),
            *_looking(parts),
            *_held(parts),
            *_unchecked(parts),
        ]
    )


def _trainer(parts: Parts, now: float) -> str:
    rules, ledger, trainer = parts.rules, parts.ledger, parts.trainer
    long = _long(now - trainer.happenings[-1][0])
    match trainer.state:
        case "starting" if not trainer.branch:
            return "the run waits for the trainer's ranks to join"
        case "starting":
            return f"the trainer's ranks start with version {trainer.version}{long}; {_in_flight(ledger)}"
        case "lost":
            return f"{_restart(trainer, now)}, from {_source(trainer)}; {_in_flight(ledger)}"
        case "training":
            return f"the trainer trains step {trainer.version}{long}; {_in_flight(ledger)}"
        case "publishing":
            return f"the trainer publishes version {trainer.version}{long}; {_in_flight(ledger)}"
        case "checkpointing":
            return f"the trainer writes the checkpoint of version {trainer.version}{long}; {_in_flight(ledger)}"
    if trainer.version >= rules.steps:
        return f"the run waits for its last evaluation, of version {trainer.version}: {_evaluation(parts, now)}"
    step = f"step {trainer.version}"
    unready = [group for group in ledger.outstanding_groups() if group.state != "ready"]
    if ledger.ready >= rules.batch_groups:
        batch = {group.id for group in ledger.candidates()}
        stay = admission.blockers(ledger.outstanding_groups(), batch, step=ledger.step, rules=rules)
        return f"{step} waits for {_groups([group for group in stay if group.state != 'ready'], now)}"
    missing = rules.batch_groups - ledger.ready
    if unready:
        return f"{step} waits for {missing} more ready groups: {_groups(unready, now)}"
    return f"{step} waits for {missing} more ready groups, but none is running: {_no_group(parts, now)}"


def _source(trainer: Trainer) -> str:
    """What it begins with when it is started again."""
    version = trainer.returns[0]
    return f"the checkpoint of version {version}" if version > trainer.first else f"version {version}, the run's first"


def _checkpoints(trainer: Trainer) -> list[str]:
    failed, cause = trainer.failed_checkpoints, trainer.checkpoint_failure.partition("\n")[0]
    return [f"{failed} checkpoints in a row could not be written ({cause})"] if failed else []


def _in_flight(ledger: Ledger) -> str:
    return f"{ledger.in_flight} samples in flight, {ledger.ready} groups ready, {ledger.outstanding} outstanding"


def _no_group(parts: Parts, now: float) -> str:
    ledger, fleet = parts.ledger, parts.fleet
    if not parts.rewards.workers:
        return "the reward workers have yet to join"
    if not fleet.servers:
        return "no rollout server has joined"
    if parts.groups.data_ended:
        return f"the data ended; the run waits for its last evaluation: {_evaluation(parts, now)}"
    loading = [f"{server.label} ({server.state})" for server in fleet.servers.values() if server not in fleet.open]
    if not fleet.open:
        return f"no server holds version {fleet.newest} yet: {_some(loading)}"
    lowest = admission.lowest_floor(ledger.taken, ledger.rules)
    return f"a group needs a server of version {lowest} or newer, the newest holds {fleet.newest_open}"


def _evaluation(parts: Parts, now: float) -> str:
    under_way = parts.evaluations.under_way
    if under_way is not None:
        return f"{under_way.server.label} evaluates version {under_way.version}{_long(now - under_way.at)}"
    if parts.evaluations.wakeup is not None:
        return f"it failed and is tried again {_soon(parts.evaluations.wakeup - now)}"
    return "no server serves it yet"


def _servers(fleet: Fleet, now: float) -> list[str]:
    """What is wrong with each server, and which one is held back."""
    return [told for server in fleet.servers.values() if (told := _server(server, fleet, now))]


def _server(server: Server, fleet: Fleet, now: float) -> str:
    cause = server.why.partition("\n")[0]
    if server.state == "quarantined":
        after = f" after {server.restarts} restarts" if server.restarts else ""
        return f"{server.label} is left alone{after} ({cause})"
    if server.state == "lost":
        return _restart(server, now)
    if server.retry_at is not None:
        return f"{server.label} is swapped again {_soon(server.retry_at - now)}, {server.swap_failures} failed in a row"
    behind = fleet.newest is not None and server.version != fleet.newest
    if server.evaluating is not None and behind:
        return f"{server.label} gets version {fleet.newest} when version {server.evaluating} is evaluated"
    return ""


def _restart(lost: Restarted, now: float) -> str:
    """Of one that was lost and has not joined again."""
    cause = lost.why.partition("\n")[0]
    name = "the trainer" if isinstance(lost, Trainer) else lost.label
    if lost.restart_at is not None:
        return f"{name} is lost ({cause}) and starts again {_soon(lost.restart_at - now)}"
    return f"{name} starts again{_long(now - lost.since)}; it was lost ({cause})"


def _workers(parts: Parts, now: float) -> list[str]:
    return [_restart(worker, now) for worker in parts.rewards.workers.values() if worker.state != "working"]


def _unchecked(parts: Parts) -> list[str]:
    """Answers that nobody can check at present."""
    if not parts.rewards.none_works:
        return []
    count = sum(sample.state == "scoring" for group in parts.ledger.outstanding_groups() for sample in group.samples)
    return [f"the checks of {count} samples wait for a reward worker"] if count else []


def _looking(parts: Parts) -> list[str]:
    """Samples whose server was lost while no other holds their floor; their sessions wait for one."""
    newest = parts.fleet.newest_open
    floors = [
        group.floor
        for group in parts.ledger.outstanding_groups()
        if newest is None or group.floor > newest
        for sample in group.samples
        if sample.state == "running"
    ]
    return [f"{len(floors)} samples look for a server of version {min(floors)} or newer"] if floors else []


def _held(parts: Parts) -> list[str]:
    """Samples that ran when training went back, and may only go on with a version that is yet to come back."""
    floors = [
        group.floor for group in parts.ledger.outstanding_groups() for sample in group.samples if sample.state == "held"
    ]
    if not floors:
        return []
    return [f"{len(floors)} samples start again when a server holds version {min(floors)} or newer and has room"]


def _groups(groups: Sequence[Group], now: float) -> str:
    first = nsmallest(NAMED, groups, key=lambda group: (group.deadline, group.id))
    return _and_more([_group(group, now) for group in first], len(groups))


def _group(group: Group, now: float) -> str:
    if group.state == "admitted":
        awaited = f"its prompt (position {group.position})"
    else:
        open_ones = [sample for sample in group.samples if sample.state in ("running", "held", "scoring")]
        awaited = _and_more([_sample(sample, now) for sample in open_ones[:NAMED]], len(open_ones))
    return f"group {group.id} (floor {group.floor}, deadline {group.deadline}) <- {awaited}"


def _sample(sample: Sample, now: float) -> str:
    long = _long(now - sample.happenings[-1][0])
    if sample.state == "scoring":
        return f"the check of sample {sample.id}{long}"
    if sample.state == "held":
        return f"sample {sample.id}, held until a server has version {sample.group.floor}"
    attempt = f", attempt {sample.attempt}" if sample.attempt else ""
    return f"sample {sample.id} on server {sample.server}{attempt}{long}"


def _long(seconds: float) -> str:
    return f", for {duration(seconds)}"


def _soon(seconds: float) -> str:
    return f"in {duration(max(0.0, seconds))}"


def duration(seconds: float) -> str:
    """Such as "3.2 s", "4 min 10 s", "2 h 5 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _some(names: Sequence[str]) -> str:
    return _and_more(names[:NAMED], len(names))


def _and_more(names: Sequence[str], count: int) -> str:
    """These names, the first of `count`."""
    more = count - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
