"""The code in a response is what a person would take."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.rewards.code.markdown import code_of

CODE = "n = int(input())\nprint(n * 2)"
WRONG = "print('draft')"
SOLUTION = "class Solution:\n    def twice(self, n):\n        return n * 2"
DOCSTRING = (
    f'def twice(n):\n    """Doubles.\n\n    ```python\n    twice(2)\n    ```\n    """\n    return n * 2\n\n{CODE}'
)


def fenced(code: str, tag: str = "python", fence: str = "```") -> str:
    return f"{fence}{tag}\n{code}\n{fence}"


@pytest.mark.parametrize(
    ("response", "code"),
    [
        pytest.param(f"So:\n\n{fenced(CODE)}\n\nThis doubles it.", CODE, id="C16-python"),
        pytest.param(fenced(CODE, "py"), CODE, id="C16-py"),
        pytest.param(f"Answer:\n{fenced(CODE, '')}", CODE, id="C16-no-tag"),
        pytest.param(f"{fenced(WRONG)}\nNo, rather:\n{fenced(CODE)}", CODE, id="C16-last-block"),
        pytest.param(f"```python\n{CODE}", CODE, id="C16-never-closed"),
        pytest.param(f"{CODE}\n```", CODE, id="C16-stray-closing-fence"),
        pytest.param(f"{CODE}\n```\nThis program doubles the number.", CODE, id="C16-stray-fence-and-prose"),
        pytest.param("def f(n):\n    return n * 2", "def f(n):\n    return n * 2", id="C16-starts-with-def"),
        pytest.param("I can't solve this. The answer is 42, or `n * 2`.", None, id="C16-no-code"),
        pytest.param("", None, id="empty"),
        pytest.param("yes", None, id="one-word"),
        pytest.param(CODE, CODE, id="only-the-code"),
        pytest.param(fenced(CODE, "Python3"), CODE, id="Python3"),
        pytest.param(fenced(CODE, " python"), CODE, id="space-before-the-tag"),
        pytest.param(fenced(CODE, 'python title="a.py"'), CODE, id="tag-with-attributes"),
        pytest.param(fenced(CODE, "{.python}"), CODE, id="tag-in-braces"),
        pytest.param(fenced(CODE, "python", "~~~"), CODE, id="tildes"),
        pytest.param(fenced(CODE, "python", "````"), CODE, id="four-backticks"),
        pytest.param(fenced(CODE).replace("\n", "\r\n"), CODE.replace("\n", "\r\n") + "\r", id="CRLF"),
        pytest.param(
            f"1. So:\n\n   ```python\n   {CODE.splitlines()[0]}\n   {CODE.splitlines()[1]}\n   ```", CODE, id="list"
        ),
        pytest.param("```python\n  a = 1\n  print(a)\n```", "a = 1\nprint(a)", id="code-indented-more-than-its-fence"),
        pytest.param(f"{fenced(CODE)}\nIt prints:\n{fenced('5', '')}", CODE, id="output-after-it"),
        pytest.param(f"{fenced(CODE)}\nIt prints:\n{fenced('x = 5', '')}", CODE, id="output-that-is-an-assignment"),
        pytest.param(f"{fenced(CODE)}\nIt prints:\n{fenced('print(5)', 'text')}", CODE, id="output-with-a-tag"),
        pytest.param(f"{fenced(CODE)}\nIn C++:\n{fenced('int main() {}', 'cpp')}", CODE, id="another-language"),
        pytest.param(f"In C++:\n{fenced('int main() {}', 'cpp')}\n", None, id="only-another-language"),
        pytest.param(f"{fenced(CODE)}\nRun it:\n{fenced('python3 a.py', 'bash')}", CODE, id="how-to-run-it"),
        pytest.param(f"```python\n{WRONG}\n\nNo:\n```python\n{CODE}\n```", CODE, id="opened-again"),
        pytest.param(f"{fenced(CODE)}\nFaster:\n```python\nfor i in ran", CODE, id="cut-in-the-second-block"),
        pytest.param("```python\nfor i in ran", "for i in ran", id="cut-in-the-only-block"),
        pytest.param(f"{fenced(CODE)}\n{fenced('print(')}", "print(", id="the-last-one-even-if-it-is-wrong"),
        pytest.param(f"{fenced(DOCSTRING)}\nDone.", DOCSTRING, id="fence-in-a-docstring"),
        pytest.param(f"<think>{fenced(WRONG)}</think>\n{fenced(CODE)}", CODE, id="after-thinking"),
        pytest.param(f"{fenced(WRONG)}\n</think>\nThe answer is 5.", None, id="only-in-thinking"),
        pytest.param(f"<think>\n{fenced(CODE)}\nWait", None, id="thinking-has-not-ended"),
        pytest.param(f"Here it is:\n\nimport sys\n{CODE}\n\nIt doubles.", f"import sys\n{CODE}\n", id="prose-around"),
        pytest.param("import of goods\nfrom there to here\nclass struggle", None, id="prose-with-words-of-Python"),
        pytest.param("def f(n):\n    return n *", "def f(n):\n    return n *", id="cut-without-fences"),
        pytest.param("```python\n```", None, id="empty-block"),
        pytest.param("```\n\n```python\n" + CODE, CODE, id="stray-fence-before"),
    ],
)
def test_what_is_taken(response: str, code: str | None) -> None:
    assert code_of(response) == code


def test_thinking_that_the_prompt_has_begun() -> None:
    assert code_of(fenced(CODE), prompt="2+2?\n<think>\n") is None
    assert code_of(f"hm</think>\n{fenced(CODE)}", prompt="2+2?\n<think>\n") == CODE


def test_the_function_that_has_to_be_called_is_looked_for() -> None:
    example = fenced("print(Solution().twice(2))")
    assert code_of(f"{fenced(SOLUTION)}\nFor example:\n{example}", function="twice") == SOLUTION
    assert code_of(f"{fenced(SOLUTION)}\nFor example:\n{example}") == "print(Solution().twice(2))"
    assert code_of(fenced(CODE), function="twice") == CODE


def test_code_that_no_parser_likes_is_still_code() -> None:
    for code in ("x = " + "(" * 500 + ")" * 500, "x = 1\0", "-" * 100_000 + "1"):
        assert code_of(fenced(code)) == code


STATEMENTS = st.sampled_from(
    [
        "x = 1",
        "print(x)",
        "for i in range(3):\n    print(i)",
        "",
        "# what?",
        's = """\n   a\n\t\n"""',
        "def f():\n    pass",
    ]
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(STATEMENTS, min_size=1, max_size=6),
    st.sampled_from(["python", "py", "Python", "python3"]),
    st.sampled_from(["```", "````", "~~~"]),
    st.sampled_from(["", "Here it is:\n", "1. First\n2. Then `x`\n\n"]),
    st.sampled_from(["", "\n", "\nIt prints 1.", "\n\n```\n1\n```\n"]),
)
def test_code_between_fences_comes_back_whole(
    statements: list[str], tag: str, fence: str, before: str, after: str
) -> None:
    code = "\n".join(["print(0)", *statements])
    assert code_of(f"{before}{fenced(code, tag, fence)}{after}") == code
