"""A server in virtual time, against a loop over its decoding steps."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.simulate.models import Answer, ServerModel, SwapModel
from areal_async.simulate.servers import Answering, Server, pace_of, seconds_of, tokens_in

from .models import FREE, STEADY

MODEL = ServerModel(0.002, 0.005, 2e-7, 3e-4, 1e-4, max_running=16, cache=10**6)  # crosses over at about 17 answers
SECONDS = st.floats(0, 1e-2)
MODELS = st.builds(
    ServerModel,
    st.floats(1e-4, 1e-2),
    SECONDS,
    st.floats(0, 1e-5),
    SECONDS,
    st.floats(0, 1e-3),
    st.just(8),
    st.just(4000),
)


def answering(order: int, length: int, prompt: int = 10, group: int | None = None) -> Answering:
    what = Answer(prompt, length, False, 1.0)
    return Answering(f"{order}.0", 0, order if group is None else group, 0, what, order)


def joined(model: ServerModel, swap: SwapModel | None = None) -> Server:
    server = Server("0", model, swap or SwapModel(0.0))
    server.join(0.0)
    server.swap(0, 0.0)
    server.swapped(0.0)
    return server


def run(server: Server, arrivals: list[tuple[float, Answering]]) -> dict[int, float]:
    """When each answer ends, by its order."""
    ends: dict[int, float] = {}
    todo = sorted(arrivals, key=lambda arrival: (arrival[0], arrival[1].order), reverse=True)
    while todo or server.load:
        at = server.next_end()
        if at is None or (todo and todo[-1][0] <= at):
            now, answer = todo.pop()
            server.ask(answer, now)
            continue
        for answer in server.end(at):
            ends[answer.order] = at
        server.begin(at)
    return ends


def stepped(model: ServerModel, arrivals: list[tuple[float, Answering]]) -> dict[int, float]:
    """The same by a loop over steps: what arrived is prefilled between two of them, then all running answers get a
    token."""
    ends: dict[int, float] = {}
    now = 0.0
    todo = sorted(arrivals, key=lambda arrival: (arrival[0], arrival[1].order), reverse=True)
    running: dict[int, list[int]] = {}  # order -> prompt, tokens, length
    while todo or running:
        if not running:
            now = max(now, todo[-1][0])
        while todo and todo[-1][0] <= now and len(running) < model.max_running:
            answer = todo.pop()[1]
            now += answer.prompt * model.prefill_s
            running[answer.order] = [answer.prompt, 0, answer.length]
        now += model.step_s(len(running), sum(prompt + tokens for prompt, tokens, _ in running.values()))
        for order, state in list(running.items()):
            state[1] += 1
            if state[1] == state[2]:
                ends[order] = now
                del running[order]
    return ends


# ------------------------------------------------------------------------------------------------------------- its pace


@settings(max_examples=40)
@given(MODELS, st.integers(1, 64), st.integers(0, 100_000), st.integers(0, 3000))
def test_whole_steps_take_the_sum_of_their_times(model: ServerModel, running: int, context: int, steps: int) -> None:
    pace = pace_of(model, running, context)
    exact = sum(model.step_s(running, context + running * step) for step in range(steps))
    kink = model.context_s * running / 8  # in the one step in which memory traffic overtakes arithmetic
    assert seconds_of(pace, steps) == pytest.approx(exact, rel=1e-9, abs=kink + 1e-12)


@settings(max_examples=40)
@given(MODELS, st.integers(1, 64), st.integers(0, 100_000), st.floats(0, 5000))
def test_tokens_are_the_inverse_of_seconds(model: ServerModel, running: int, context: int, tokens: float) -> None:
    pace = pace_of(model, running, context)
    assert tokens_in(pace, seconds_of(pace, tokens)) == pytest.approx(tokens, rel=1e-9, abs=1e-9)


# ---------------------------------------------------------------------------------------------- against a loop of steps


@settings(max_examples=40)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=16))
def test_answers_that_begin_together_end_exactly_when_a_loop_over_steps_ends_them(lengths: list[int]) -> None:
    arrivals = [(0.0, answering(order, length)) for order, length in enumerate(lengths)]
    exact = stepped(MODEL, arrivals)
    ends = run(joined(MODEL), arrivals)
    assert ends == pytest.approx(exact, rel=1e-9)
    by_length = [order for order, _ in sorted(ends.items(), key=lambda end: (end[1], end[0]))]
    assert by_length == sorted(range(len(lengths)), key=lengths.__getitem__)


@pytest.mark.parametrize("apart_s", [0.0, 0.0013, 0.05, 0.4])
def test_answers_that_come_in_the_middle_of_steps_end_within_a_step_or_two_of_the_loop(apart_s: float) -> None:
    """A loop lets an answer wait for the end of the step that is under way, here it begins at once: half a step each
    on the average, and never adds up."""
    arrivals = [(place * apart_s, answering(place, 50 + place * 7919 % 400)) for place in range(60)]
    exact, ends = stepped(MODEL, arrivals), run(joined(MODEL), arrivals)
    longest = MODEL.step_s(16, 16 * 460)
    assert max(abs(ends[order] - exact[order]) for order in exact) < 3 * longest
    assert max(ends.values()) == pytest.approx(max(exact.values()), rel=0.005)


# ------------------------------------------------------------------------------------------------- what always holds


@settings(max_examples=40)
@given(st.randoms(use_true_random=False), MODELS, st.booleans())
def test_every_token_is_decoded_once_whatever_happens(random: Random, model: ServerModel, stops: bool) -> None:
    server = joined(model, SwapModel(random.uniform(0, 0.5), stops))
    asked: list[Answering] = []
    now, version, loaded_at, tokens = 0.0, 0, None, 0
    for place in range(random.randint(1, 30)):
        now += random.uniform(0, 0.3)
        loaded_at, gone = _until(server, now, loaded_at)
        tokens += gone
        open_ones = [answer for answer in asked if not answer.over and not answer.past]
        match random.choice(["ask", "ask", "stop", "swap"]):
            case "ask":
                asked.append(answering(place, random.randint(1, 200), group=place // 3))
                server.ask(asked[-1], now)
            case "stop" if open_ones:
                tokens += server.stop(random.choice(open_ones), now)
            case "swap" if server.loading is None:
                version += 1
                loaded_at = server.swap(version, now)
        loaded_at = loaded_at or server.drained(now)
        assert server.running <= model.max_running
    _, gone = _until(server, float("inf"), loaded_at)
    tokens += gone
    assert all(answer.over or answer.past for answer in asked), "nobody is forgotten"
    assert server.load == server.running == server.context == 0
    for answer in asked:
        assert answer.over or sum(tokens for _, tokens in answer.past) == answer.length
        assert all(one[0] < other[0] for one, other in pairwise(answer.past))
        assert stops or len(answer.past) <= 1, "without interruptions an answer has one version"
    stopped = sum(answer.over for answer in asked)  # each may have lost the token that was under way
    assert tokens - 1e-3 <= server.decoded <= tokens + stopped + 1e-3


def _until(server: Server, now: float, loaded_at: float | None) -> tuple[float | None, int]:
    """Let the time pass: when weights are loaded after it, and how many tokens the answers had that ended."""
    tokens = 0
    while (at := server.next_end() if loaded_at is None else loaded_at) is not None and at <= now:
        if loaded_at is not None:
            server.swapped(at)
            loaded_at = None
            continue
        for answer in server.end(at):
            answer.past = server.spans(answer)
            tokens += answer.length
        loaded_at = server.drained(at)
        server.begin(at)
    return loaded_at, tokens


# --------------------------------------------------------------------------------------------------------- single cases


def test_the_prompt_of_a_group_is_computed_once() -> None:
    model = replace(STEADY, prefill_s=0.001)
    arrivals = [(0.0, answering(order, 100, prompt=500, group=7)) for order in range(4)]
    assert list(run(joined(model), arrivals).values()) == pytest.approx([0.5 + 100 * 0.01] * 4)


def test_more_than_max_running_wait_in_their_order() -> None:
    arrivals = [(0.0, answering(order, 100)) for order in range(5)]
    ends = run(joined(replace(STEADY, max_running=2)), arrivals)
    assert ends == pytest.approx({0: 1.0, 1: 1.0, 2: 2.0, 3: 2.0, 4: 3.0})


def test_whole_lengths_have_room_in_the_cache_and_who_is_longer_than_it_runs_alone() -> None:
    arrivals = [(0.0, answering(order, length)) for order, length in enumerate([40, 40, 200, 40])]
    ends = run(joined(replace(STEADY, cache=100)), arrivals)
    assert ends == pytest.approx({0: 0.4, 1: 0.4, 2: 2.4, 3: 2.8})


def test_a_swap_in_the_middle_computes_all_contexts_again_and_says_which_token_is_whose() -> None:
    model = replace(STEADY, prefill_s=0.001)
    server = joined(model, SwapModel(load_s=2.0))
    answer = answering(0, 100, prompt=50)
    server.ask(answer, 0.0)
    decoding = 0.05  # its prompt takes so long
    assert server.swap(1, decoding + 0.30) == pytest.approx(decoding + 2.30)
    assert server.next_end() is None
    server.swapped(decoding + 2.30)
    again = (50 + 30) * 0.001
    assert server.next_end() == pytest.approx(decoding + 2.30 + again + 0.70)
    assert server.end(decoding + 2.30 + again + 0.70) == [answer]
    assert server.spans(answer) == ((0, 30), (1, 70))
    assert server.recomputed == pytest.approx(80)


def test_a_swap_while_a_prompt_is_computed_has_it_computed_again() -> None:
    server = joined(replace(STEADY, prefill_s=0.01), SwapModel(load_s=2.0))
    server.ask(answering(0, 100, prompt=50), 0.0)
    server.swap(1, 0.2)
    server.swapped(2.2)
    assert server.next_end() == pytest.approx(2.2 + 0.5 + 1.0)
    assert server.stalled_s == pytest.approx(0.2 + 0.5)


def test_what_is_not_interruptible_ends_what_runs_and_begins_nothing_meanwhile() -> None:
    server = joined(STEADY, SwapModel(load_s=2.0, interruptible=False))
    running, waiting = answering(0, 100), answering(1, 100)
    server.ask(running, 0.0)
    assert server.swap(1, 0.5) is None
    server.ask(waiting, 0.6)
    assert server.end(1.0) == [running]
    assert server.spans(running) == ((0, 100),)
    assert server.drained(1.0) == pytest.approx(3.0)
    assert not server.is_busy
    server.swapped(3.0)
    assert server.next_end() == pytest.approx(4.0)


def test_what_had_arrived_from_a_lost_server_is_kept_as_of_the_oldest_version_that_can_have_drawn_it() -> None:
    server, other = joined(STEADY), joined(replace(STEADY, prefill_s=0.001))
    running, new = answering(0, 100), answering(1, 100)
    server.ask(running, 0.0)
    server.swap(1, 0.1)
    server.swapped(0.1)
    server.ask(new, 0.3)
    orphans = server.lose(0.405)
    assert orphans == [running, new]
    assert (running.kept, new.kept) == (40, 10)
    assert (running.past, new.past) == (((0, 40),), ((1, 10),))
    other.ask(running, 1.0)
    ends = 1.0 + (10 + 40) * 0.001 + 0.60
    assert other.next_end() == pytest.approx(ends)
    other.end(ends)
    assert other.spans(running) == ((0, 40), (0, 60))


def test_a_model_without_times_ends_everything_at_once() -> None:
    assert run(joined(FREE), [(1.0, answering(order, 50)) for order in range(3)]) == {0: 1.0, 1: 1.0, 2: 1.0}
