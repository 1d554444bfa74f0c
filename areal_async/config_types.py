"""Checks a tree of written values against the typed structs, and says in plain words what each option wants.

What always holds: `TypeCheck.section` reports every problem of the tree, not the first one; when it reports none,
`msgspec.convert` of its result into the struct succeeds. The structs of `config` are the only source of names, types,
limits and descriptions; here is only how to speak of them.
"""

import difflib
import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import msgspec
from msgspec import inspect

from areal_async.config_yaml import Entry, Place, Problem, Scalar, is_null, scalar

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

LARGEST_INT: Final = 2**63 - 1  # the run log and the wire hold 64 bits

# Names that other training systems use for the same thing, so that the nearest key is found by meaning too.
KNOWN_ELSEWHERE: Final = {
    "learning_rate": "train.lr",
    "batch_size": "train.batch_groups",
    "train_batch_size": "train.batch_groups",
    "mini_batches": "train.minibatches",
    "world_size": "train.ranks",
    "max_steps": "train.steps",
    "gradient_clipping": "train.max_grad_norm",
    "grad_clip": "train.max_grad_norm",
    "num_generations": "rollout.group_size",
    "n_samples": "rollout.group_size",
    "max_completion_length": "rollout.max_new_tokens",
    "max_tokens": "rollout.max_new_tokens",
    "max_head_offpolicyness": "rollout.max_staleness",
    "eta": "rollout.max_staleness",
    "max_concurrent_rollouts": "rollout.max_concurrent",
    "model_path": "model.path",
    "model_name_or_path": "model.path",
    "train_files": "data.train",
    "reward_function": "reward.function",
}


class TypeCheck:
    """One pass over a tree. problems: what is wrong. places: dotted key -> where it was written."""

    def __init__(self, struct: type[msgspec.Struct]) -> None:
        self._root = struct_type(struct)
        self._options = dict(options(self._root))
        self.problems: list[Problem] = []
        self.places: dict[str, Place] = {}

    def config(self, tree: Entry) -> dict[str, Plain]:
        return self._section(self._root, tree, "")

    def _section(self, kind: inspect.StructType, entry: Entry, path: str) -> dict[str, Plain]:
        if is_null(entry):
            entry = Entry(entry.place, {})  # `train:` with nothing under it
        if not isinstance(entry.value, dict):
            what = f"is a section, whose keys stand indented under it; not {found(entry)}"
            self.problems.append(Problem(entry.place, path, what))
            return {}
        fields = {field.name: field for field in kind.fields}
        values: dict[str, Plain] = {}
        for name, value in entry.value.items():
            key = join(path, name)
            if name in fields:
                self.places[key] = value.place
                values[name] = self._value(fields[name].type, value, key)
            else:
                self.problems.append(Problem(value.place, key, f"no such key; {self._nearest_key(path, name, kind)}"))
        for name, field in fields.items():
            if name not in values and field.required:
                self._missing(field, entry.place, join(path, name))
        return values

    def _missing(self, field: inspect.Field, place: Place, key: str) -> None:
        inner, _ = unwrap(field.type)
        if isinstance(inner, inspect.StructType):
            self._section(inner, Entry(place, {}), key)
        else:
            self.problems.append(Problem(place, key, f"missing; {lower_first(description(field))}"))

    def _value(self, kind: inspect.Type, entry: Entry, key: str) -> Plain:
        inner, optional = unwrap(kind)
        if isinstance(inner, inspect.StructType):
            return self._section(inner, entry, key)
        if optional and is_null(entry):
            return None
        if isinstance(inner, inspect.VarTupleType | inspect.TupleType):
            return self._list(inner, entry, key)
        value: Plain = None
        hint: str | None = ""
        if isinstance(entry.value, Scalar):
            value, hint = _convert(inner, entry.value, optional)
        if hint is not None:
            self._wrong(kind, entry, key, hint)
        return value

    def _list(self, kind: inspect.VarTupleType | inspect.TupleType, entry: Entry, key: str) -> Plain:
        if isinstance(entry.value, Scalar) and _takes_one_text(kind) and entry.value.text:
            entry = Entry(entry.place, [entry])  # `train: problems.jsonl` is a list of one
        if not isinstance(entry.value, list):
            hint = f"; write [{entry.value.text}]" if isinstance(entry.value, Scalar) and entry.value.text else ""
            self._wrong(kind, entry, key, hint)
            return None
        if isinstance(kind, inspect.VarTupleType):
            kinds: Sequence[inspect.Type] = [kind.item_type] * len(entry.value)
            if len(entry.value) < (kind.min_length or 0):
                self._wrong(kind, entry, key, f" of {len(entry.value)}")
                return None
        elif len(entry.value) == len(kind.item_types):
            kinds = kind.item_types
        else:
            self._wrong(kind, entry, key, f" of {len(entry.value)}")
            return None
        values: list[Plain] = []
        for i, (item_kind, item) in enumerate(zip(kinds, entry.value, strict=True)):
            self.places[f"{key}[{i}]"] = item.place
            values.append(self._value(item_kind, item, f"{key}[{i}]"))
        return values

    def _wrong(self, kind: inspect.Type, entry: Entry, key: str, hint: str) -> None:
        self.problems.append(Problem(entry.place, key, f"must be {wanted(kind)}, not {found(entry)}{hint}"))

    def _nearest_key(self, path: str, name: str, kind: inspect.StructType) -> str:
        names = [field.name for field in kind.fields]
        leaves: dict[str, str] = {}
        for option in self._options:
            leaves.setdefault(option.rpartition(".")[2], option)
        nearest = (
            (name if name in self._options else None)  # `train.lr: 1e-6` at the top
            or self._known_elsewhere(name)
            or _close(name, {n: join(path, n) for n in names}, 0.6)
            or leaves.get(name)
            or self._known_elsewhere(_close(name, {known: known for known in KNOWN_ELSEWHERE}, 0.75) or "")
            or _close(name, leaves, 0.8)
        )
        if nearest is None:
            return f"the keys here are {', '.join(names)}"
        if nearest == name:
            section, _, leaf = name.rpartition(".")
            return f"write it as `{leaf}:` indented under `{section}:`"
        return f"did you mean {nearest}?"

    def _known_elsewhere(self, name: str) -> str | None:
        option = KNOWN_ELSEWHERE.get(name)
        return option if option in self._options else None


