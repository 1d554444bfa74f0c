"""Goes through the records of a run's log once, in their order, and proves its balance.

What always holds: nothing of the core is called and nothing is believed because a command says it: what must follow is
worked out from the events and the rules (docs/audit.md), so a wrong decision is found as well as a changed log. Memory
follows what is outstanding. A log may end anywhere: what was commanded last may be missing, nothing else.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from areal_async.audit import report
from areal_async.audit.batch import listed
from areal_async.audit.books import CANCELLED, FAILED, FILTERED, HANDED, STALE, Books
from areal_async.audit.findings import Findings
from areal_async.audit.groups import Groups
from areal_async.audit.payloads import References
from areal_async.audit.prompts import Prompts
from areal_async.audit.report import Report
from areal_async.audit.servers import Servers
from areal_async.audit.steps import Plan, Steps
from areal_async.errors import LogError
from areal_async.log.format import Torn
from areal_async.log.reader import Record, read_records
from areal_async.messages import (
    Cancel,
    Checkpoint,
    CheckpointDone,
    Command,
    DataEnded,
    Evaluate,
    EvaluationDone,
    Event,
    Fail,
    Failed,
    Finish,
    Forget,
    GroupRead,
    Joined,
    Lost,
    Publish,
    Published,
    ReadGroup,
    Release,
    Restart,
    RolledBack,
    Rules,
    SampleDone,
    SampleId,
    Score,
    Scored,
    StartSample,
    StepDone,
    StopRequested,
    Swap,
    Swapped,
    Train,
)

NO_RULES: Final = Rules(
    seed=0,
    steps=0,
    batch_groups=1,
    group_size=1,
    max_staleness=0,
    max_concurrent=1,
    minibatches=1,
    ranks=1,
    max_tokens_per_microbatch=1,
    max_new_tokens=1,
)  # of a log that ends before its first record
_OWED: Final = {
    "start": "sample",
    "score": "sample",
    "cancel": "sample",
    "fail": "the run:",
    "publish": "version",
    "release": "what",
}
CHANGEABLE: Final = frozenset(
    {
        *("ranks", "max_tokens_per_microbatch", "steps", "retries", "max_failures", "nan_budget", "max_restarts"),
        *("max_worker_restarts", "max_trainer_restarts", "checkpoint_steps", "checkpoint_s", "checkpoint_keep"),
        *("eval_every", "wave", "servers", "max_concurrent", "max_filtered"),
    }
)  # of the rules, what a resume may change


def audit(folder: Path, *, payloads: bool = False) -> Report:
    """Of the log in this folder. payloads: whether all arrays are read and compared, too."""
    torn: list[Torn] = []
    corrupt = ""
    auditor = Auditor()
    references = References(folder, auditor.findings, whole=payloads)
    try:
        for record in read_records(folder, torn.append):
            auditor.take(record)
            match record.message:
                case SampleDone() if record.payload is not None:
                    done = record.message
                    references.follow(done, record.payload, needed=auditor.needs(done.sample, done.attempt))
                case Release():
                    references.release(record.message)
                case _:
                    pass
    except LogError as error:
        corrupt = str(error)
    references.close()
    return auditor.report(references, torn=str(torn[0]) if torn else "", corrupt=corrupt)


def audit_records(records: Iterable[Record]) -> Report:
    """Of records alone; references to payloads aren't followed."""
    auditor = Auditor()
    for record in records:
        auditor.take(record)
    return auditor.report(None, torn="", corrupt="")


