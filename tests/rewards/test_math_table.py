"""Pairs of a gold and an answer, with what mathematics says of them. Where it leaves the question open, docs/rewards.md
says what was decided, and the pair is in the table `DECIDED`."""

import pytest

from areal_async.messages import MathOptions, RewardSpec
from areal_async.rewards.math import grader
from areal_async.rewards.verdicts import Check, Grader


@pytest.fixture(scope="module")
def graded() -> Grader:
    return grader(RewardSpec())


def verdict(graded: Grader, gold: str, answer: str) -> str:
    check = Check(prompt="", response=rf"So it is $\boxed{{{answer}}}$.", answer=gold, finish="stop", columns={})
    return graded(check).verdict


EQUAL = [
    # whole numbers, decimals, how they are written
    ("42", "42"), ("42", " 42 "), ("42", "42."), ("42", "42.0"), ("42", "+42"), ("-7", "−7"), ("-7", "- 7"),
    ("0.5", ".5"), ("0.50", "0.5"), ("1000000", "10^6"), ("12345", "12,345"), ("12345", "12{,}345"),
    ("12345", r"12\,345"), ("12345", "12 345"), ("1234567.5", "1,234,567.5"), ("0.001", "10^{-3}"),
    ("3.0\\times 10^8", "300000000"), ("300000000", "3*10^8"), ("1.5", r"1.5 \times 10^0"), ("42", r"\mathbf{42}"),
    ("42", r"\text{42}"), ("42", r"4\cdot 10+2"), ("5", "{5}"), ("007", "7"), ("-0", "0"),
    # fractions and mixed numbers
    (r"\frac{1}{2}", r"\frac12"), (r"\frac{1}{2}", r"\dfrac{1}{2}"), (r"\frac{1}{2}", "1/2"), (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", r"\frac{2}{4}"), (r"\frac{3}{2}", r"1\frac{1}{2}"), (r"\frac{3}{2}", "1 1/2"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"), (r"-\frac{1}{2}", r"\frac{1}{-2}"),
    (r"\frac{1}{2}", r"\left(\frac{1}{2}\right)"),
    (r"\frac{7}{3}", r"2 + \frac{1}{3}"), (r"\frac{1}{3}", r"\frac{1/2}{3/2}"), (r"\frac{1}{2}", "½"),
    ("0.25", r"\tfrac14"), (r"\frac{\pi}{6}", r"\frac{1}{6}\pi"), (r"\frac{1}{x}", "x^{-1}"),
    (r"1\frac{4}{5}", "1.8"), (r"\frac{5}{4}", r"5 \div 4"), (r"0.\overline{3}", r"\frac{1}{3}"),
    (r"0.1\overline{6}", r"\frac16"), (r"\frac{12}{99}", r"0.\overline{12}"),
    # roots, powers, constants, logarithms, factorials
    (r"\sqrt{2}", r"\sqrt2"), (r"2\sqrt{2}", r"\sqrt{8}"), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"\sqrt{3}", "3^{1/2}"), (r"\sqrt[3]{8}", "2"), (r"5\sqrt{3}", "5√3"), (r"\sqrt{12}", "2√3"),
    (r"3+2\sqrt{2}", r"(1+\sqrt{2})^2"), (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}"), (r"2\pi", "2π"),
    ("e^2", r"\mathrm{e}^{2}"),
    (r"\ln 4", r"2\ln 2"), (r"\log_{2} 8", "3"), ("2^{10}", "1024"), ("120", "5!"), (r"\binom{5}{2}", "10"),
    ("2^{100}", r"4^{50}"), (r"\frac{1}{2^{99}}", "2^{-99}"), ("i", r"\sqrt{-1}"), ("-1", "i^2"), ("2+3i", "3i+2"),
    (r"\frac{1}{1+i}", r"\frac{1-i}{2}"), (r"\sin 30^\circ", r"\frac{1}{2}"), (r"\cos\frac{\pi}{3}", "0.5"),
    (r"\tan 45^{\circ}", "1"), (r"\frac{1+\sqrt{5}}{2}", r"\frac{2}{\sqrt{5}-1}"), ("|{-3}|", "3"),
    # polynomials and other expressions
    ("x^2+2x+1", "(x+1)^2"), ("x^2+2x+1", "1+2x+x^2"), ("(x-1)(x+2)", "x^2+x-2"), ("2x", "x+x"), ("a+b", "b+a"),
    ("2(x+y)", "2x+2y"), (r"\frac{x^2-1}{x-1}", "x+1"), ("x^2 y", "y x^2"), ("2ab", r"2 \cdot a \cdot b"),
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"), (r"\sin^2 x+\cos^2 x", "1"), (r"\alpha+\beta", r"\beta + \alpha"),
    ("x_1+x_2", "x_2+x_1"), ("-x", r"\frac{x}{-1}"), ("2^{n+1}", r"2 \cdot 2^n"), ("x²+1", "x^2+1"),
    # percent, money, units, angles
    (r"28\%", "28%"), (r"28\%", r"28 \text{ percent}"), (r"50\%", "0.5"), ("0.5", r"50\%"), (r"12.5\%", r"\frac{1}{8}"),
    (r"\$18.90", "18.90"), ("18.90", r"\$18.9"), (r"\$9{,}500", "9500"), ("5", r"5 \text{ cm}"), (r"5\text{ cm}", "5"),
    (r"5\text{ cm}", "5 cm"), (r"5 \text{ cm}^2", r"5\ \mathrm{cm}^2"), (r"5 \text{ m}", r"500 \text{ cm}"),
    (r"10\text{ square feet}", r"10 \text{ ft}^2"), ("72", r"72 \text{ clips}"), ("72", "72 clips"),
    ("5", r"5 \text{ units}^2"),
    (r"90^\circ", "90"),
    ("90", r"90^{\circ}"), ("90", "90°"), ("90", r"90 \text{ degrees}"), (r"2\pi \text{ cm}", r"2\pi"),
    (r"3600\text{ seconds}", r"1 \text{ hour}"), (r"25 \text{ mph}", r"25 \text{ miles per hour}"),
    (r"5 \text{ dollars}", r"\$5"),
    (r"3\text{ million}", "3000000"), ("12", r"12\text{ inches}"), (r"50\text{ cents}", r"\$0.50"),
    # tuples, lists, sets
    ("(1,2)", "(1, 2)"), ("(1,2)", r"\left(1,2\right)"), (r"(\frac{1}{2},3)", "(0.5,3)"), ("(2,4)", "(2,4)"),
    ("1,2,3", "1, 2, 3"), ("1,2,3", "3, 2, 1"), ("1,2,3", r"1, 2 \text{ and } 3"), ("2, 3", r"2 \text{ or } 3"),
    (r"\{1,2\}", r"\{2,1\}"), (r"\{1,2,3\}", r"\left\{3, 2, 1\right\}"), (r"\{1,2\}", r"\{1,2,2\}"), ("1,-1", r"\pm 1"),
    (r"\pm 3", "3, -3"), (r"\emptyset", r"\varnothing"), (r"\emptyset", r"\{\}"), ("(1,1000)", "(1, 1000)"),
    ("(1,234)", "(1, 234)"), ("(1000,2)", "(1,000, 2)"),
    # intervals and unions
    ("[0,1]", "[0, 1]"), ("(0,1]", r"\left(0, 1\right]"), ("[2,5)", "[2,5)"), ("[0.5,1]", r"[\frac12, 1]"),
    (r"(-\infty,0)\cup(0,\infty)", r"(0,\infty)\cup(-\infty,0)"), (r"(-\infty, 3]", "(-∞,3]"),
    (r"[-1,-\frac12)\cup(-\frac12,0)", r"[-1,-0.5) \cup (-0.5,0)"), (r"(0,\infty)", r"(0,+\infty)"),
    (r"[1,3]", r"x \in [1,3]"),
    # equations and inequalities
    ("5", "x=5"), ("x=5", "5"), ("x=5", "5=x"), ("y=2x+1", "y=1+2x"), ("y=2x+1", "2x-y+1=0"), ("x+y=1", "2x+2y=2"),
    ("x^2+y^2=4", "y^2 + x^2 - 4 = 0"), (r"x \le 5", r"5 \ge x"), (r"x \leq 5", "x ≤ 5"), ("x>2", "2<x"),
    ("1<x<3", "3>x>1"), (r"x \ge 5", r"2x \ge 10"), ("1:2", "1:2"), ("x=1,y=2", "y=2, x=1"),
    # matrices and vectors
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    (r"\begin{pmatrix}\frac12\\3\end{pmatrix}", r"\begin{pmatrix}0.5\\[2pt]3\end{pmatrix}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&2^2\\\end{pmatrix}"),
    # words and choices
    ("E", r"\text{E}"), ("E", "(E)"), ("E", "E."), ("E", "E: some option text"), ("E", r"\textbf{(E)}\ 12"),
    (r"\text{(C)}", "C"),
    (r"\text{Yes}", "yes"), ("Monday", r"\text{Monday}"), (r"\text{even}", "even"), ("True", r"\text{True}"),
    (r"\text{Evelyn}", r"\textbf{Evelyn}"), ("52_8", "52_{8}"), ("June 20", r"\text{June 20}"),
    (r"\text{10:30 a.m.}", "10:30 AM"), ("5 PM", "5:00 pm"), ("3:5", r"3 \text{ to } 5"),
    ("4", r"4\text{th}"), (r"\mathbb{R}", r"\text{all real numbers}"), (r"\frac94\pi", r"\frac{9}{4}\pi"),
    ("f(2) < f(1)", "f(1)>f(2)"),
    (r"2\sin b\cos a", r"2\cos a\sin b"), (r"\tan^2 y+1", r"\sec^2 y"),
    ("2x+4y-3=0", r"y=-\frac{1}{2}x+\frac{3}{4}"), ("x<1", "-x>-1"),
    (r"\frac{x^2}{4}+\frac{y^2}{3}=1", "3x^2+4y^2=12"), (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
    ("1,-2", "n = 1, n = -2"), ("(7,6)", "(x,y)=(7,6)"),
    (r"\frac{-b\pm\sqrt{b^2-4ac}}{2a}", r"\frac{-b+\sqrt{b^2-4ac}}{2a}, \frac{-b-\sqrt{b^2-4ac}}{2a}"),
    ("252", r"\frac{10!}{5!\cdot 5!}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\left[\begin{array}{cc}1 & 2 \\ 3 & 4\end{array}\right]"),
    (r"\langle 1,2,3\rangle", "(1,2,3)"),
    ("12:00", "12:00"),
]  # fmt: skip