def _takes_one_text(kind: inspect.VarTupleType | inspect.TupleType) -> bool:
    return isinstance(kind, inspect.VarTupleType) and isinstance(unwrap(kind.item_type)[0], inspect.StrType)


def _close(name: str, candidates: dict[str, str], cutoff: float) -> str | None:
    found_names = difflib.get_close_matches(name, list(candidates), 1, cutoff)
    return candidates[found_names[0]] if found_names else None


# --------------------------------------------------------------------------------------------- from scalars to values


def _convert(kind: inspect.Type, written: Scalar, optional: bool) -> tuple[Plain, str | None]:
    """The value of a scalar and None; or, where it has not the type or the range, a hint for the message."""
    value = scalar(written)
    match kind:
        case inspect.StrType():
            return written.text, text_hint(kind, written, optional)
        case inspect.IntType():
            good = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_INT
            return value, None if good and in_range(kind, float_of(value)) else number_hint(kind, written)
        case inspect.FloatType():
            number = float_of(value)
            return number, None if math.isfinite(number) and in_range(kind, number) else number_hint(kind, written)
        case inspect.BoolType():
            meant = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
            nearest = meant.get(written.text.lower())
            return value, None if isinstance(value, bool) else f"; write {nearest}" if nearest else ""
        case inspect.LiteralType():
            close = difflib.get_close_matches(written.text, [str(v) for v in kind.values], 1)
            good = not isinstance(value, bool) and value in kind.values
            return value, None if good else f"; did you mean {close[0]}?" if close else ""
        case _:
            raise AssertionError(f"the configuration has a type that isn't checked here: {kind}")


def text_hint(kind: inspect.StrType, written: Scalar, optional: bool) -> str | None:
    """What is wrong with a text, as the hint of its message; None if nothing. Numbers are taken as they are written."""
    value, text = scalar(written), written.text
    if value is None or isinstance(value, bool):
        return "" if value is None else f"; write '{text}' in quotes if the text is meant"
    if not text:
        return "; write null for none" if optional else ""
    if optional and not written.quoted and text.lower() == "none":
        return f"; write null for none, or '{text}' in quotes if the text is meant"
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        return "; it holds a character that no file or argument can hold"
    if kind.pattern is not None and not re.search(kind.pattern, text):
        nearest = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:64]
        return f"; try {nearest}" if re.search(kind.pattern, nearest) else ""
    return None