class Auditor:
    """Give it every record in order (`take`), then ask for the `report`."""

    def __init__(self) -> None:
        self.findings = Findings()
        self._at = 0.0
        self._end = ""
        self._after_end = 0
        self._stop_asked = False
        self._backs: list[report.Back] = []
        self._books: Books | None = None
        self._handlers: dict[type, Callable[[Any], object]] = {}

    def take(self, record: Record) -> None:
        self.findings.record += 1
        self.findings.offset = record.offset
        message = record.message
        if isinstance(message, Rules):
            self._begin(message)
        elif isinstance(message, Event):
            self._event(message)
        elif isinstance(message, Command):
            self._command(message)

    def _begin(self, rules: Rules) -> None:
        if self._books is not None:
            self.findings.add("log.rules", "the log", "a second record of rules; a run has one")
            return
        books = self._books = Books(rules, self.findings)
        servers = self._servers = Servers(books)
        prompts = self._prompts = Prompts(books)
        groups = self._groups = Groups(books, prompts, servers)
        steps = self._steps = Steps(books, servers)
        self._handlers = {
            # events
            Joined: self._joined,
            Lost: self._lost,
            GroupRead: groups.read,
            DataEnded: groups.data_ended,
            SampleDone: groups.done,
            Scored: groups.scored,
            Failed: self._failed,
            StepDone: steps.done,
            Published: self._published,
            Swapped: servers.swapped,
            EvaluationDone: servers.evaluated,
            CheckpointDone: steps.checkpoint_done,
            RolledBack: self._rolled_back,
            StopRequested: self._stop_requested,
            # commands
            ReadGroup: groups.ask,
            StartSample: groups.start,
            Score: groups.score,
            Train: self._train,
            Publish: self._publish,
            Swap: servers.swap,
            Restart: self._restart,
            Evaluate: servers.evaluate,
            Checkpoint: steps.checkpoint,
            Cancel: groups.cancel,
            Forget: groups.forget,
            Release: steps.release,
            Finish: self._finish,
            Fail: self._fail,
        }

    # ------------------------------------------------------------------------------------------------- events, commands

    def _event(self, event: Event) -> None:
        if event.at < self._at:
            text = f"it is of {event.at:.6f} s, the event before of {self._at:.6f} s"
            self.findings.add("time.backwards", _named(event), text)
        self._at = max(self._at, event.at)
        resumed = isinstance(event, RolledBack) and event.resumed is not None
        if self._end and not resumed:
            self._after_end += 1  # it was under way when the run ended; nobody looks at it
            return
        self._settle()
        if (handler := self._handlers.get(type(event))) is not None:
            handler(event)

    def _command(self, command: Command) -> None:
        if self._end:
            self.findings.add("end.command", _named(command), f"it is commanded after the run's end ({self._end})")
            return
        if (handler := self._handlers.get(type(command))) is not None:
            handler(command)

    def _settle(self) -> None:
        """The commands of the event before are all there: a resume, too, writes first what an end has cut off."""
        books = self._books
        if books is None:
            return
        for (what, about), text in books.owed.items():
            self.findings.add(f"missing.{what}", f"{_OWED[what]} {about}", f"{text}; nothing follows")
        books.owed.clear()
        self._groups.settle()
        if not self._stop_asked and self._steps.waits_for_nothing:
            self.findings.add("step.late", f"step {books.version}", "its groups are there, and it isn't trained")

    # ------------------------------------------------------------------------------ what concerns more than one of them

    def _joined(self, event: Joined) -> None:
        if event.peer == "trainer":
            self._steps.joined(event)
        elif event.peer == "server":
            self._servers.joined(event)

    def _lost(self, event: Lost) -> None:
        if event.peer == "trainer":
            self._steps.lost()
            self._servers.forget_published()
        elif event.peer == "server":
            self._servers.lost(event.id)

    def _restart(self, command: Restart) -> None:
        if command.peer == "trainer":
            self._steps.restart(command)
        elif command.peer == "server":
            self._servers.restarted(command.id)

    def _failed(self, event: Failed) -> None:
        match event.of:
            case "sample":
                self._groups.failed(event)
            case "group":
                self._groups.refuse(event)
            case "swap":
                self._servers.swap_failed(event)
            case "server":
                self._servers.lost(event.id)
            case "evaluation":
                self._servers.evaluated(event)
            case "checkpoint":
                self._steps.checkpoint_failed(event.id)
            case "train" | "publish":
                self._steps.could_not(event)

    def _publish(self, command: Publish) -> None:
        self._steps.publish(command)
        self._servers.publish(command)

    def _published(self, event: Published) -> None:
        if self._steps.state == "lost":
            return  # the ranks have said it, and were lost
        self._steps.published(event)
        self._servers.published(event)

    def _train(self, command: Train) -> None:
        self._steps.train(command)
        if self._rules.when_older == "drop":
            self._groups.drop_late(self._steps.next_step)

    def _rolled_back(self, event: RolledBack) -> None:
        books, steps = self._books, self._steps
        assert books is not None, "rules come first"
        resumed = event.resumed is not None
        back = report.Back(event.at, books.version, event.to, steps.branch + 1, resumed, event.why)
        self._backs.append(back)
        if event.resumed is not None:
            self._check_rules(books.rules, event.resumed)
            books.rules = event.resumed
        self._end = ""
        self._stop_asked = self._stop_asked and not resumed
        steps.roll_back(event)
        self._servers.roll_back(steps.branch, anew=resumed)
        self._groups.roll_back(resumed=resumed)

    def _check_rules(self, old: Rules, new: Rules) -> None:
        changed = [name for name in old.__struct_fields__ if getattr(old, name) != getattr(new, name)]
        if wrong := [name for name in changed if name not in CHANGEABLE]:
            self.findings.add("resume.rules", "the run", f"it is resumed with another {listed(wrong)}")

    def _stop_requested(self, event: StopRequested) -> None:
        self._stop_asked = True

    def _finish(self, command: Finish) -> None:
        steps = self._steps
        stopped = command.reason == "stopped"
        if stopped and not self._stop_asked:
            self.findings.add("end.reason", "the end", "the run ends as if it had been stopped; nobody asked for that")
        if command.reason == "data_ended" and self._prompts.end is None:
            self.findings.add("end.reason", "the end", "the run ends as if the data had; they did not")
        steps.finish(command)
        self._groups.finish(may_resume=stopped and steps.can_go_back)
        self._end = command.reason
        self._drop_owed()

    def _fail(self, command: Fail) -> None:
        self._end = f"failed: {command.why.partition(chr(10))[0]}"
        self._drop_owed()

    def _drop_owed(self) -> None:
        """The run is over: what is owed is only what had to be stopped before."""
        if self._books is not None:
            self._books.owed.clear()
            self._groups.settle_end()

    @property
    def _rules(self) -> Rules:
        assert self._books is not None, "rules come first"
        return self._books.rules

    # ------------------------------------------------------------------------------------------------------ the report

    def needs(self, name: SampleId, attempt: int) -> bool:
        """Whether the arrays of this attempt may still be asked for."""
        group, member = self._books.find(name) if self._books is not None else (None, -1)
        if group is None or member < 0:
            return False
        sample = group.samples[member]
        return sample.answer is not None and sample.attempt == attempt and not sample.released

    def report(self, references: References | None, *, torn: str, corrupt: str) -> Report:
        """Of all that was taken; what the last event asks for may be missing."""
        books, findings = self._books, self.findings
        if books is None:
            books = Books(NO_RULES, findings)
            self._begin(NO_RULES)
        steps = self._steps
        surviving = list(steps.surviving())
        trained = sum(plan.samples for _, plan in surviving)
        lags: Counter[int] = Counter()
        for _, plan in surviving:
            lags.update(plan.lags)
        rows, least, most = self._prompts.times_read()
        return Report(
            proven=not findings.count and not corrupt,
            records=findings.record + 1,
            seconds=self._at,
            rules=_shown_rules(books.rules),
            prompts=report.Prompts(self._prompts.next, self._prompts.asked_again, rows, least, most, self._prompts.end),
            groups=self._group_ends(books),
            samples=self._sample_ends(books, trained),
            attempts=dict(sorted(books.attempts.items())),
            first_version=steps.first or 0,
            version=books.version,
            branch=steps.branch,
            steps=[_step(number, plan) for number, plan in surviving],
            lags=dict(sorted(lags.items())),
            dead_steps={branch: count for branch, count in steps.dead_steps.items() if count},
            backs=self._backs,
            checkpoints=steps.checkpoints,
            checkpoints_made=steps.made,
            payloads=references.checked if references is not None else 0,
            payload_bytes=references.nbytes if references is not None else 0,
            after_end=self._after_end,
            end=self._end,
            torn=torn,
            corrupt=corrupt,
            found=dict(findings.counts),
            findings=findings.kept,
        )

    def _group_ends(self, books: Books) -> dict[str, int]:
        counts = Counter(books.fates)
        trained = sum(0 <= step < books.version for step in books.steps)
        return {
            "admitted": len(books.fates),
            "trained": trained,
            "filtered": counts[FILTERED],
            "stale": counts[STALE],
            "failed": counts[FAILED],
            "cancelled": counts[CANCELLED],
            "outstanding": len(books.live),
            "training": counts[HANDED] - trained,
        }

    def _sample_ends(self, books: Books, trained: int) -> dict[str, int]:
        ends = books.sample_ends
        return {
            "admitted": len(books.fates) * books.rules.group_size,
            "trained": trained,
            **{name: ends[name] for name in ("filtered", "stale", "failed", "cancelled")},
            "outstanding": len(books.live) * books.rules.group_size,
            "training": ends["handed"] - trained,
        }


def _step(number: int, plan: Plan) -> report.Step:
    count = sum(plan.lags.values())
    whole = sum(lag * samples for lag, samples in plan.lags.items())
    return report.Step(number, plan.branch, count, max(plan.lags, default=0), whole / count if count else 0.0)


def _shown_rules(rules: Rules) -> dict[str, int | str]:
    names = ("batch_groups", "group_size", "max_staleness", "when_older", "steps")
    return {name: getattr(rules, name) for name in names}


def _named(message: Event | Command) -> str:
    return type(message).__name__
