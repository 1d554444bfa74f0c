"""Units of measurement behind an answer: which are the same, and by what factor they differ.

What always holds: a unit is its dimensions and an exact factor to the base units, so two units can be told apart
(`5 cm` is not `5 m`) or turned into each other (`5 m` is `500 cm`). What isn't in the table is no unit.
"""

import re
from fractions import Fraction
from typing import Final, TypeAlias

import msgspec

Dimensions: TypeAlias = tuple[tuple[str, int], ...]


class Unit(msgspec.Struct, frozen=True):
    """dimensions: sorted pairs of a base and its power. factor: to the base units, exact."""

    dimensions: Dimensions
    factor: Fraction


SPELLED: Final = (
    # dimensions, factor, names; capital letters count only in names of up to three letters (mm, Mm)
    ("length", "1/1000000", "μm micrometer micrometers micron microns"),
    ("length", "1/1000", "mm millimeter millimeters millimetre millimetres"),
    ("length", "1/100", "cm centimeter centimeters centimetre centimetres cms"),
    ("length", "1/10", "dm decimeter decimeters decimetre decimetres"),
    ("length", "1", "m meter meters metre metres"),
    ("length", "1000", "km kilometer kilometers kilometre kilometres kms"),
    ("length", "127/5000", "in inch inches"),
    ("length", "381/1250", "ft foot feet"),
    ("length", "1143/1250", "yd yard yards"),
    ("length", "201168/125", "mi mile miles"),
    ("length:2", "10000", "ha hectare hectares"),
    ("length:3", "1/1000", "L l liter liters litre litres"),
    ("length:3", "1/1000000", "mL ml milliliter milliliters millilitre millilitres cc"),
    ("gallon", "1", "gal gallon gallons"),
    ("gallon", "1/4", "qt quart quarts"),
    ("gallon", "1/8", "pt pint pints"),
    ("gallon", "1/16", "cup cups"),
    ("mass", "1/1000000", "mg milligram milligrams"),
    ("mass", "1/1000", "g gram grams"),
    ("mass", "1", "kg kilogram kilograms kgs"),
    ("mass", "1000", "tonne tonnes"),
    ("pound", "1", "lb lbs pound pounds"),
    ("pound", "1/16", "oz ounce ounces"),
    ("time", "1/1000", "ms millisecond milliseconds"),
    ("time", "1", "s sec secs second seconds"),
    ("time", "60", "min mins minute minutes"),
    ("time", "3600", "h hr hrs hour hours"),
    ("time", "86400", "day days"),
    ("time", "604800", "week weeks"),
    ("month", "1", "month months"),
    ("month", "12", "yr yrs year years"),
    ("length time:-1", "1397/3125", "mph"),
    ("length time:-1", "5/18", "kph kmh"),
    ("money", "1", "dollar dollars usd"),
    ("money", "1/100", "cent cents"),
    ("euro", "1", "euro euros eur"),
    ("sterling", "1", "gbp"),
    ("yen", "1", "yen yuan"),
    ("rupee", "1", "rupee rupees rs"),
    ("angle", "1", "degree degrees deg"),
    ("radian", "1", "rad rads radian radians"),
    ("celsius", "1", "celsius"),
    ("fahrenheit", "1", "fahrenheit"),
    ("temperature", "1", "K kelvin kelvins"),
    ("mass length time:-2", "1", "N newton newtons"),
    ("mass length time:-2", "1000", "kN kilonewton kilonewtons"),
    ("mass length:2 time:-2", "1", "J joule joules"),
    ("mass length:2 time:-2", "1000", "kJ kilojoule kilojoules"),
    ("mass length:2 time:-3", "1", "W watt watts"),
    ("mass length:2 time:-3", "1000", "kW kilowatt kilowatts"),
    ("mass length:-1 time:-2", "1", "Pa pascal pascals"),
    ("mass length:-1 time:-2", "1000", "kPa kilopascal kilopascals"),
    ("time:-1", "1", "Hz hertz"),
    ("time:-1", "1000", "kHz kilohertz"),
    ("current", "1", "A ampere amperes amp amps"),
    ("mass length:2 time:-3 current:-1", "1", "V volt volts"),
    ("mass length:2 time:-3 current:-2", "1", "ohm ohms"),
    ("amount", "1", "mol mole moles"),
    # No units, but what tells answers apart in the same way
    ("north", "1", "north"),
    ("south", "1", "south"),
    ("east", "1", "east"),
    ("west", "1", "west"),
)


def _table() -> dict[str, Unit]:
    table = {}
    for spelled, factor, names in SPELLED:
        powers = [part.partition(":") for part in spelled.split()]
        dimensions = tuple(sorted((base, int(power or 1)) for base, _, power in powers))
        table.update({name: Unit(dimensions, Fraction(factor)) for name in names.split()})
    return table


TABLE: Final = _table()
DEGREE: Final = TABLE["degree"]
DOLLAR: Final = TABLE["dollar"]
SIGNS: Final = {"$": DOLLAR, "€": TABLE["euro"], "£": TABLE["gbp"], "¥": TABLE["yen"], "₹": TABLE["rupee"]}
MANY_FACTORS: Final = 6

_FACTOR = re.compile(r"([A-Za-zμ.]+)(?:\^\{?(-?\d)\}?)?\Z")
_SPACE = re.compile(r"(?:\s|\*|\\cdot|\\times)+")
_NAMED_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}


def unit_of(text: str) -> Unit | None:
    """The unit that is spelled: `cm^2`, `square feet`, `km/h`, `miles per hour`; None if it is none."""
    dimensions: dict[str, int] = {}
    factor = Fraction(1)
    sign = 1
    for part in re.sub(r"\bper\b", "/", text).split("/"):
        found = _factors(_SPACE.split(part.strip()))
        if found is None:
            return None
        for unit, power in found:
            factor *= unit.factor ** (sign * power)
            for base, exponent in unit.dimensions:
                dimensions[base] = dimensions.get(base, 0) + sign * power * exponent
        sign = -1
    return Unit(tuple(sorted((base, power) for base, power in dimensions.items() if power)), factor)


def _factors(words: list[str]) -> list[tuple[Unit, int]] | None:
    found: list[tuple[Unit, int]] = []
    named = 1  # a power that is named before its unit
    for word in words[: MANY_FACTORS + 1]:
        bare = word.rstrip(".").lower()
        if bare in ("squared", "cubed") and found:
            found[-1] = (found[-1][0], _NAMED_POWERS[bare])
        elif bare in _NAMED_POWERS:
            named = _NAMED_POWERS[bare]
        else:
            match = _FACTOR.match(word)
            unit = _lookup(match[1]) if match else None
            if match is None or unit is None:
                return None
            found.append((unit, named * int(match[2] or 1)))
            named = 1
    return found if found and len(words) <= MANY_FACTORS else None


def _lookup(word: str) -> Unit | None:
    word = word.rstrip(".")
    return TABLE.get(word) or (TABLE.get(word.lower()) if len(word) > 1 else None)