def number_hint(kind: inspect.IntType | inspect.FloatType, written: Scalar) -> str:
    """`; write 1000` for 1_000, 1e3 (where it must be whole), 0123 or '5'; the nearest value for one out of range."""
    value = scalar(Scalar(written.text, quoted=False))
    if isinstance(value, str):
        bare = re.sub(r"^([-+]?)0+(?=[0-9])", r"\1", value.strip().replace("_", "").replace(",", ""))
        value = scalar(Scalar(bare, quoted=False))
    number = float_of(value)
    if not math.isfinite(number) or abs(number) > LARGEST_INT:
        return ""
    if not in_range(kind, number):
        nearest = kind.ge if kind.ge is not None and number < kind.ge else kind.le
        return f"; the nearest is {nearest}" if nearest is not None and number != nearest else ""
    if isinstance(kind, inspect.IntType):
        return f"; write {round(number)}"
    return f"; write {number:g}"


def float_of(value: object) -> float:
    """A number as a float (inf where it is too large for one); nan for what isn't a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def in_range(kind: inspect.IntType | inspect.FloatType, number: float) -> bool:
    return (
        (kind.gt is None or number > kind.gt)
        and (kind.ge is None or number >= kind.ge)
        and (kind.lt is None or number < kind.lt)
        and (kind.le is None or number <= kind.le)
    )


# ------------------------------------------------------------------------------------------- reading the struct types


@functools.cache
def struct_type(struct: type[msgspec.Struct]) -> inspect.StructType:
    kind = inspect.type_info(struct)
    assert isinstance(kind, inspect.StructType)
    return kind


def options(kind: inspect.StructType, path: str = "") -> Iterator[tuple[str, inspect.Field]]:
    """Every option with its dotted key, in the order of the structs."""
    for field in kind.fields:
        inner, _ = unwrap(field.type)
        if isinstance(inner, inspect.StructType):
            yield from options(inner, join(path, field.name))
        else:
            yield join(path, field.name), field


def unwrap(kind: inspect.Type) -> tuple[inspect.Type, bool]:
    """The type without its metadata and without None; and whether it may be None."""
    if isinstance(kind, inspect.Metadata):
        return unwrap(kind.type)
    if isinstance(kind, inspect.UnionType):
        others = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
        assert len(others) == 1, "an option has one type, and may be null beside"
        return unwrap(others[0])[0], len(others) < len(kind.types)
    return kind, False


def description(field: inspect.Field) -> str:
    kind = field.type
    schema = kind.extra_json_schema if isinstance(kind, inspect.Metadata) else None
    return str((schema or {}).get("description", ""))


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def lower_first(text: str) -> str:
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


# ---------------------------------------------------------------------------------------------------- in plain words


def wanted(kind: inspect.Type) -> str:
    """`a whole number of at least 1, or null`."""
    inner, optional = unwrap(kind)
    return words(inner) + (", or null" if optional else "")


def words(kind: inspect.Type) -> str:
    match kind:
        case inspect.StrType(pattern=None):
            return "text"
        case inspect.StrType():
            return f"text of the form {kind.pattern}"
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "a whole number" + limits(kind)
        case inspect.FloatType():
            return "a number" + limits(kind)
        case inspect.LiteralType():
            *first, last = map(str, kind.values)
            return f"{', '.join(first)} or {last}" if first else last
        case inspect.VarTupleType():
            least = f"at least {kind.min_length} " if kind.min_length else ""
            return f"a list of {least}{plural(words(unwrap(kind.item_type)[0]))}"
        case inspect.TupleType():
            return f"a list of {len(kind.item_types)} {plural(words(unwrap(kind.item_types[0])[0]))}"
        case _:
            raise AssertionError(f"the configuration has a type without words: {kind}")


def limits(kind: inspect.IntType | inspect.FloatType) -> str:
    parts = [
        f"{sign} {bound:g}" if isinstance(bound, float) else f"{sign} {bound}"
        for sign, bound in ((">", kind.gt), ("≥", kind.ge), ("<", kind.lt), ("≤", kind.le))
        if bound is not None
    ]
    return f" {' and '.join(parts)}" if parts else ""


def plural(text: str) -> str:
    singular = text.removeprefix("a ")
    return singular if singular == "text" else singular.replace("number", "numbers", 1)


def found(entry: Entry) -> str:
    """`the text 'yes'`, `the number 3`, `nothing`."""
    if isinstance(entry.value, list):
        return "a list"
    if isinstance(entry.value, dict):
        return "a section"
    value = scalar(entry.value)
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    shown = entry.value.text if len(entry.value.text) <= 80 else entry.value.text[:77] + "…"
    return f"the text {shown!r}" if isinstance(value, str) else f"the number {shown}"
