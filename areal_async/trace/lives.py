"""The lives of groups and samples, as a log tells them: what was commanded, what came back, what became of each.

What always holds: it follows the recorded events and commands and the rules; no core is asked, so a log of any version
can be looked into. Memory follows what is outstanding, and what training may still go back to: a group leaves when its
life is over for good (`Lives.take` gives it back then).

A life that is told (`told`) also leaves its happenings in words, as `Happening`s.
"""

from collections.abc import Iterator, Sequence

from areal_async.core import admission, shaping
from areal_async.log.format import PayloadRef
from areal_async.log.turns import Turn
from areal_async.messages import (
    AnyCommand,
    Cancel,
    DataEnded,
    Fail,
    Failed,
    Finish,
    Forget,
    GroupId,
    GroupRead,
    Joined,
    Lost,
    Note,
    ReadGroup,
    Release,
    RolledBack,
    Rules,
    SampleDone,
    SampleId,
    Score,
    Scored,
    StartSample,
    StepDone,
    Swapped,
    Train,
    Version,
    group_of,
    sample_id,
)
from areal_async.trace.life import OVER, GroupLife, GroupState, Happening, SampleLife, noted
from areal_async.trace.things import Thing
from areal_async.trace.words import count, first_line, long, number, versions


class Lives:
    """rules: the newest. groups: those whose life isn't over. servers: which version each holds. version, branch: of
    the trainer's weights. admitted: groups so far. step: the next one to be formed. happenings: of `told`."""

    def __init__(self, rules: Rules, told: Thing | None = None) -> None:
        self.rules = rules
        self.groups: dict[GroupId, GroupLife] = {}
        self.servers: dict[str, Version] = {}
        self.version: Version = 0
        self.branch = 0
        self.admitted = 0
        self.step = 0
        self.happenings: list[Happening] = []
        self._steps: dict[int, tuple[GroupId, ...]] = {}  # of steps that training may go back to
        self._has_joined = False
        self._over = ""
        self._event = -1
        self._at = 0.0
        self._cause = ""  # why this turn's event ends what it ends
        self._leaving: dict[GroupId, GroupLife] = {}
        self._told = told
        self._told_group = -1 if told is None or told.kind not in ("group", "sample") else int(told.name.split(".")[0])
        self._positions: dict[int, GroupId] = {}  # for the told group: who had this position before

    def take(self, turn: Turn) -> list[GroupLife]:
        """What happened. Groups whose life is over for good are given back, and not kept."""
        self._event, self._at, self._cause = turn.number, turn.event.at, ""
        self._leaving = {}
        event = turn.event
        resumed = isinstance(event, RolledBack) and event.resumed is not None
        if not self._over or resumed:
            self._over = ""
            self._take_event(turn)
            self._foresee(turn.commands)
            for command in turn.commands:
                self._take_command(command, turn.commands)
        for note in turn.notes:
            self._noted(note)
        for group in self._leaving:
            self.groups.pop(group, None)
        return list(self._leaving.values())

    def rest(self) -> Iterator[GroupLife]:
        """What lives on at the log's end."""
        yield from self.groups.values()

    def find(self, name: SampleId) -> tuple[GroupLife | None, SampleLife | None]:
        group = self.groups.get(group_of(name))
        member = int(name.partition(".")[2])
        if group is None or not 0 <= member < len(group.samples):
            return None, None
        return group, group.samples[member]

    def trained(self, step: int) -> list[GroupLife]:
        """The groups of a step that training may go back to, or that is trained now."""
        return [self.groups[number] for number in self._steps.get(step, ()) if number in self.groups]

    # ------------------------------------------------------------------------------------------------------- events

    def _take_event(self, turn: Turn) -> None:
        match turn.event:
            case GroupRead() as event:
                self._read(event, turn.commands)
            case DataEnded(group=number):
                if (group := self.groups.get(number)) is not None:
                    self._end(group, "cancelled", "the data have no prompt at this position: they ended")
            case SampleDone() as event:
                self._done(event, turn.payload)
            case Scored() as event:
                self._scored(event)
            case Failed(of="sample") as event:
                group, sample = self.find(event.id)
                if group is not None and sample is not None:
                    self._attempt_failed(group, sample, event.attempt, event.why)
            case Failed(of="group") as event:
                if (group := self.groups.get(int(event.id))) is not None:
                    self._end(group, "failed", f"its prompt can't be used: {first_line(event.why)}")
            case StepDone() as event:
                self._step_done(event)
            case Joined(peer="trainer") as event if not self._has_joined:
                self._has_joined, self.version, self.step = True, event.version, event.version
            case Lost(peer="server") | Failed(of="server"):
                self.servers.pop(turn.event.id, None)
            case Swapped() as event:
                self.servers[event.server] = event.version
            case RolledBack() as event:
                self._roll_back(event)

    def _read(self, event: GroupRead, commands: Sequence[AnyCommand]) -> None:
        group = self.groups.get(event.group)
        if group is None or group.state != "asked":
            return
        group.row, group.prompt_tokens, group.read_at = event.row, event.prompt_tokens, event.at
        after = long(event.at - group.asked_at)
        self._tell(group, f"its prompt is read after {after}: row {event.row}, {count(event.prompt_tokens, 'token')}")
        if any(isinstance(command, StartSample) for command in commands):
            group.state = "running"
        else:
            self._end(group, "stale", "its deadline had passed before its prompt was read")

    def _done(self, event: SampleDone, payload: PayloadRef | None) -> None:
        group, sample = self.find(event.sample)
        if group is None or sample is None or sample.state != "running" or event.attempt != sample.attempt:
            if group is not None:
                self._tell(group, f"an answer of attempt {event.attempt} comes too late, and is ignored", event.sample)
            return
        sample.done, sample.payload = event, payload
        sample.alone = False
        end = "by a stop token" if event.finish == "stop" else "at the token limit"
        self._tell(
            group,
            f"answered {count(event.length, 'token')} of {versions(event.oldest, event.newest)} in "
            f"{long(event.at - sample.started_at)}, ended {end}",
            event.sample,
        )
        tokens, most = event.prompt_tokens + event.length, self.rules.max_tokens_per_microbatch
        if tokens > most:
            why = f"it has {tokens} tokens, train.max_tokens_per_microbatch is {most}"
            self._attempt_failed(group, sample, event.attempt, why)
            return
        sample.state = "scoring"
        if event.reward is not None:
            sample.verdict = "given"
            self._graded(group, sample, event.reward, f"its workflow gives the reward {number(event.reward)}")

    def _scored(self, event: Scored) -> None:
        group, sample = self.find(event.sample)
        if group is None or sample is None or sample.state != "scoring" or event.attempt != sample.attempt:
            return
        sample.verdict = event.verdict
        began = sample.asked_at if sample.asked_at is not None else event.at
        given = "no reward" if event.reward is None else f"reward {number(event.reward)}"
        self._graded(group, sample, event.reward, f"checked in {long(event.at - began)}: {event.verdict}, {given}")

    def _graded(self, group: GroupLife, sample: SampleLife, reward: float | None, text: str) -> None:
        assert sample.done is not None, "what is graded has come"
        sample.reward, sample.scored_at, sample.state = reward, self._at, "scored"
        if reward is not None and shaping.usable(reward, sample.done, self.rules) is None:
            text += ", which isn't used (its length isn't wanted, or it is no number to compute with)"
        self._tell(group, text, sample.id)
        self._decide(group)

    def _attempt_failed(self, group: GroupLife, sample: SampleLife, attempt: int, why: str) -> None:
        if sample.state != "running" or attempt != sample.attempt:
            return
        sample.failures += 1
        after = long(self._at - sample.started_at)
        self._tell(group, f"attempt {attempt} failed after {after}: {first_line(why)}", sample.id)
        if sample.failures <= self.rules.retries:
            sample.state = "waiting"
            return
        sample.state = "failed"
        left = sum(each.state != "failed" for each in group.samples)
        tries = f"{sample.id} failed in each of its {sample.failures} attempts"
        if left < self.rules.min_group:
            self._end(group, "failed", f"{tries}; {left} members are left, {self.rules.min_group} are needed")
        else:
            self._tell(group, f"failed for good, after {count(sample.failures, 'attempt')}", sample.id)
            self._decide(group)

    def _decide(self, group: GroupLife) -> None:
        """When the last member has its outcome."""
        if group.state != "running" or any(sample.state not in ("scored", "failed") for sample in group.samples):
            return
        rules = self.rules
        known = []
        for sample in group.samples:
            if sample.done is not None and sample.state == "scored":
                reward = shaping.usable(sample.reward, sample.done, rules)
                if reward is not None:
                    known.append((reward, sample.done))
                sample.alone = reward is None or shaping.masked(sample.done, rules)
        unwanted = shaping.unwanted(known, rules)
        if unwanted is not None:
            why, words = unwanted
            self._end(group, "filtered", why.format(*words))
            return
        group.state, group.ready_at = "ready", self._at
        alone = [sample.id for sample in group.samples if sample.alone]
        without = f"; {', '.join(alone)} without a gradient (no reward, or cut)" if alone else ""
        mean = sum(reward for reward, _ in known) / len(known)
        self._tell(group, f"ready: {count(len(known), 'reward')}, mean {number(mean)}{without}")

    def _step_done(self, event: StepDone) -> None:
        if (event.step, event.branch) != (self.version, self.branch):
            return  # told again, or of a branch that is over
        self.version += 1
        for group in self.trained(event.step):
            if group.state != "training":
                continue
            group.state, group.trained_at = "trained", event.at
            took = long(event.at - (group.handed_at or event.at))
            left_out = f"; the update was left out: {first_line(event.skipped)}" if event.skipped else ""
            self._tell(group, f"trained: step {event.step} is done after {took}, version {self.version}{left_out}")

    def _roll_back(self, event: RolledBack) -> None:
        before, resumed = self.version, event.resumed is not None
        self.branch += 1
        self.version = event.to
        self.servers.clear()
        if event.resumed is not None:
            self.rules = event.resumed
        who = "the run is resumed" if resumed else "the trainer was lost"
        back = f"training goes back from version {before} to {event.to}, branch {self.branch} ({who})"
        self._cause = f"training goes back to version {event.to}"
        for group in list(self.groups.values()):
            if group.step is not None and group.state in ("trained", "training"):
                if group.step >= event.to:
                    group.state, group.trained_at = "training", None
                    self._tell(group, f"{back}: step {group.step} will be trained again")
            elif group.state == "ready":
                self._tell(group, f"{back}: it stays ready")
            elif any(sample.state == "scored" for sample in group.samples):
                self._hold(group, back, resumed=resumed)
            else:
                self._end(group, "cancelled", f"{back}: nothing of it had its outcome, and its prompt is asked again")

    def _hold(self, group: GroupLife, back: str, *, resumed: bool) -> None:
        self._tell(group, f"{back}: the group stays, since members have their outcome; what ran starts again")
        for sample in group.samples:
            if sample.state in ("running", "waiting"):
                sample.state = "held"
                self._tell(group, "held until a server has the group's floor again", sample.id)
            elif sample.state == "scoring" and resumed:
                self._tell(group, "its check ended with the controller, and is made again", sample.id)

    # ------------------------------------------------------------------------------------------------------ commands

    def _foresee(self, commands: Sequence[AnyCommand]) -> None:
        """Why commands stop what they stop, where the event doesn't say."""
        for command in commands:
            if isinstance(command, Finish):
                self._cause = self._cause or f"the run ends ({command.reason})"

    def _take_command(self, command: AnyCommand, all_commands: Sequence[AnyCommand]) -> None:
        match command:
            case ReadGroup():
                self._asked(command)
            case StartSample():
                self._start(command)
            case Score():
                _, sample = self.find(command.sample)
                if sample is not None:
                    sample.asked_at = self._at
            case Cancel():
                self._cancelled(command)
            case Train():
                self._train(command)
            case Forget():
                if (group := self._of_told(command.samples)) is not None:
                    released = {name for each in all_commands if isinstance(each, Release) for name in each.samples}
                    only = [name for name in command.samples if name not in released]
                    self._tell_left(group, only, "its arrays leave memory")
            case Release():
                self._release(command)
            case Finish() | Fail():
                self._end_of_run(command)

    def _asked(self, command: ReadGroup) -> None:
        samples = [SampleLife(sample_id(command.group, member)) for member in range(self.rules.group_size)]
        group = self.groups[command.group] = GroupLife(command.group, command.position, self._at, samples)
        self.admitted = max(self.admitted, command.group + 1)
        if self._told_group < 0:
            return
        before = self._positions.get(command.position)
        self._positions[command.position] = command.group
        again = "" if before is None else f", which group {before} had before"
        self._tell(group, f"asked for: position {command.position} of the data order{again}")
        if before == self._told_group:
            text = f"its prompt is asked for again, as group {command.group}"
            self.happenings.append(Happening(self._event, self._at, None, text))

    def _start(self, command: StartSample) -> None:
        group, sample = self.find(command.sample)
        if group is None or sample is None:
            return
        again = f"attempt {command.attempt} starts" if command.attempt else "starts"
        first = group.floor is None
        group.floor = command.floor
        sample.state, sample.attempt, sample.started_at = "running", command.attempt, self._at
        sample.server, sample.version = command.server, self.servers.get(command.server, -1)
        sample.done, sample.payload = None, None  # what came was of an attempt that failed
        if self._told_group != group.id:
            return
        if first:
            last = admission.deadline(command.floor, self.rules)
            self._tell(group, f"floor: version {command.floor}; step {last} is the last that may train it in time")
        holds = "which is lost: it waits for another"
        if sample.version >= 0:
            holds = f"which holds version {sample.version}"
        self._tell(group, f"{again} on server {command.server}, {holds}", sample.id)

    def _cancelled(self, command: Cancel) -> None:
        number = group_of(command.sample)
        if number != self._told_group:
            return
        over = self.groups[number].state in OVER if number in self.groups else True  # then that is the reason
        text = f"attempt {command.attempt} is stopped" + (f": {self._cause}" if self._cause and not over else "")
        if self._tells(command.sample):
            self.happenings.append(Happening(self._event, self._at, command.sample, text))

    def _train(self, train: Train) -> None:
        again = train.step < self.step
        self.step = max(self.step, train.step + 1)
        self._steps[train.step] = train.groups
        places = {
            index: (part, rank, micro)
            for part, minibatch in enumerate(train.minibatches)
            for rank, micros in enumerate(minibatch.ranks)
            for micro, indices in enumerate(micros)
            for index in indices
        }
        for index, entry in enumerate(train.samples):
            _, sample = self.find(entry.sample)
            if sample is not None:
                sample.advantage, sample.place = entry.advantage, places.get(index)
        for group in (self.groups[each] for each in train.groups if each in self.groups):
            group.state, group.step, group.branch, group.handed_at = "training", train.step, train.branch, self._at
            self._tell_handed(group, train, again=again)
        if not again and self.rules.when_older == "drop":
            self._drop_late(train.step + 1)

    def _tell_handed(self, group: GroupLife, train: Train, *, again: bool) -> None:
        if group.id != self._told_group:
            return
        waited = "" if group.ready_at is None or again else f" after {long(self._at - group.ready_at)} as ready"
        what = "trained again" if again else "handed to training"
        self._tell(group, f"{what}: step {train.step}, branch {train.branch}{waited}")
        for sample in group.samples:
            if sample.advantage is None or sample.done is None:
                continue
            place = sample.place or (0, 0, 0)
            lag = train.step - sample.done.oldest
            self._tell(
                group,
                f"in step {train.step} with advantage {number(sample.advantage)}, lag {lag}: minibatch {place[0]}, "
                f"rank {place[1]}, micro-batch {place[2]}",
                sample.id,
            )

    def _drop_late(self, next_step: int) -> None:
        for group in list(self.groups.values()):
            if group.state not in ("running", "ready") or group.floor is None:
                continue
            last = admission.deadline(group.floor, self.rules)
            if last < next_step:
                self._end(group, "stale", f"step {next_step} comes, and its deadline was {last}")

    def _release(self, command: Release) -> None:
        if (group := self._of_told(command.samples)) is not None:
            text = "released: nobody can ask for it again, and its arrays may leave the disk"
            self._tell_left(group, command.samples, text)
        for name in command.samples:
            group = self.groups.get(group_of(name))
            if group is not None and group.state == "trained":
                self._leaving[group.id] = group
                if group.step is not None:
                    self._steps.pop(group.step, None)

    def _end_of_run(self, command: Finish | Fail) -> None:
        match command:
            case Finish():
                self._over = command.reason
                makes_checkpoints = bool(self.rules.checkpoint_steps or self.rules.checkpoint_s)
                goes_on = command.reason == "stopped" and (makes_checkpoints or not self.version)
                for group in [] if goes_on else list(self.groups.values()):
                    if group.state in ("asked", "running"):
                        self._end(group, "cancelled", f"the run ends ({command.reason})")
                self._tell_end(f"the run ends ({command.reason})")
            case Fail():
                self._over = "failed"
                self._tell_end(f"the run fails: {first_line(command.why)}")

    # --------------------------------------------------------------------------------------------------------- words

    def _end(self, group: GroupLife, state: GroupState, why: str) -> None:
        """Its life is over, and it leaves."""
        group.state, group.why = state, why
        self._leaving[group.id] = group
        self._tell(group, f"{state}: {why}")

    def _tell_end(self, text: str) -> None:
        """Of the run, where the told group lives."""
        group = self.groups.get(self._told_group)
        if group is not None and group.state not in ("trained", *OVER):
            self._tell(group, text)

    def _tells(self, sample: SampleId | None) -> bool:
        return sample is None or self._told is None or self._told.kind == "group" or self._told.name == sample

    def _tell(self, group: GroupLife, text: str, sample: SampleId | None = None) -> None:
        if group.id == self._told_group and self._tells(sample):
            self.happenings.append(Happening(self._event, self._at, sample, text))

    def _of_told(self, samples: Sequence[SampleId]) -> GroupLife | None:
        if self._told_group < 0 or not any(group_of(name) == self._told_group for name in samples):
            return None
        return self.groups.get(self._told_group)

    def _tell_left(self, group: GroupLife, samples: Sequence[SampleId], text: str) -> None:
        for sample in group.samples:
            if sample.id in samples:
                self._tell(group, text, sample.id)

    def _noted(self, note: Note) -> None:
        name = note.data.get("sample")
        if self._told_group < 0 or not isinstance(name, str) or group_of(name) != self._told_group:
            return
        if self._tells(name):
            self.happenings.append(Happening(self._event, note.at, name, noted(note)))
