"""What must hold for every answer, on answers as models write them."""

import re
from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from areal_async.messages import RewardSpec
from areal_async.rewards.math import grader
from areal_async.rewards.verdicts import Check

GRADED: Final = grader(RewardSpec())

WRITTEN: Final = r"""
@ | -@ | @.@ | -0.0@ | @,001 | @ \times 10^{@} | \frac{@}{1000003} | -\frac{@}{1000003} | @\frac{@}{1000003}
@/1000003 | @\sqrt{@} | \sqrt[@]{@} | \frac{@\pi}{@} | @\pi | e^{@} | \ln @ | \log_{@} 1000003 | @! | 2^{@}
@^{101} | @+@i | @-@i | @\% | @^\circ | @\text{ cm} | @ \text{ miles per hour} | \$@.@ | \sqrt{@}+\sqrt{@}
\frac{\sqrt{@}}{1000003} | (@,@) | (@, -@, @) | [@, \infty) | (-\infty, @] | (-@, @] | [-@,@)
(-@, 0) \cup (0, @) | \{@, -@\} | \{@\} | @, -@ | \pm @ | @x^2-@x+@ | x^{@}+@ | (x+@)(x-@) | \frac{x+@}{x-@}
@a+@b | @\sin x + @ | \sin(@x) | @xy | a_{@} | 2^{x+@} | \sqrt{x+@} | |x-@| | x=@ | y=@x+@ | x^2+y^2=@ | x \le @
x > @ | -@<x<@ | x \in [-@, @] | x=@, y=@ | x = @ \text{ or } x = -@ | f(x) = @x
\begin{pmatrix} @ & 0 \\ 0 & @ \end{pmatrix} | \begin{pmatrix} @ \\ @ \end{pmatrix} | @:1000003 | @_{@}
\binom{1000003}{@} | \left(\frac{@}{1000003}, -@\right) | \left[\sqrt{@}, @\pi\right] | \overline{@}
\lfloor \pi^{@} \rfloor
"""
"""Every number matters in each of them."""
TEMPLATES = [template.strip() for template in re.split(r" \| |\n", WRITTEN) if template.strip()]

WORDS = [
    r"\text{Yes}",
    "Monday",
    r"\text{no solution}",
    "E",
    r"\text{(C)}",
    r"\emptyset",
    r"\mathbb{R}",
    "xy",
    r"\infty",
]
PRIMES = (
    7,
    11,
    13,
    17,
    19,
    23,
    29,
    31,
    37,
    41,
    43,
    47,
    53,
    59,
    61,
    67,
    71,
    73,
    79,
    83,
    89,
    97,
)  # none a square or such
SIGNS = {"(": "[", "[": "(", ")": "]", "]": ")"}


@st.composite
def answers(draw: st.DrawFn) -> str:
    template = draw(st.sampled_from(TEMPLATES))
    return re.sub("@", lambda _: str(draw(st.sampled_from(PRIMES))), template)


def verdict(gold: str, answer: str) -> str:
    response = rf"After all, it is $\boxed{{{answer}}}$."
    return GRADED(Check(prompt="", response=response, answer=gold, finish="stop", columns={})).verdict


SIZED = re.compile(r"(?<!\\)(?<!right)(?<!left)([()])")


def sized(text: str) -> str:
    if text.count("(") != text.count(")") or r"\left" in text:
        return text
    return SIZED.sub(lambda bracket: (r"\left" if bracket[1] == "(" else r"\right") + bracket[1], text)


def spaced(text: str) -> str:
    for sign, wide in ((",", ", "), ("=", " = "), ("+", " + "), (", 001", ",001")):
        text = text.replace(sign, wide)
    return f" {text} "


RESTYLED: Final[dict[str, Callable[[str], str]]] = {
    "spaces": spaced,
    "thin spaces": lambda text: rf"\,{text}\;".replace("=", r"\;=\;"),
    "sizes": sized,
    "fractions": lambda text: text.replace(r"\frac", r"\dfrac"),
    "dollars": lambda text: f"${text}$" if r"\$" not in text else text,
    "full stop": lambda text: f"{text}.",
    "unicode": lambda text: text.replace("-", "−").replace(r"\pi", "π").replace(r"\times", "×").replace(r"\le ", "≤ "),
    "braces": lambda text: re.sub(r"\^(\d)(?!\d)", r"^{\1}", text),
    "value": lambda text: f"x = {text}" if re.fullmatch(r"-?\d+(?:\.\d+)?", text) else text,
}


