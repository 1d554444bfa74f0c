"""Whatever the order of asking, answering, giving up, dying and coming back:"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from areal_async.wire.window import Window


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.window: Window[list[str]] = Window()
        self.asked: dict[str, list[str]] = {}  # who waits
        self.worker: list[str] = []  # what the present incarnation has and hasn't answered
        self.order: list[str] = []
        self.answered_to: list[str] = []
        self.count = 0
        self.granted = 0

    @rule()
    def ask(self) -> None:
        id = str(self.count)
        self.count += 1
        self.asked[id] = [id]
        self.window.add(id, self.asked[id])

    @rule()
    def send_all(self) -> None:
        while (item := self.window.take()) is not None:
            self.worker.append(item[0])
            assert len(self.worker) <= self.granted

    @precondition(lambda self: self.worker)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        id = self.worker.pop(data.draw(st.integers(0, len(self.worker) - 1)))
        request = self.window.answered(id)
        assert request is self.asked.pop(id, None)
        self.answered_to.append(id)

    @rule(id=st.integers(0, 30).map(str))
    def answer_of_nobody(self, id: str) -> None:
        if id not in self.worker and id not in self.asked:
            assert self.window.answered(id) is None

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.asked)))
        self.window.abandon(id, self.asked.pop(id))

    @precondition(lambda self: set(self.worker) - set(self.asked))
    @rule(data=st.data())
    def ask_again_what_was_given_up(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(set(self.worker) - set(self.asked))))
        self.asked[id] = [id]
        self.window.add(id, self.asked[id])

    @rule()
    def die(self) -> None:
        self.window.close()
        self.worker, self.granted = [], 0

    @rule(credits=st.integers(1, 4))
    def come_back(self, credits: int) -> None:
        unanswered = [id for id in self.worker if id in self.asked]
        self.window.reopen(credits)
        self.worker, self.granted = [], credits
        self.send_all()
        assert self.worker[: len(unanswered)] == unanswered[: len(self.worker)], "the unanswered first, in their order"

    @invariant()
    def credits_are_never_exceeded(self) -> None:
        assert self.window.at_worker == len(self.worker) <= max(self.granted, 0)

    @invariant()
    def everything_asked_is_held(self) -> None:
        assert sorted(request[0] for request in self.window.requests()) == sorted(self.asked)
        assert len(self.window) == len(set(self.asked) | set(self.worker))


TestAnyOrder = AnyOrder.TestCase
