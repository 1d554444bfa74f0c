"""docs/configuration.md and docs/simulate-options.md are what the structs say."""

import importlib.util
from pathlib import Path

from areal_async.config import Config
from areal_async.config_types import description, options, struct_type

TOOL = Path(__file__).resolve().parent.parent / "tools" / "draw_configuration.py"


def test_the_pages_are_up_to_date():
    spec = importlib.util.spec_from_file_location("draw_configuration", TOOL)
    assert spec is not None
    assert spec.loader is not None
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    for page, text in ((drawing.PAGE, drawing.draw()), (drawing.PLAN_PAGE, drawing.draw_plan())):
        assert page.read_text(encoding="utf-8") == text, "run: python tools/draw_configuration.py"


def test_every_option_has_a_description():
    assert [key for key, field in options(struct_type(Config)) if not description(field)] == []
