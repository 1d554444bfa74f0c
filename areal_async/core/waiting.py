"""Who waits for whom, in one line: for the watchdog, `why` and a person at 2 a.m.

What always holds: it only looks, and it may look at everything in flight, so nothing on the way of an event calls it.
"""

from collections.abc import Sequence
from typing import Final

from areal_async.core import admission
from areal_async.core.fleet import Fleet
from areal_async.core.groups import Groups
from areal_async.core.ledger import Group, Ledger, Sample
from areal_async.core.trainer import Trainer
from areal_async.messages import Rules

NAMED: Final = 3  # groups, samples or servers that are named before "and N more"


def explain(rules: Rules, ledger: Ledger, fleet: Fleet, trainer: Trainer, groups: Groups, *, rewards: bool) -> str:
    """Such as "step 41 waits for group 1307 (floor 37, deadline 41) <- sample 1307.5 on server 2"."""
    if trainer.state == "starting":
        return "the run waits for the trainer's ranks to join"
    since = trainer.happenings[-1][0]
    if trainer.state == "training":
        return f"the trainer trains step {trainer.version} since {since:.1f} s; {_in_flight(ledger)}"
    if trainer.state == "publishing":
        return f"the trainer publishes version {trainer.version} since {since:.1f} s; {_in_flight(ledger)}"
    step = f"step {trainer.version}"
    unready = [group for group in ledger.outstanding_groups() if group.state != "ready"]
    if ledger.ready >= rules.batch_groups:
        batch = {group.id for group in ledger.candidates()}
        stay = admission.blockers(ledger.outstanding_groups(), batch, step=ledger.step, rules=rules)
        return f"{step} waits for {_groups([group for group in stay if group.state != 'ready'])}"
    missing = rules.batch_groups - ledger.ready
    if unready:
        return f"{step} waits for {missing} more ready groups: {_groups(unready)}"
    why = _no_group(ledger, fleet, groups, rewards)
    return f"{step} waits for {missing} more ready groups, but none is running: {why}"


def _in_flight(ledger: Ledger) -> str:
    return f"{ledger.in_flight} samples in flight, {ledger.ready} groups ready, {ledger.outstanding} outstanding"


def _no_group(ledger: Ledger, fleet: Fleet, groups: Groups, rewards: bool) -> str:
    if not rewards:
        return "the reward workers have yet to join"
    if not fleet.servers:
        return "no rollout server has joined"
    if groups.data_ended:
        return "the data ended"
    loading = [f"{server.label} ({server.state})" for server in fleet.servers.values() if server not in fleet.open]
    if not fleet.open:
        return f"no server holds version {fleet.newest} yet: {_some(loading)}"
    lowest = admission.lowest_floor(ledger.taken, ledger.rules)
    return f"a group needs a server of version {lowest} or newer, the newest holds {fleet.newest_open}"


def _groups(groups: Sequence[Group]) -> str:
    first = sorted(groups, key=lambda group: (group.deadline, group.id))
    return _some([_group(group) for group in first])


def _group(group: Group) -> str:
    if group.state == "admitted":
        awaited = f"its prompt (position {group.position})"
    else:
        awaited = _some([_sample(sample) for sample in group.samples if sample.state in ("running", "scoring")])
    return f"group {group.id} (floor {group.floor}, deadline {group.deadline}) <- {awaited}"


def _sample(sample: Sample) -> str:
    if sample.state == "scoring":
        return f"the check of sample {sample.id}"
    attempt = f", attempt {sample.attempt}" if sample.attempt else ""
    return f"sample {sample.id} on server {sample.server}{attempt}"


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
