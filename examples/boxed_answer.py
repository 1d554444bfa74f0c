"""A reward for mathematics: the answer in the last \\boxed{…} is the data row's, written alike but for small things.

    reward: {function: "boxed_answer:boxed"}        import_path: ../examples

An example of a reward of one's own. It compares text, not mathematics: 1/2 and 0.5 are different. For real runs there
is `reward: {function: math}`.
"""

import re

BOX = "\\boxed{"
SPELLINGS = [
    (re.compile(r"\\(left|right|displaystyle|,|!|;| )"), ""),
    (re.compile(r"\\(text|mathrm|textbf)\{([^{}]*)\}"), r"\2"),
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"(?<=\d),(?=\d{3}\b)"), ""),  # 1,000
    (re.compile(r"\s|\$|\\%|%|\^\\circ|^\\\(|\\\)$|\.$"), ""),
]


def boxed(response: str, answer: str, finish: str) -> bool:
    """True if the answer isn't cut and its last box holds `answer`."""
    given = last_box(response)
    return finish == "stop" and given is not None and normal(given) == normal(last_box(answer) or answer)


def last_box(text: str) -> str | None:
    """What stands in the last \\boxed{…}, inner braces included; None if there is none, or if it isn't closed."""
    begin = text.rfind(BOX)
    depth = 1
    for place in range(begin + len(BOX), len(text) if begin >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin + len(BOX) : place]
    return None


def normal(text: str) -> str:
    for pattern, replacement in SPELLINGS:
        text = pattern.sub(replacement, text)
    return text.strip().removesuffix(".0")
