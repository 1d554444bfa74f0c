"""What holds for every page: hostile texts stay text, all can be read, in the dark and on a phone, and has a name."""

import pytest

from .looks import drawn_anew, filled, markup, nameless, pale, scripts, sideways
from .viewing import Viewer
from .watching import LAPTOP, PHONE, Tabs

pytestmark = pytest.mark.slow

PAGES = ["overview", "timeline", "samples", "sample?id=0.0", "peers", "config"]


@pytest.mark.parametrize("place", [*(f"odd/{page}" for page in PAGES), ""])
def test_a_page_can_be_read_by_all_and_shows_texts_as_text(viewer: Viewer, tabs: Tabs, place: str) -> None:
    page = tabs.open(viewer.at(place))
    filled(page, place.removeprefix("odd/").partition("?")[0] or "runs")
    found = []
    for size, scheme in ((LAPTOP, "light"), (LAPTOP, "dark"), (PHONE, "dark"), (PHONE, "light")):
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        drawn_anew(page)
        looked, faint = pale(page)
        assert looked > 10
        found += [f"{size[0]} {scheme}: {one}" for one in faint]
        found += [f"{size[0]} {scheme}: {wider} pixels to the right of the window"] if (wider := sideways(page)) else []
    found += [f"without a name: {one}" for one in nameless(page)] + markup(page) + scripts(page)
    assert not found, "\n".join(found)
