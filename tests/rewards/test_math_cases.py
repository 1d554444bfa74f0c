"""Cases of graders that were wrong: each with what is right, and how the kind of it is judged here."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from areal_async.messages import FinishReason, MathOptions, RewardSpec, ScoreTask
from areal_async.rewards.math import grader
from areal_async.rewards.sandbox import Sandbox
from areal_async.rewards.verdicts import Check, Grader, Outcome

from ..waiting import SLACK_S

LAST_NUMBER = MathOptions(last_number=True)
TOWER = r"\boxed{\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}}"
LONG_BOX = "So it is " + "+".join(f"x_{{{index}}}" for index in range(30))  # 190 characters


@pytest.fixture(scope="module")
def graded() -> Grader:
    return grader(RewardSpec())


def outcome(
    graded: Grader, gold: str | None, response: str, *, prompt: str = "", finish: FinishReason = "stop"
) -> Outcome:
    return graded(Check(prompt=prompt, response=response, answer=gold, finish=finish, columns={}))


CASES = [
    ("M01", r"\frac{1}{2}", r"\boxed{\frac{1}{2}}", "right"),
    ("M01", r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", "wrong"),
    ("M01", r"\frac{1}{23}", r"\boxed{\frac{12}{3}}", "wrong"),
    ("M01", "42", r"\fbox{42}", "right"),
    ("M03", "(0,1]", r"\boxed{[0,1)}", "wrong"),
    ("M03", "[0,1]", r"\boxed{(0,1)}", "wrong"),
    ("M03", r"[-1,-\frac12)\cup(-\frac12,0)", r"\boxed{[-1,-0.5)\cup(-0.5,0)}", "right"),
    ("M04", "9500", r"\boxed{\$9{,}500}", "right"),
    ("M04", "8000", r"\boxed{8,000}", "right"),
    ("M04", "11111111100", r"\boxed{11,\! 111,\! 111,\! 100}", "right"),
    ("M04", "1,2", r"\boxed{12}", "wrong"),
    ("M04", "52_8", r"\boxed{528}", "wrong"),
    ("M06", r"28\%", "28 percent", "right"),
    ("M06", r"28\%", "$28$ %", "right"),
    ("M06", r"50\%", r"\boxed{0.5}", "right"),
    ("M06", "50", r"\boxed{0.5}", "wrong"),
    ("M07", r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}", "wrong"),
    ("M07", r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}", "wrong"),
    ("M07", "12:00", r"\boxed{1:00}", "wrong"),
    ("M07", r"\pm 2021", r"\boxed{2021}", "wrong"),
    ("M08", "(2,4)", r"\boxed{(2,4)}", "right"),
    ("M08", "[2,5)", r"\boxed{[2,5)}", "right"),
    ("M08", r"1-\frac{1}{\mathrm{e}}", r"\boxed{1-\frac{1}{\mathrm{e}}}", "right"),
    ("M08", r"1-\frac{1}{\mathrm{e}}", r"\boxed{1+\frac{1}{\mathrm{e}}}", "wrong"),
    ("M09", "2", r"I first got \boxed{1}. After checking, the value is \boxed{2}.", "right"),
    ("M09", "2", r"\boxed{1} first, then \boxed{2}, finally \boxed{3}", "wrong"),
    ("M09", "2", r"\boxed{2 \text{ or } 3}", "wrong"),
    ("M11", "17", "We see 17 in the middle, and there is more to say about this.", "no_answer"),
    ("M12", "42", r"<think> maybe \boxed{42}", "no_answer"),
    ("M12", "42", r"<think> \boxed{42} </think> So \boxed{43}", "wrong"),
    ("M12", "42", r"<think> x </think> \boxed{42}", "right"),
    ("M13", "forty two", r"\boxed{43}", "bad_data"),
    ("M13", "", "", "bad_data"),
    ("M13", None, r"\boxed{1}", "bad_data"),
    ("M18", "(x-1)(x+2)", r"\boxed{x^2+x-2}", "right"),
    ("M22", "5", r"\boxed{x=5}", "right"),
    ("M22", "a+3z=0", r"\boxed{0}", "wrong"),
    ("M22", "3x-y+13=0", r"\boxed{3x+4y+14=0}", "wrong"),
    ("M22", "34x+45y-20z+100=0", r"\boxed{-34x-45y+20z-100=0}", "right"),
    ("M22", r"x \le 5", r"5 \ge x", "right"),
    ("M23", "E", r"\boxed{\text{E}}", "right"),
    ("M23", "E", r"\boxed{E: some option text}", "right"),
    ("M23", "E", r"\boxed{C} ... \boxed{E}", "right"),
    ("M23", "A", "A. Because B is not valid", "right"),
    ("M26", "1", "and so on, " * 20_000, "no_answer"),
    ("M26", LONG_BOX[9:], LONG_BOX[:9] * 1000 + rf"\boxed{{{LONG_BOX[9:]}}}", "right"),
    ("M26", LONG_BOX[9:] + "+x", LONG_BOX[:9] * 1000 + rf"\boxed{{{LONG_BOX[9:]}}}", "wrong"),
]


@pytest.mark.parametrize(("case", "gold", "response", "verdict"), CASES)
def test_cases(graded: Grader, case: str, gold: str | None, response: str, verdict: str) -> None:
    assert outcome(graded, gold, response).verdict == verdict


@pytest.mark.parametrize(
    ("gold", "response", "verdict"),
    [
        ("72", "The total is 72 clips, altogether.", "right"),
        ("#### -3", "-3", "right"),
        ("#### -3", "3", "wrong"),
        ("#### 1,234", "The answer is 1234.", "right"),
        ("29", "$29.00", "right"),
        ("17", "We see 17 in the middle, and there is more to say about this.", "right"),  # M11, where it is allowed
        ("17", "We see 17 in the middle, and there are 2 things to say about this.", "wrong"),
        ("17", "It is 17, <think> or 18", "no_answer"),
        ("17", "nothing", "no_answer"),
    ],
)
def test_m20_the_last_number_where_it_is_allowed(gold: str, response: str, verdict: str) -> None:
    assert outcome(grader(RewardSpec(math=LAST_NUMBER)), gold, response).verdict == verdict


def test_m12_thoughts_are_no_answer_and_a_template_may_begin_them() -> None:
    off, required = (grader(RewardSpec(math=MathOptions(thinking=mode))) for mode in ("off", "required"))  # type: ignore[arg-type]
    auto = grader(RewardSpec())
    assert outcome(off, "5", r"no tags at all, \boxed{5}").verdict == "right"
    assert outcome(off, "5", r"<think> \boxed{5}").verdict == "right"
    assert outcome(auto, "5", r"no tags at all, \boxed{5}").verdict == "right"
    assert outcome(auto, "5", r"a</think> \boxed{6} or</think> \boxed{5}").verdict == "right"
    assert outcome(auto, "6", r"a</think> \boxed{6} or</think> so").verdict == "no_answer"
    assert outcome(required, "5", r"no tags at all, \boxed{5}").verdict == "no_answer"
    assert outcome(required, "5", r"thought </think> \boxed{5}").verdict == "right"
    for graded in (auto, required):
        assert outcome(graded, "5", r"it is \boxed{5}", prompt="Solve it.\n<think>\n").verdict == "no_answer"
        assert outcome(graded, "5", r"is it \boxed{6}?</think>\boxed{5}", prompt="<think>\n").verdict == "right"
        assert outcome(graded, "5", r"<think>a</think>\boxed{5}<think>\boxed{6}").verdict == "no_answer"


def test_m08_an_answer_that_is_the_gold_sign_for_sign_is_right_whatever_it_means(graded: Grader) -> None:
    for gold in ("forty two", r"\frac{{", "?!", r"\begin{cases}a&b", "x ^ ^ 2", "NaN", "()", "see figure 3", "{"):
        assert outcome(graded, gold, gold).verdict == "right", gold


def test_m13_a_gold_that_says_nothing_is_never_a_reward(graded: Grader) -> None:
    for gold in ("forty two", "?!", "see figure 3", r"\frac", r"\text{twenty one}", "  ", r"\boxed{}"):
        for response in (r"\boxed{43}", "nothing", ""):
            assert outcome(graded, gold, response).verdict == "bad_data", gold


def test_m09_the_boxes_of_one_sentence_may_be_one_answer_of_several_parts(graded: Grader) -> None:
    said = r"Either way, $x=\boxed{2}$ or $x=\boxed{3}$."
    found = outcome(graded, "2, 3", said)
    assert (found.verdict, found.extracted) == ("right", "2, 3")
    assert outcome(graded, "3", said).verdict == "right"  # the last one counts
    assert outcome(graded, "2", said).verdict == "wrong"
    assert outcome(graded, "(2, 3)", said).verdict == "right"
    assert outcome(graded, "(3, 2)", said).verdict == "wrong"
    assert outcome(graded, r"\{3, 2\}", said).verdict == "right"
    assert outcome(graded, "2, 3", r"First \boxed{2}. Then \boxed{3}.").verdict == "wrong"
    assert outcome(graded, "2, 3", r"\boxed{1}, \boxed{2} and \boxed{3}").verdict == "wrong"


def test_a_cut_response_counts_only_with_a_whole_box(graded: Grader) -> None:
    for response, verdict in (
        (r"so \boxed{5} and", "right"), (r"so \boxed{5} or \boxed{6", "no_answer"), ("#### 5", "no_answer"),
        ("#### 5\n", "right"), ("5", "no_answer"), (r"\boxed{5", "no_answer"),
    ):  # fmt: skip
        assert outcome(graded, "5", response, finish="length").verdict == verdict, response
    lenient = grader(RewardSpec(math=LAST_NUMBER))
    assert outcome(lenient, "5", "it is 5", finish="length").verdict == "no_answer"


def test_the_outcome_says_what_was_taken_and_how_it_was_compared(graded: Grader) -> None:
    for gold, response, extracted, why in (
        ("1/2", r"\boxed{1/2}", "1/2", "the same text (box)"),
        ("1/2", r"\boxed{ \left. 1/2 \right. }", r"\left. 1/2 \right.", "the same after cleaning"),
        ("1/2", r"\boxed{0.5}", "0.5", "equal in value"),
        ("1/2", r"\boxed{0.6}", "0.6", "not equal to 1/2"),
        ("1/2", r"\boxed{?}", "?", "can't be read as mathematics: ?"),
        ("E", r"\boxed{(D)}", "(D)", "the choice D"),
        ("1/2", "half", "", "there is no box and no `####`"),
        ("1/2", r"<think>\boxed{1/2}", "", "only thought: there is no `</think>`, or another `<think>` after it"),
    ):
        found = outcome(graded, gold, response)
        assert (found.extracted, found.why) == (extracted, why)


def test_what_is_raised_is_not_wrong(graded: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    """M18: the sandbox makes a crash of it, with a counter of its own."""
    monkeypatch.setattr("areal_async.rewards.math.equal", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        outcome(graded, "5", r"\boxed{6}")


def test_m16_any_thread_may_grade(graded: Grader) -> None:
    pair = ("(x-1)(x+2)", r"\boxed{x^2+x-2}")
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(outcome(graded, *pair).verdict))
    thread.start()
    thread.join()

    async def in_an_executor() -> str:
        with ThreadPoolExecutor(1) as executor:
            return (await asyncio.get_running_loop().run_in_executor(executor, outcome, graded, *pair)).verdict

    found += [asyncio.run(in_an_executor()), outcome(graded, *pair).verdict]
    assert found == ["right"] * 3


@pytest.mark.slow
def test_m15_a_tower_of_powers_ends_within_its_limit_and_harms_no_other_check() -> None:
    def task(number: int, response: str) -> ScoreTask:
        return ScoreTask(
            sample=str(number), attempt=0, prompt="", answer="1", finish="stop", columns={}, response=response
        )

    bombs = [TOWER, r"\boxed{9^{9^{9}}}", r"\boxed{1000000!}", r"\boxed{(x+y+1)^{5000}}", rf"\boxed{{{'(' * 5000}}}"]
    bombs += [rf"\boxed{{{'2^{' * 2000}1{'}' * 2000}}}", rf"\boxed{{{'9' * 100_000}}}", "x" * 200_000]
    with Sandbox(RewardSpec(function="math", timeout_s=5.0, concurrent=4)) as sandbox:
        began = time.monotonic()
        for number in range(32):
            response = bombs[number] if number < len(bombs) else rf"\boxed{{{number - 20}}}"
            sandbox.submit(number, task(number, response), b"")
        verdicts = {}
        for _ in range(32):
            received = sandbox.next_result()
            assert received is not None
            verdicts[received[0]] = received[1].verdict
            assert received[1].seconds < 5.0 + SLACK_S
        assert time.monotonic() - began < 2 * (5.0 + SLACK_S)
    assert {verdicts[number] for number in range(len(bombs))} <= {"wrong", "timeout", "no_answer"}
    assert [number for number in range(len(bombs), 32) if verdicts[number] == "right"] == [21]