def check_restyled(answer: str) -> None:
    for name, restyled in RESTYLED.items():
        assert verdict(answer, restyled(answer)) == "right", name
        assert verdict(restyled(answer), answer) == "right", name


def changes(answer: str) -> list[str]:
    """Answers in which one thing is another: each number, each bracket of an interval, a sign."""
    found = []
    for number in re.finditer(r"\d+", answer):
        digits = number[0]
        if digits not in ("0", "001", "10"):
            found.append(answer[: number.start()] + str(int(digits) + 1) + answer[number.end() :])
    if re.fullmatch(r"[\[(][^()]*,[^()]*[\])]", answer) and answer.count(",") == 1 and "infty" not in answer:
        found += [SIGNS[answer[0]] + answer[1:], answer[:-1] + SIGNS[answer[-1]]]
    if answer[0] == "-" and "<" not in answer:
        found.append(answer[1:])
    return found


def check_changed(answer: str) -> None:
    for other in changes(answer):
        assert verdict(answer, other) == "wrong", other
        assert verdict(other, answer) == "wrong", other


FIXED: Final = [
    template.replace("@", str(PRIMES[index % 7]), 1).replace("@", "29") for index, template in enumerate(TEMPLATES)
]


@pytest.mark.parametrize("answer", [*FIXED, *WORDS])
def test_the_gold_is_right(answer: str) -> None:
    assert verdict(answer, answer) == "right"
    assert verdict(answer, f" {answer} ") == "right"
    assert verdict(answer, "1000033") == "wrong"  # so the gold was read


@pytest.mark.slow
@pytest.mark.parametrize("answer", FIXED)
def test_another_style_is_right_and_a_change_is_wrong(answer: str) -> None:
    check_restyled(answer)
    check_changed(answer)


@pytest.mark.slow
@settings(derandomize=True, max_examples=300, deadline=None)
@given(answers())
def test_whatever_the_numbers(answer: str) -> None:
    check_restyled(answer)
    check_changed(answer)


@pytest.mark.slow
@settings(derandomize=True, max_examples=300, deadline=None)
@given(answers(), answers())
def test_it_does_not_matter_which_of_the_two_is_the_gold(one: str, other: str) -> None:
    assert verdict(one, other) == verdict(other, one)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.text(max_size=40) | st.text("\\{}$#()[]<>1x ", max_size=20))
def test_what_is_the_gold_sign_for_sign_is_right_even_if_it_is_junk(text: str) -> None:
    outcome = GRADED(Check(prompt="", response=text, answer=text, finish="stop", columns={}))
    assert outcome.verdict == ("right" if text.strip() and outcome.verdict != "bad_data" else "bad_data")
    assume(text.strip() and "oxed" not in text and "####" not in text)
    assert outcome.verdict == "right"


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    st.text(max_size=40) | st.text("\\{}$#()[]^_-+=<>%!|1x. ", max_size=20), st.sampled_from(["5", "x^2+1", "(1,2)"])
)
def test_junk_is_never_right_and_never_raises(text: str, gold: str) -> None:
    assume(text.strip(" .,$~") not in gold)
    response = rf"\boxed{{{text}}}"
    outcome = GRADED(Check(prompt="", response=response, answer=gold, finish="stop", columns={}))
    assert outcome.verdict in ("wrong", "no_answer")


TASKS = [
    "simple_equations", "polynomial_equations", "decimal_arithmetic", "fraction_simplification", "complex_arithmetic",
    "simple_integration", "basic_arithmetic", "prime_factorization", "polynomial_multiplication", "gcd",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_tasks_of_reasoning_gym(task: str) -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    for row in reasoning_gym.create_dataset(task, size=10, seed=1):
        answer = row["answer"]
        assert verdict(answer, answer) == "right"
        assert verdict(answer, "1000033") == "wrong"
