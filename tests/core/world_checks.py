"""What must hold after every event, by the books of a `World`; a broken rule raises `Broken`."""

from areal_async.messages import Rules, Train, group_of


class Broken(AssertionError):
    """A rule of the core doesn't hold."""


def hold(condition: bool, what: str) -> None:
    if not condition:
        raise Broken(what)


def make_rules(**changes: object) -> Rules:
    base: dict[str, object] = {
        "seed": 0,
        "steps": 4,
        "batch_groups": 2,
        "group_size": 1,
        "max_staleness": 1,
        "max_concurrent": 1000,
        "minibatches": 1,
        "ranks": 1,
        "max_tokens_per_microbatch": 1000,
        "max_new_tokens": 500,
    }
    return Rules(**{**base, **changes})  # type: ignore[arg-type]


class Checks:
    """The part of a `World` that compares."""

    def check_balance(self) -> None:
        """The core's balance against the books."""
        if self.end is not None:
            return
        size, per_step = self.rules.group_size, self.rules.batch_groups
        trained = (self.trained - self.first) * per_step
        books = {
            "admitted": len(self.groups),
            "trained": trained,
            "training": self.fates("handed") - trained,
            "filtered": self.fates("filtered"),
            "failed": self.fates("failed"),
            "cancelled": self.fates("cancelled"),
            "outstanding": self.outstanding,
            "stale": self.fates("stale"),
        }
        balance = self.core.balance()
        hold({key: balance[key] for key in books} == books, f"balance {balance}, books {books}")
        hold(balance["samples_stale"] == self._stale_samples, f"stale samples: {balance}, books {self._stale_samples}")
        samples = sum(balance[f"samples_{key}"] for key in books if key != "admitted")
        hold(samples == balance["samples_admitted"] == len(self.groups) * size, f"samples don't balance: {balance}")
        done = sum(len(train.samples) for train in self.history[: self.trained - self.first])
        hold(balance["samples_trained"] == done, f"samples trained: {balance}, books {done}")
        hold(self.core.step * per_step == self.first * per_step + self.fates("handed"), "handed is not B times step")

    def _check_going_on(self) -> None:
        """Where batches don't wait for anybody's age, the trainer trains as soon as it can."""
        if self.rules.when_older == "wait" or self.end is not None or self.stopping or self.trained >= self.rules.steps:
            return
        busy = self.published is None or self.find("train") or self.find("publish") or self.find("checkpoint")
        busy = busy or self.trainer.works_since is None
        hold(bool(busy) or self.fates("ready") < self.rules.batch_groups, "a batch is ready and isn't trained")

    def _check_left(self) -> None:
        """Of a group whose life is over nothing is under way, and nothing is in memory."""
        left, self._left = set(self._left), []
        if not left or self.end is not None:
            return
        hold(not any(group_of(name) in left for name in self._kept), "an answer is never forgotten")
        under_way = [key for key in self.pending if key[0] in ("sample", "score") and group_of(key[1]) in left]
        hold(not under_way, f"goes on after the end of its group: {under_way}")
        self.held = {name for name in self.held if group_of(name) not in left}

    def _check_released(self) -> None:
        """What nothing can ask for is released, so that neither memory nor disk grow with the run."""
        if self.end is None:
            missed = {name for name in self.came - self.checkpoints.released if not self._may_be_asked_for(name)}
            hold(not missed, f"never released: {sorted(missed)[:5]}")

    def _may_be_asked_for(self, name: str) -> bool:
        """Whether a sample that has arrays can be trained or checked, now or after going back."""
        number = group_of(name)
        book = self.groups[number]
        outcome = book.outcomes.get(int(name.partition(".")[2]), 0.0)
        if book.fate == "open":
            return outcome != "failed"
        if book.fate == "handed" and self.step_of[number] < self.checkpoints.oldest:
            return False
        return book.fate in ("ready", "handed") and isinstance(outcome, float)

    def _check_held(self) -> None:
        """What has to start again does as soon as it can."""
        if self.end is not None or self.stopping or not self.workers:
            return
        for name in self.held:
            floor = self.groups[group_of(name)].floor or 0
            free = self.in_flight + self.rules.group_size <= self.rules.max_concurrent
            hold(not self.holders(floor) or not free, f"{name} is held, although a server holds version {floor}")

    def _check_due(self, at: float) -> None:
        """What is due at this time was said, and the core wants to be woken for the rest."""
        dues = [book.due for book in (*self.peers.values(), self.trainer) if book.due is not None]
        if self.end is not None or self.stopping:
            return
        hold(not self.unchecked, "goes on although a reward worker was lost too often")
        if not dues:
            return
        hold(min(dues) > at, f"one that was lost was to be started again at {min(dues)}, it is {at}")
        wakeup = self.core.next_wakeup()
        hold(wakeup is not None and wakeup <= min(dues), f"wants to be woken at {wakeup}, due is {min(dues)}")

    def _check_turn(self, command: Train) -> None:
        """The earliest deadlines come first, then the earliest admissions; so no ready group is passed by for long."""
        ready = {n: book.floor or 0 for n, book in self.groups.items() if book.fate == "ready"}
        first = sorted(ready, key=lambda number: (ready[number], number))[: len(command.groups)]
        hold(sorted(first) == list(command.groups), f"trains {command.groups}, but it is the turn of {first}")
        for number in first:
            latest = max(self.groups[number].ready, ready[number] + self.rules.max_staleness + 1)
            hold(command.step <= latest + self.rules.max_staleness, f"group {number} was ready for {latest}")