DIFFERENT = [
    # a number, a sign, a bracket, an exponent
    ("42", "43"), ("42", "-42"), ("42", "4.2"), ("42", "420"), ("42", "4 2"), ("42", "42x"), ("3.14", "3.15"),
    ("12", "1,2"),
    ("1,2", "12"), ("1,234", "1.234"), ("1234", "1, 234"), ("0", "1"), ("10^6", "10^5"), ("10^6", "10^{-6}"),
    ("1", "0.99"),
    (r"\frac{1}{2}", r"\frac{1}{3}"), (r"\frac{1}{2}", "2"), (r"\frac{1}{23}", r"\frac{12}{3}"),
    (r"\frac{1}{2}", r"-\frac12"),
    (r"1\frac{1}{2}", r"\frac{1}{2}"), (r"1\frac{1}{2}", r"\frac{11}{2}"), (r"\frac{1}{3}", "0.33"),
    (r"\frac{1}{3}", "0.3"),
    (r"0.\overline{3}", "0.3"), (r"0.\overline{12}", r"0.1\overline{2}"), (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"), ("10^{-12}", "0"), ("10^{-12}", "2*10^{-12}"), ("10^{20}", "10^{20}+1"),
    (r"\sqrt{2}", "2"), (r"\sqrt{2}", r"\sqrt{3}"), (r"\sqrt{2}", r"-\sqrt{2}"), (r"\sqrt[3]{2}", r"\sqrt{2}"),
    (r"3\sqrt{2}", r"\sqrt[3]{2}"), (r"\pi", "3.14"), (r"\pi", "3"), (r"2\pi", r"\pi^2"), ("e^2", "2e"),
    (r"\ln 2", r"\log_{10} 2"),
    (r"1-\frac{1}{\mathrm{e}}", r"1+\frac{1}{\mathrm{e}}"), ("i", "-i"), ("2+3i", "2-3i"), ("5!", "5"),
    ("(-2)^2", "-2^2"),
    (r"\sin x", r"\cos x"), (r"\log_2 3", r"\log_3 2"), (r"\sqrt{2}", "1.41"), ("2^{2004}", "2^{2005}"),
    ("x^2+2x+1", "x^2+2x"), ("(x+1)^2", "x^2+1"), ("x^2", "x^3"), ("x", "y"), ("2x", "2"), ("x+1", "x-1"),
    ("ab", "a+b"),
    ("x_1", "x_2"), ("x", "X"), ("(x+1)(x+2)", "x+1, x+2"), (r"\frac{x^2-1}{x-1}", "x-1"), ("x^{2n}", "x^{n+2}"),
    # percent and units
    (r"28\%", r"29\%"), ("50", "0.5"), (r"50\%", "0.05"), (r"5 \text{ cm}", r"5 \text{ m}"),
    (r"5 \text{ cm}", r"5 \text{ cm}^2"),
    (r"5 \text{ kg}", r"5 \text{ km}"), (r"\$5", r"5 \text{ cents}"), (r"90^\circ", "91"), ("5m", "5"),
    ("2x", r"2 \text{ cm}"),
    (r"60\text{ minutes}", r"1 \text{ minute}"), ("3:00 PM", "3:00 AM"), ("5", r"5\text{ feet 10 inches}"),
    ("2", r"2\mathrm{AB}"), ("3.15", "3. 15"), ("0.3", "0.3*"), (r"30^\circ", r"\frac{1}{2}"),
    # tuples, lists, sets, intervals
    ("(1,2)", "(2,1)"), ("(1,2)", "(1,2,3)"), ("(1,2)", "1"), ("1,2", "1"), ("1,2", "1,3"), ("1,2", "1,2,3"),
    (r"\{1,2\}", r"\{1\}"),
    (r"\{1,2\}", r"\{1,3\}"), (r"\{1,2\}", "3"), (r"\pm 2021", "2021"), (r"\pm 1", "-1"), (r"\emptyset", "0"),
    (r"\emptyset", r"\{0\}"),
    ("2", r"2 \text{ or } 3"), (r"2 \text{ or } 3", "2"), ("(0,1]", "[0,1)"), ("[0,1]", "(0,1)"), ("[0,1)", "[0,1]"),
    ("[0,1]", "[0,2]"),
    (r"(-\infty,0)", r"(-\infty,0]"), (r"(0,\infty)", r"(-\infty,0)"), (r"[0,1]\cup[2,3]", "[0,1]"),
    (r"[0,1]\cup[2,3]", r"[0,1]\cap[2,3]"),
    (r"(0,1)\cup(1,2)", "(0,2)"), ("(1,2)", r"\{1,2\}"), ("(2,3)", "23"), ("(1000,2)", "(1,2)"),
    (r"\{1,2,3\}", "[1,3]"),
    # equations, inequalities, ratios, clocks
    ("x=5", "6"), ("x=5", "x=-5"), ("a+3z=0", "0"), ("3x-y+13=0", "3x+4y+14=0"), ("y=2x+1", "2x+1=0"), ("x+y=5", "5"),
    (r"x \le 5", "x<5"), (r"x \le 5", r"x \ge 5"), ("x>2", "x<2"), ("1<x<3", r"1 \le x \le 3"), ("x=1,y=2", "x=2,y=1"),
    ("12:00", "1:00"), ("5 PM", "8.5 PM"), ("12:00", "2x:0"), ("1:2", "2:1"), ("52_8", "528"), ("52_8", "52"),
    ("52_8", "52_9"), (r"x \ne 2", "x=2"),
    (r"x \ne 2", "2"),
    (r"x<1 \text{ or } x>2", r"x<1 \text{ and } x>2"),
    # matrices
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "3"),
    # words and choices, and what can't be read
    ("E", "D"), ("E", "D: not E"), ("E", "(A)"), ("A", r"\text{B}"), (r"\text{Yes}", r"\text{No}"),
    ("Monday", "Tuesday"), ("June 20", "June 21"), ("5 PM", "5 AM"), ("5 PM", "6 PM"), ("3:5", "5 to 3"),
    (r"\text{even}", "odd"),
    ("42", "forty two"), ("42", r"\text{unknown}"), ("42", r"\frac"), ("42", "?"), ("42", "42 42"), ("42", "NaN"),
    (r"\text{Monday}", "5"),
    ("5", "1/0"), ("1", r"\infty"), (r"\infty", r"-\infty"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_right(graded: Grader, gold: str, answer: str) -> None:
    assert verdict(graded, gold, answer) == "right"


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_wrong(graded: Grader, gold: str, answer: str) -> None:
    assert verdict(graded, gold, answer) == "wrong"


DECIDED = [
    (MathOptions(), r"28\%", "28", "right"),
    (MathOptions(bare_percent=False), r"28\%", "28", "wrong"),
    (MathOptions(bare_percent=False), r"28\%", "0.28", "right"),
    (MathOptions(), r"\frac{1}{3}", "0.333333", "right"),
    (MathOptions(), r"\frac{1}{3}", "0.333334", "wrong"),
    (MathOptions(), r"\frac{1}{3}", "0.3333", "wrong"),
    (MathOptions(rounding_digits=None), r"\frac{1}{3}", "0.333333", "wrong"),
    (MathOptions(rounding_digits=3), r"\frac{1}{3}", "0.333", "right"),
    (MathOptions(rounding_digits=3), r"\frac{1}{3}", "0.33", "wrong"),
    (MathOptions(), r"\pi", "3.141593", "right"),
    (MathOptions(), "0.333333", r"\frac{1}{3}", "right"),  # symmetric
    (MathOptions(), r"90^\circ", r"\frac{\pi}{2}", "right"),
    (MathOptions(), "90", r"\frac{\pi}{2}", "wrong"),
]


@pytest.mark.parametrize(("options", "gold", "answer", "expected"), DECIDED)
def test_decided(options: MathOptions, gold: str, answer: str, expected: str) -> None:
    assert verdict(grader(RewardSpec(math=options)), gold, answer) == expected
