"""Where the answer stands in a response, in time that grows with its length only."""

import pytest

from areal_async.messages import MathOptions
from areal_async.rewards.math.answers import find, find_in_gold

from .timing import seconds_of

BOX_ONLY, LAST_NUMBER = MathOptions(), MathOptions(last_number=True)


def answer(response: str, options: MathOptions = BOX_ONLY, *, cut: bool = False) -> str | None:
    found = find(response, "", options, cut=cut)
    return None if found is None else found.text


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"so $\boxed{ 5 }$.", "5"),
        (r"\fbox{42}", "42"),
        (r"\boxed 5", "5"),
        (r"so \boxed5.", "5"),
        (r"$\boxed 42$ yes", "42"),
        (r"\boxed\frac{1}{2} it is", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\\boxed{7}", "7"),  # as badly escaped data has it
        (r"\boxed{\left\{1,2\right\}}", r"\left\{1,2\right\}"),
        (r"\boxed{ 5 \} }", r"5 \}"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        (r"\boxed{x = \boxed{5}, y = 3}", r"x = \boxed{5}, y = 3"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{a{ and \boxed{4}", "4"),  # the first has no end
        (r"\boxed{5} and \boxed{6", "5"),
        (r"} \boxed{5}", "5"),
        (r"\boxed{5}, in the form \boxed{}", "5"),
        ("\\boxed{a\n+b}", "a\n+b"),
        (r"\boxedness{5} is prose", None),
        (r"\boxed{", None),
        (r"\boxed{}", None),
        ("#### 72", "72"),
        ("It is\n#### -3\nand more", "-3"),
        ("#### Step 3\nand then prose", None),
        ("#### 3\nno, it is\n#### 4", "4"),
        (r"#### 5" "\n" r"\boxed{6}", "6"),
        ("42", "42"),
        ("-3", "-3"),
        (r" $x \ge 5$ ", r"$x \ge 5$"),
        ("28 percent", "28 percent"),
        ("(B) since it is so", "B"),
        ("C", "C"),
        ("A thing", None),
        ("it is 42", None),
        ("The answer is 42", None),
        ("", None),
    ],
)
def test_where_only_marked_answers_count(response: str, expected: str | None) -> None:
    assert answer(response) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("The total is 72 clips, altogether.", "72"),
        ("between 3 and 1,234.", "1,234"),
        ("it is -3", "-3"),
        ("10-3 is seven", "3"),
        ("it costs $29.00.", "$29.00"),
        ("it is 28 percent", "28 percent"),
        ("about 3.14, I think", "3.14"),
        ("chance of 1/6 each", "1/6"),
        ("Prose first.\nx = 5", "x = 5"),
        (r"so it is $\frac{\sqrt{3}}{2}$.", r"\frac{\sqrt{3}}{2}"),
        (r"so it is \(x = 2\)", "x = 2"),
        (r"either $12$ or 13 of them", "13"),
        (r"\boxed{5} of 7", "5"),
        (r"the box \boxed{6 has no end", "6"),
        ("none at all", None),
    ],
)
def test_where_the_last_number_counts(response: str, expected: str | None) -> None:
    assert answer(response, LAST_NUMBER) == expected


@pytest.mark.parametrize(
    ("gold", "expected"),
    [
        ("72", "72"), (" 72\n", "72"), ("48/2 = <<48/2=24>>24 clips\n#### 72", "72"), ("#### 1,234", "1,234"),
        (r"We get $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"), (r"$\boxed{1}$ and $\boxed{2}$.", "1, 2"), ("", ""),
    ],
)  # fmt: skip
def test_a_gold_may_be_a_whole_solution(gold: str, expected: str) -> None:
    assert find_in_gold(gold) == expected


def test_boxes_of_one_sentence_stand_together() -> None:
    for response, expected in (
        (r"$x=\boxed{2}$ and $y=\boxed{3}$.", ("2", "3")),
        (r"\boxed{2}. So \boxed{3}", ("3",)),
        (r"\boxed{2}" + " and so on" * 10 + r" \boxed{3}", ("3",)),
        (r"\boxed{\boxed{5}}", (r"\boxed{5}",)),
        (r"\boxed{1}, \boxed{}, \boxed{2}", ("1", "2")),
    ):
        found = find(response, "", BOX_ONLY, cut=False)
        assert found is not None
        assert found.boxes == expected


def test_a_box_is_as_long_as_it_is() -> None:
    content = "x+" * 5000 + "1"
    assert answer("long before " * 1000 + rf"\boxed{{{content}}}") == content


REPEATED = [
    "a", "1", "1,", r"\boxed{", "{}", r"\boxed{5} ", "<think>", "####", "#### \n", "$1", " \n", "\\", r"\boxed5 ",
    "x y ", "1 ", r"\boxed ", r"\(1", "-1.5/2 ", "\n\n", r"\boxed{}", r"\{", "percent ", r"\fbox{{}", "$$", "(A) ",
    " ", r"\boxed{5",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", r"\boxed", r"\boxed{", r"\boxed{5} "])
def test_m26_repeated_text_takes_time_by_its_length(before: str) -> None:
    """As long as it takes Python to count to 4,500,000 (0.05 s), whatever else the machine has to do: the better of two
    of each, by turns. Where the last number counts, all rules are tried."""
    for piece in REPEATED:
        text = before + piece * (200_000 // len(piece))
        seconds, yardstick = [], []
        for _ in range(2):
            seconds.append(seconds_of(lambda text=text: find(text, "", LAST_NUMBER, cut=False), 1))
            yardstick.append(seconds_of(count, 1))
        assert min(seconds) < min(yardstick), piece


def count() -> None:
    for _ in range(4_500_000):
        pass
