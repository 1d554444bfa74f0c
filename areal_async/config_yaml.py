"""YAML as text: which keys stand where, and what their scalars mean. It knows nothing of the options.

What always holds: nothing is guessed while reading. A plain scalar stays the text that was written until an option's
type asks for it (`scalar`), by the rules of YAML 1.2: `1e-6` is a number, `no`, `on` and `yes` are text, `0123` is no
number, `true` and `false` are the only truth values. Quoted scalars are always text. A key given twice, a tab that
indents, an alias or a tag is a problem with its line; PyYAML's own resolver and constructors are never used.
"""

import re
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import yaml

COMMAND_LINE: Final = "command line"

_NULLS: Final = frozenset(("", "~", "null", "Null", "NULL"))
_TRUTHS: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_WHOLE: Final = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_HEX_OCTAL: Final = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_DECIMAL: Final = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE: Final = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_DIGITS_AT_MOST: Final = 400  # int() refuses thousands of digits, and no option needs more than 64 bits


class Place(NamedTuple):
    """Where something was written: a file with a line (from 1), or the command line (line 0)."""

    source: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


class Problem(NamedTuple):
    """One thing that is wrong. key: dotted path of the option, "" where no option is meant."""

    place: Place
    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.place}: {self.key}: {self.what}" if self.key else f"{self.place}: {self.what}"


@dataclass(frozen=True, slots=True)
class Scalar:
    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """A value with its place: that of its key, or of the list item itself."""

    place: Place
    value: "Scalar | list[Entry] | dict[str, Entry]"


Value: TypeAlias = bool | int | float | str | None


def scalar(entry: Scalar) -> Value:
    """What a scalar means in YAML 1.2's core schema, less numbers with leading zeros (those stay text)."""
    text = entry.text
    if entry.quoted:
        return text
    if text in _NULLS:
        return None
    if text in _TRUTHS:
        return _TRUTHS[text]
    if len(text) > _DIGITS_AT_MOST:
        return text
    if _WHOLE.fullmatch(text):
        return int(text)
    if _HEX_OCTAL.fullmatch(text):
        return int(text, 0)
    if _DECIMAL.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def is_null(entry: Entry) -> bool:
    return isinstance(entry.value, Scalar) and scalar(entry.value) is None


def read_tree(text: str, source: str) -> tuple[Entry, list[Problem]]:
    """The tree of a file's text and what is wrong with its YAML; after a syntax error the tree is empty.

    A file that holds nothing is an empty section.
    """
    empty = Entry(Place(source, 1), {})
    tabs = [
        number
        for number, line in enumerate(text.split("\n"), 1)
        if "\t" in line[: len(line) - len(line.lstrip())] and line.strip() and not line.lstrip().startswith("#")
    ]
    if tabs:
        more = len(tabs) - 1
        further = "" if not more else f", as in line {tabs[1]}" if more == 1 else f", as in {more} lines after it"
        return empty, [Problem(Place(source, tabs[0]), "", f"a tab before a key{further}; YAML indents by spaces only")]
    node, broken = _compose(text, source)
    if broken is not None:
        return empty, [broken]
    if node is None:
        return empty, []
    tree = _Tree(source)
    entry = tree.entry(node, Place(source, 1), "")
    if is_null(entry):
        return empty, tree.problems
    if not isinstance(entry.value, dict):
        return empty, [Problem(entry.place, "", "must be a file of `key: value` lines, not a single value or a list")]
    return entry, tree.problems


def read_override(text: str) -> tuple[Entry | None, str]:
    """The value of `key.path=value`, or None and what is wrong with it.

    Lists, and text in quotes, are YAML; all else is one scalar as it stands, so that `####` and `a: b` are text and
    need no quotes beyond the shell's.
    """
    if text[:1] not in ("[", "{", '"', "'"):
        return Entry(Place(COMMAND_LINE, 0), Scalar(text, quoted=False)), ""
    node, broken = _compose(text, COMMAND_LINE)
    if broken is not None or node is None:
        return None, "" if broken is None else broken.what
    tree = _Tree(COMMAND_LINE)
    entry = tree.entry(node, Place(COMMAND_LINE, 0), "")
    return (None, tree.problems[0].what) if tree.problems else (entry, "")


class _Loader(yaml.SafeLoader):
    """PyYAML's scanner and parser, without its idea of what plain scalars mean (that is YAML 1.1's)."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own class attribute)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "an alias (*name) isn't supported; write the value out", mark)
        return super().compose_node(parent, index)


def _compose(text: str, source: str) -> tuple[yaml.Node | None, Problem | None]:
    try:
        loader = _Loader(text)
        return loader.get_single_node(), None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        return None, Problem(_place(source, line), "", f"character #x{error.character:04x} isn't allowed in YAML")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = f"not YAML: {error.problem}" + (f", {error.context}" if error.context else "")
        return None, Problem(_place(source, 1 if mark is None else mark.line + 1), "", what)
    except RecursionError:
        return None, Problem(_place(source, 1), "", "not a configuration: nested too deeply")


def _place(source: str, line: int) -> Place:
    return Place(source, 0 if source == COMMAND_LINE else line)


class _Tree:
    """Turns PyYAML's nodes into entries, and notes what a configuration may not have."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.problems: list[Problem] = []

    def entry(self, node: yaml.Node, place: Place, key: str) -> Entry:
        standard = {yaml.ScalarNode: "str", yaml.SequenceNode: "seq", yaml.MappingNode: "map"}[type(node)]
        if node.tag != f"tag:yaml.org,2002:{standard}":
            self.problems.append(Problem(place, key, f"a tag ({node.tag}) isn't supported; write the value alone"))
        if isinstance(node, yaml.ScalarNode):
            return Entry(place, Scalar(node.value, quoted=node.style is not None))
        if isinstance(node, yaml.SequenceNode):
            items = [self.entry(item, self._at(item), f"{key}[{i}]") for i, item in enumerate(node.value)]
            return Entry(place, items)
        return Entry(place, self._keys(node, key))

    def _keys(self, node: yaml.Node, path: str) -> dict[str, Entry]:
        keys: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            place = self._at(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(Problem(place, path, "a key must be a plain name, not a list or a section"))
                continue
            key = f"{path}.{key_node.value}" if path else key_node.value
            if key_node.value in keys:
                first = keys[key_node.value].place.line
                self.problems.append(Problem(place, key, f"given twice; first in line {first}; keep one of them"))
                continue
            keys[key_node.value] = self.entry(value_node, place, key)
        return keys

    def _at(self, node: yaml.Node) -> Place:
        return _place(self._source, node.start_mark.line + 1)
