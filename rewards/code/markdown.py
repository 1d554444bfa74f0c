"""The code in a response, taken as a person would take it.

What counts is what follows the last `</think>`; where thinking has begun and not ended, there is no code yet.

A block is what stands between fences (``` or ~~~, also indented, as in lists); one that is never closed goes to the end
of the response; a fence within the code (in a docstring, say) doesn't end it if the code only reads as Python beyond
it. Of the blocks the last one counts that is tagged as Python, or has no tag and reads as Python that does something (a
block of output, or of another language, doesn't). If that one was never closed and doesn't read as Python, the answer
was cut in it, and the one before counts. A function that has to be called is looked for first: the last block that
defines it.

Without such a block: the text up to the first fence, from the first line that begins with code, as far as it reads as
Python. Prose is no code.

What always holds: nothing is run; what is taken stands in the response as it is, but for the indentation of all of it.
"""

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

FENCE: Final = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([^`\r]*?)\s*$")
PYTHON_TAG: Final = re.compile(r"\{?\.?(?:python|py|pypy|sage|cpython)[\d.]*(?!\w)", re.IGNORECASE)
BEGINNING: Final = re.compile(
    r"(?:def|async def|class) +\w+ *[(:]|@\w|import +[\w.]+(?: +as +\w+)?(?: *,.*)?$|from +[\w.]+ +import +[\w*(]"
)
CLOSINGS: Final = 8  # further closing fences that are tried for a block that doesn't read as Python
CUTS: Final = 200  # lines of prose after code without fences that are looked through

THINK: Final = "<think>"
THOUGHT: Final = "</think>"


@dataclass(frozen=True)
class _Block:
    tag: str
    code: str
    closed: bool
    tree: ast.Module | None

    @property
    def is_python(self) -> bool:
        return bool(PYTHON_TAG.match(self.tag))


def code_of(response: str, prompt: str = "", function: str = "") -> str | None:
    """The code; None if there is none. function: that has to be called; prompt: may have begun the thinking."""
    _, ended, text = response.rpartition(THOUGHT)
    if not ended and (response.lstrip().startswith(THINK) or prompt.rstrip().endswith(THINK)):
        return None
    lines = text.split("\n")
    blocks = [block for block in _blocks(lines) if block.is_python or not block.tag]
    if function:
        for block in reversed(blocks):
            if block.tree is not None and function in _defined(block.tree):
                return block.code
    cut = None
    for block in reversed(blocks):
        if block.is_python and block.code.strip():
            if block.closed or block.tree is not None:
                return block.code
            cut = cut or block.code
        elif block.tree is not None and _does_something(block.tree):
            return block.code
    return cut or _without_fences(lines)


def _blocks(lines: list[str]) -> Iterator[_Block]:
    at = 0
    while at < len(lines):
        opening = FENCE.match(lines[at])
        at += 1
        if opening:
            block, at = _block(lines, at, opening)
            yield block


def _block(lines: list[str], begin: int, opening: re.Match[str]) -> tuple[_Block, int]:
    """The block whose opening fence stands before `begin`, and where to go on."""
    indent, fence, tag = opening.groups()
    ends: list[tuple[int, int]] = []  # of the code, and where to go on
    for at in range(begin, len(lines)):
        other = FENCE.match(lines[at])
        if other is None or other[2][0] != fence[0]:
            continue
        if not other[3] and len(other[2]) >= len(fence):
            ends.append((at, at + 1))
        elif PYTHON_TAG.match(other[3]):
            ends.append((at, at))  # the one before was never closed, if it reads as Python up to here
        if len(ends) == CLOSINGS or (ends and tag and not PYTHON_TAG.match(tag)):
            break
    ends.append((len(lines), len(lines)))
    for end, further in ends:
        code = _content(lines[begin:end], indent)
        if (tree := _parsed(code)) is not None:
            return _Block(tag, code, end != further, tree), further
    end, further = ends[0]
    return _Block(tag, _content(lines[begin:end], indent), end != further, None), further


def _content(lines: list[str], indent: str) -> str:
    if indent:
        lines = [line.removeprefix(indent) for line in lines]
    code = "\n".join(lines)
    first = next((line for line in lines if line.strip()), "")
    return textwrap.dedent(code) if first[:1] in (" ", "\t") else code


def _parsed(code: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _defined(tree: ast.Module) -> set[str]:
    """Functions at the top, and methods of `class Solution`."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef) and node.name == "Solution":
            found.update(inner.name for inner in node.body if isinstance(inner, ast.FunctionDef))
    return found


def _does_something(tree: ast.Module) -> bool:
    """Not so a block of output, which may read as Python, too: `5`, `[1, 2]`, `yes`, `x = 3`."""
    doing = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Call)
    return any(isinstance(node, doing) for node in ast.walk(tree))


def _without_fences(lines: list[str]) -> str | None:
    fence = next((at for at, line in enumerate(lines) if FENCE.match(line)), len(lines))
    text = "\n".join(lines[:fence])
    tree = _parsed(text)
    if tree is not None:
        return text if _does_something(tree) else None
    begin = next((at for at, line in enumerate(lines[:fence]) if BEGINNING.match(line)), None)
    if begin is None:
        return None
    for end in range(fence, max(begin, fence - CUTS), -1):
        if end < fence and lines[end].strip() == "":
            continue  # the same again
        if (code := _parsed("\n".join(lines[begin:end]))) is not None:
            return "\n".join(lines[begin:end]) if _does_something(code) else None
    return "\n".join(lines[begin:fence])
