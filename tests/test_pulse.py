"""What makes a server stuck or sick, and what doesn't."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.rollout.pulse import SICK_REQUESTS, SICK_S, Errors, Pulse

STALL_S = 8.0
Look = tuple[int, int, int, int]  # running now; since the look before: ended, tokens, errors
looks = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from([0, 0, 0, 16]), st.integers(0, 6)), max_size=40
)


def judge(steps: list[Look]) -> list[str]:
    pulse, errors, ended, tokens = Pulse(STALL_S), Errors(), 0, 0
    found = []
    for running, more, drawn, failures in steps:
        ended, tokens = ended + more, tokens + drawn
        for _ in range(failures):
            errors.failed("answered 500")
        found.append(pulse.look(running, ended, tokens, errors))
    return found


@pytest.mark.slow
@given(looks)
def test_a_server_is_given_up_only_for_a_long_silence_or_for_many_errors_over_a_while(steps: list[Look]) -> None:
    silent_looks = int(STALL_S / 2.0)
    for index, why in enumerate(judge(steps)):
        since = next((i for i in range(index, -1, -1) if steps[i][2]), -1)  # the look at which tokens came last
        quiet = steps[max(0, index - silent_looks) : index + 1]
        if "stuck" in why:
            assert len(quiet) == silent_looks + 1
            assert all(running for running, *_ in quiet[1:])
            assert not any(ended or tokens for _, ended, tokens, _ in quiet[1:])
        if "sick" in why:
            row = [failures for *_, failures in steps[since + 1 : index + 1]]
            assert sum(row) >= SICK_REQUESTS
            assert sum(map(bool, row)) >= 2
            assert (len(row) - next(i for i, n in enumerate(row) if n)) * 2.0 >= SICK_S


def test_stuck_after_its_time_and_no_sooner() -> None:
    silence: list[Look] = [(5, 0, 0, 0)] * 5
    found = judge([(5, 0, 16, 0), *silence])
    assert found[:4] == [""] * 4
    assert found[4] == (
        "it is stuck: it lives, but no token of its 5 requests has arrived for 8 s (server.stall_timeout_s = 8)"
    )


def test_what_isnt_stuck() -> None:
    """Nothing to do; one answer of many that grows, the others being queued; requests that end."""
    assert not any(judge([(0, 0, 0, 0)] * 20))
    assert not any(judge([(200, 0, 0, 0), (200, 0, 0, 0), (200, 0, 4, 0)] * 10))
    assert not any(judge([(2, 1, 0, 0)] * 20))


def test_sick() -> None:
    assert not any(judge([(0, 0, 0, 200), *[(0, 0, 0, 0)] * 20])), "a burst is a hiccup"
    assert not any(judge([(0, 0, 0, 2), (0, 1, 64, 2)] * 20)), "others are answered"
    found = judge([(0, 2, 0, 2)] * 6)
    assert found[:5] == [""] * 5
    assert found[5] == "it is sick: 12 requests in a row failed over 10 s, the last one with: answered 500"


def test_a_swap_is_no_silence() -> None:
    pulse = Pulse(STALL_S)
    for _ in range(10):
        assert not pulse.look(5, 0, 0, Errors())
        assert not pulse.look(5, 0, 0, Errors())
        pulse.rest()
