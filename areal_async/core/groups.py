"""Groups and samples on their way from a prompt to `ready`: admission, attempts, rewards, filters, failures, endings.

What always holds: a group begins only where `admission` allows it; a sample has one attempt at a time, on a server that
holds at least its group's floor; whatever ends a group gives its place back in the same moment, and releases what has
arrived of it, since nothing asks for that again; what has an outcome is never generated again, also if training goes
back; events that are told twice, or of attempts that are over, change nothing.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Final

from areal_async.core import admission, shaping
from areal_async.core.fleet import Fleet, Server
from areal_async.core.ledger import Group, Ledger, Sample
from areal_async.core.lifecycle import Word
from areal_async.core.routing import least_loaded
from areal_async.errors import IllegalTransition
from areal_async.messages import (
    Cancel,
    DataEnded,
    Fail,
    Failed,
    Forget,
    GroupId,
    GroupRead,
    ReadGroup,
    Release,
    Rules,
    SampleDone,
    SampleId,
    Score,
    Scored,
    StartSample,
    Version,
)

ATTEMPT: Final = "attempt {} on server {}"
GroupCommand = ReadGroup | StartSample | Score | Cancel | Forget | Release | Fail


class Groups:
    """refused: groups whose prompt could not be used; they are among the failed ones."""

    def __init__(self, rules: Rules, ledger: Ledger, fleet: Fleet) -> None:
        self._rules = rules
        self._ledger = ledger
        self._fleet = fleet
        self._position = 0  # the next one that no group has had
        self._again: list[int] = []  # positions that get another group (after a rollback, or by `requeue`), a heap
        self._held: list[tuple[Version, GroupId]] = []  # floors of groups that may have held samples, a heap
        self._end: int | None = None  # the first position without a prompt
        self._failures = 0
        self._first_failure = ""
        self._filtered_in_a_row = 0
        self.refused = 0

    def admit(self, at: float) -> list[ReadGroup]:
        """As many groups as the staleness rule, the places for samples, the data and fairness between servers allow."""
        rules, ledger, fleet = self._rules, self._ledger, self._fleet
        commands: list[ReadGroup] = []
        while (
            ledger.in_flight + rules.group_size <= rules.max_concurrent
            and fleet.newest_open is not None
            and admission.capacity(fleet.newest_open, ledger.taken, rules) > 0
            and ledger.taken < rules.steps * rules.batch_groups  # more could never be trained
        ):
            server = least_loaded(fleet.open, admission.lowest_floor(ledger.taken, rules))
            if server is None or self.data_ended or fleet.is_ahead(server, rules.group_size, at):
                break
            group = ledger.admit(self._take_position(), server.id, server.incarnation, server.version, at)
            server.load += rules.group_size
            commands.append(ReadGroup(group=group.id, position=group.position))
        return commands

    @property
    def data_ended(self) -> bool:
        """Whether there is no prompt left that a new group could have."""
        return not self._again and self._end is not None and self._position >= self._end

    def read(self, event: GroupRead) -> list[GroupCommand]:
        group = self._ledger.find_group(event.group)
        if group is None or group.state != "admitted":
            return []  # cancelled, or told again
        self._ledger.move_group(
            group, "running", event.at, "row {}, prompt of {} tokens", event.row, event.prompt_tokens
        )
        self._replace(group)
        self._ledger.move_samples([group], "waiting", "running", event.at, ATTEMPT, 0, group.server)
        return [_start(sample) for sample in group.samples]

    def ended(self, event: DataEnded) -> list[GroupCommand]:
        group = self._ledger.find_group(event.group)
        if group is None:
            return []
        self._end = group.position if self._end is None else min(group.position, self._end)
        return self._close(group, "cancelled", event.at, "the data ended")

    def done(self, event: SampleDone) -> list[GroupCommand]:
        sample = self._ledger.find_sample(event.sample, event.attempt)
        if sample is None or sample.done is not None or sample.state == "failed":
            return []
        _expect(sample, "running", "its answer came")
        if event.loss_tokens and event.oldest < sample.group.floor:
            return [Fail(why=self._too_old(sample, event))]
        tokens = event.prompt_tokens + event.length
        if tokens > self._rules.max_tokens_per_microbatch:
            why = f"it has {tokens} tokens, train.max_tokens_per_microbatch is {self._rules.max_tokens_per_microbatch}"
            sample.has_come = True
            return self._failed(sample, event.at, why)
        sample.has_come = True
        if event.reward is not None:
            self._free(sample)
            sample.done = event
            return self._outcome(sample, event.reward, event.at, "given")
        self._ledger.move_sample(
            sample, "scoring", event.at, "{} tokens of versions {} to {}", event.length, event.oldest, event.newest
        )
        self._free(sample)
        sample.done = event
        return [Score(sample=sample.id, attempt=sample.attempt)]

    def scored(self, event: Scored) -> list[GroupCommand]:
        sample = self._ledger.find_sample(event.sample, event.attempt)
        if sample is None or (sample.done is not None and sample.state != "scoring"):
            return []
        _expect(sample, "scoring", "its check ended")
        return self._outcome(sample, event.reward, event.at, event.verdict)

    def sample_failed(self, event: Failed) -> list[GroupCommand]:
        sample = self._ledger.find_sample(event.id, event.attempt)
        if sample is None or sample.state == "failed":
            return []
        _expect(sample, "running", "its rollout failed")
        return self._failed(sample, event.at, event.why)

    def group_failed(self, event: Failed) -> list[GroupCommand]:
        """Its prompt can't be used."""
        group = self._ledger.find_group(int(event.id))
        if group is None:
            return []
        if group.state != "admitted":
            raise IllegalTransition(f"the prompt of {group.label} can't be refused, it was read:\n{group.story()}")
        self.refused += 1
        commands = self._close(group, "failed", event.at, "its prompt can't be used: {}", event.why)
        return commands + self._count_failure(group, f"its prompt can't be used: {event.why}")

    def cancel_unready(self, at: float, why: str) -> list[GroupCommand]:
        """Stop every group that is not ready yet."""
        commands: list[GroupCommand] = []
        for group in self._ledger.outstanding_groups():
            if group.state != "ready":
                commands += self._close(group, "cancelled", at, why)
        return commands

    def leave_running(self) -> list[Cancel]:
        """The run stops, and a resume may go on from here: work ends, the ledger stays as it is."""
        return [
            Cancel(sample=sample.id, attempt=sample.attempt)
            for group in self._ledger.outstanding_groups()
            for sample in group.samples
            if sample.state in ("running", "scoring")
        ]

    def roll_back(self, at: float, why: str) -> list[GroupCommand]:
        """Training goes back, so servers get other weights, perhaps below the floors of what they run: that ends.

        A group of which anything has an outcome is kept: its members that ran are held, and start again in another
        attempt. Of the others nothing would be saved; their prompts get new groups before any other.
        """
        commands: list[GroupCommand] = []
        for group in self._ledger.outstanding_groups():
            if group.state == "ready":
                continue
            if any(sample.state == "scored" for sample in group.samples):
                commands += self._hold(group, at, why)
            else:
                self._ask_again(group)
                commands += self._close(group, "cancelled", at, why)
        return commands

    def resume(self, rules: Rules) -> None:
        self._rules = rules
        self._filtered_in_a_row = 0

    def check_again(self) -> list[Score]:
        """Nobody of before checks anything any more."""
        return [
            Score(sample=sample.id, attempt=sample.attempt)
            for group in self._ledger.outstanding_groups()
            for sample in group.samples
            if sample.state == "scoring"
        ]

    def start_held(self, at: float) -> list[StartSample]:
        """Held samples whose floor a server holds again, the lowest first, as far as there are places for all of a
        group's.

        That moment comes: no floor is above the step that comes next, and the batches of all steps before it are
        there, so that training gets back to it whatever is held. And who has a place doesn't wait for who is held.
        """
        commands: list[StartSample] = []
        while self._held and self._held_may_start():
            group = self._ledger.groups.get(self._held[0][1])
            held = [sample for sample in group.samples if sample.state == "held"] if group is not None else []
            if self._ledger.in_flight + len(held) > self._rules.max_concurrent:
                break
            heappop(self._held)
            if group is not None and held:
                self._place(group, held)
                commands += [self._start_again(sample, at) for sample in held]
        return commands

    def stop_late(self, at: float) -> list[GroupCommand]:
        """After a step was handed over, where groups are dropped: stop those that no step may train any more."""
        if not admission.groups_are_dropped(self._rules):
            return []
        commands: list[GroupCommand] = []
        step = self._ledger.step
        for group in self._ledger.late():
            if self._rules.requeue:
                self._ask_again(group)
            commands += self._close(group, "stale", at, "step {} comes, its deadline was {}", step, group.deadline)
        return commands

    # ------------------------------------------------------------------------------------------------ one sample

    def _start_again(self, sample: Sample, at: float) -> StartSample:
        self._ledger.move_sample(sample, "running", at, ATTEMPT, sample.attempt, sample.server)
        return _start(sample)

    def _outcome(self, sample: Sample, reward: float | None, at: float, verdict: str) -> list[GroupCommand]:
        self._ledger.move_sample(sample, "scored", at, "{}, reward {}", verdict, reward)
        assert sample.done is not None, "what is not done has no outcome"
        sample.reward = shaping.usable(reward, sample.done, self._rules)
        group = sample.group
        group.open -= 1
        return [] if group.open else self._decide(group, at)

    def _failed(self, sample: Sample, at: float, why: str) -> list[GroupCommand]:
        """Another attempt, or the end of the sample, perhaps of its group, perhaps of the run."""
        self._free(sample)
        sample.failures += 1
        if sample.failures <= self._rules.retries:
            server = self._server_for(sample.group)
            sample.note(at, "attempt {} failed: {}", sample.attempt, why)
            sample.attempt += 1
            sample.server, sample.incarnation = server.id, server.incarnation
            server.load += 1
            return [self._start_again(sample, at)]
        self._ledger.move_sample(sample, "failed", at, "attempt {} failed: {}", sample.attempt, why)
        group = sample.group
        group.open -= 1
        group.lost += 1
        gone = _forget([sample.id]) if sample.has_come else []
        if self._rules.group_size - group.lost < self._rules.min_group:
            last = f"{sample.label} failed in each of its {sample.failures} attempts, the last time with: {why}"
            commands = self._close(group, "failed", at, "{}", last)
            return gone + commands + self._count_failure(group, last)
        return gone if group.open else gone + self._decide(group, at)

    def _free(self, sample: Sample) -> None:
        """Its server has room again."""
        self._fleet.leave(sample.server, sample.incarnation)

    def _server_for(self, group: Group) -> Server:
        """For an attempt that begins now. While no server holds the floor (those that did were lost) it is the group's
        own, and the attempt's session waits for any that does."""
        return least_loaded(self._fleet.open, group.floor) or self._fleet.servers[group.server]

    def _replace(self, group: Group) -> None:
        """If its server was lost while its prompt was read: another one, the same for all of its samples."""
        if self._fleet.servers[group.server].incarnation == group.incarnation:
            return
        self._place(group, group.samples)

    def _place(self, group: Group, samples: list[Sample]) -> None:
        """On one server, the same for all of these."""
        server = self._server_for(group)
        server.load += len(samples)
        group.server, group.incarnation = server.id, server.incarnation
        for sample in samples:
            sample.server, sample.incarnation = server.id, server.incarnation

    def _hold(self, group: Group, at: float, why: str) -> list[GroupCommand]:
        """What runs of it ends, and will start again; what is being checked goes on."""
        commands: list[GroupCommand] = []
        for sample in group.samples:
            if sample.state == "running":
                commands.append(Cancel(sample=sample.id, attempt=sample.attempt))
                self._free(sample)
                sample.attempt += 1
                self._ledger.move_sample(sample, "held", at, why)
        if commands:
            heappush(self._held, (group.floor, group.id))
        return commands

    def _held_may_start(self) -> bool:
        newest = self._fleet.newest_open
        return newest is not None and self._held[0][0] <= newest

    def _too_old(self, sample: Sample, event: SampleDone) -> str:
        return (
            f"{sample.label} came back with a token of version {event.oldest}, but its group may only have tokens of"
            f" version {sample.group.floor} or newer. {self._fleet.servers[sample.server].story()}\n"
            "The server, or who asked it, reports wrong versions: nothing that it says can be trained on."
            f" The sample's story:\n{sample.story()}"
        )

    # ------------------------------------------------------------------------------------------------- one group

    def _decide(self, group: Group, at: float) -> list[GroupCommand]:
        """All members have their outcome: it is ready, or it teaches nothing."""
        self._ledger.move_group(group, "scored", at)
        known = [(s.reward, s.done) for s in group.samples if s.reward is not None and s.done is not None]
        unwanted = shaping.unwanted(known, self._rules)
        if unwanted is not None:
            why, words = unwanted
            return self._filter(group, at, why, *words)
        self._filtered_in_a_row = 0
        self._ledger.move_group(group, "ready", at, "{} rewards", len(known))
        without: list[SampleId] = []
        for sample in group.samples:
            if sample.state != "scored" or sample.done is None:
                continue
            if sample.reward is None:
                self._ledger.move_sample(sample, "filtered", at, "no reward")
                without.append(sample.id)
            elif shaping.masked(sample.done, self._rules):  # its reward is wanted until the group is trained
                self._ledger.move_sample(sample, "filtered", at, "cut after {} tokens", sample.done.length)
        return _forget(without)

    def _filter(self, group: Group, at: float, why: str, *words: Word) -> list[GroupCommand]:
        self._filtered_in_a_row += 1
        commands = self._close(group, "filtered", at, why, *words)
        if self._filtered_in_a_row <= self._rules.max_filtered:
            return commands
        fail = Fail(
            why=f"{self._filtered_in_a_row} groups in a row were filtered, and rollout.max_filtered is"
            f" {self._rules.max_filtered}: nothing can be learned. The last one:\n{group.story()}\n"
            "Look at what the reward gives (`areal-async score`), at rollout.success_min, success_max and drop_equal,"
            " or raise rollout.max_filtered"
        )
        return [*commands, fail]

    def _close(self, group: Group, state: str, at: float, why: str, *words: Word) -> list[GroupCommand]:
        """The group is over without being trained: what runs is cancelled, what has arrived is forgotten."""
        fate = "cancelled" if state == "failed" else state
        commands: list[GroupCommand] = []
        arrived: list[SampleId] = []
        for sample in group.samples:
            if sample.state == "failed":
                continue
            if sample.state == "filtered":  # it has left already; forgotten is only what had no reward
                arrived += [sample.id] if sample.reward is not None else []
                continue
            if sample.state in ("running", "scoring"):
                commands.append(Cancel(sample=sample.id, attempt=sample.attempt))
            if sample.state in ("waiting", "running"):
                self._free(sample)
            if sample.has_come:
                arrived.append(sample.id)
            self._ledger.move_sample(sample, fate, at, why, *words)
        self._ledger.move_group(group, state, at, why, *words)
        self._ledger.drop([group])
        self._ledger.end([group])
        return commands + _forget(tuple(arrived))

    def _count_failure(self, group: Group, why: str) -> list[GroupCommand]:
        self._failures += 1
        if not self._first_failure:
            self._first_failure = f"{group.label} (position {group.position}): {why}\n{group.story()}"
        if self._failures <= self._rules.max_failures:
            return []
        fail = Fail(
            why=f"{self._failures} groups failed ({self.refused} of them for their prompt), and rollout.max_failures is"
            f" {self._rules.max_failures}. The first one was {self._first_failure}\n"
            "Repair the cause, or raise rollout.max_failures to go on without such groups"
        )
        return [fail]

    def _ask_again(self, group: Group) -> None:
        """Its prompt gets another group, before any new one."""
        heappush(self._again, group.position)

    def _take_position(self) -> int:
        if self._again:
            return heappop(self._again)
        self._position += 1
        return self._position - 1


def _start(sample: Sample) -> StartSample:
    group = sample.group
    return StartSample(
        sample=sample.id, attempt=sample.attempt, position=group.position, server=sample.server, floor=group.floor
    )


def _expect(sample: Sample, state: str, what: str) -> None:
    if sample.state != state:
        raise IllegalTransition(f"{what}, but {sample.label} is {sample.state}, not {state}:\n{sample.story()}")


def _forget(samples: Iterable[SampleId]) -> list[GroupCommand]:
    """They have left the ledger for good: neither memory nor disk need to have them any more."""
    names = tuple(samples)
    return [Forget(samples=names), Release(samples=names)] if names else []
