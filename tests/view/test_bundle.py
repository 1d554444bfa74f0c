"""The page as one file: its modules as one script, data that can't become one, and a policy that names what may run."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib import resources
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.view import bundle

INDEX: Final = (
    '<!doctype html>\n<html><head><meta charset="utf-8">\n<link rel="stylesheet" href="static/a.css">\n'
    '<script src="static/early.js"></script>\n<script type="module" src="static/app.js"></script>\n'
    "</head><body></body></html>\n"
)
FILES: Final = {
    "a.css": "p { color: red; }\n",
    "early.js": "/* </body> */ const early = '</script><!--';\n",
    "app.js": 'import { a,\n  b as c } from "./one.js";\nimport "./two.js";\nawait$(import(`./${c}.js`));\n',
    "one.js": 'export const a = 1;\nexport async function b() {}\nexport * from "./two.js";\n',
    "two.js": "export class D {}\nexport function* e() {}\n",
}


class Elements(HTMLParser):
    """scripts: kind and text of each; policy: of the file; asked: what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[str, str]] = []
        self.policy = ""
        self.asked: list[str] = []
        self._open: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.asked += [found[name] for name in ("src", "href") if name in found and found[name] != "#main"]
        if found.get("http-equiv") == "Content-Security-Policy":
            assert not self.scripts, "a policy holds for what stands below it"
            self.policy = found["content"]
        if tag == "script":
            self._open = found.get("type", "")
            self.scripts.append((self._open, ""))

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            kind, text = self.scripts[-1]
            self.scripts[-1] = kind, text + data

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._open = None


def own_files() -> dict[str, str]:
    folder = resources.files("areal_async.view").joinpath("static")
    return {
        each.name: each.read_text(encoding="utf-8") for each in folder.iterdir() if each.name.endswith((".js", ".css"))
    }


def index() -> str:
    return resources.files("areal_async.view").joinpath("static", "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("files", [FILES, own_files()], ids=["small", "the page"])
def test_what_runs_is_named_by_its_digest(files: dict[str, str]) -> None:
    """And nothing else may run, and nothing is asked for."""
    text = bundle.page(
        INDEX if files is FILES else index(), files, "window.Plotly = {};", {"/x": "y"}, ["one.js"][: files is FILES]
    )
    found = Elements(text)
    running = [text for kind, text in found.scripts if kind != "application/json"]
    assert len(running) == 3
    digests = {f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in running}
    policy = dict(part.strip().split(" ", 1) for part in found.policy.split(";"))
    assert set(policy["script-src"].split()) == digests
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert [each for each in found.asked if not each.startswith(("#", "data:"))] == []
    assert "<style>" in text
    assert not re.search(r"^(import|export)\b", running[-1], re.MULTILINE)


def test_imports_and_exports_are_calls() -> None:
    modules = {name: text for name, text in FILES.items() if name in ("app.js", "one.js", "two.js")}
    text = bundle.script(modules, ["one.js", "app.js"])
    assert 'const {a,\n  b: c } = load$("./one.js");'.replace("./", "") in text.replace("{ a", "{a")
    assert 'load$("two.js");\nawait$(import$(`./${c}.js`));' in text
    assert "{ a: { enumerable: true, get: () => a }, b: { enumerable: true, get: () => b } }" in text
    assert "\nconst a = 1;\nasync function b() {}\n" in text
    assert 'Object.getOwnPropertyDescriptors(load$("two.js"))' in text
    assert "\nclass D {}\nfunction* e() {}\n" in text
    assert text.index('load$("one.js");\nload$("app.js");') > text.index("class D")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('import one from "./one.js";', "app.js: can't be packed into one file: import one from"),
        ('import * as one from "./one.js";', "can't be packed"),
        ("export default 3;", "can't be packed"),
        ("export { a };", "can't be packed"),
        ('import { a } from "./gone.js";', "app.js imports gone.js, which isn't there"),
    ],
)
def test_another_form_is_an_error_and_not_a_page_that_fails(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bundle.script({"app.js": f"{line}\n", "one.js": ""}, ["app.js"])


@settings(max_examples=20)
@given(st.text() | st.lists(st.text()) | st.floats(allow_nan=False, allow_infinity=False))
def test_data_can_not_end_their_element(data: object) -> None:
    data = [data, "</script><script>alert(1)</script>", "<!--", "]]>"]
    text = bundle.as_json(data)
    assert "<" not in text
    assert json.loads(text) == data


def test_a_script_can_not_end_its_element() -> None:
    found = Elements(bundle.page(INDEX, FILES, 'x = "</script>";\r\n', None, []))
    assert [kind for kind, _ in found.scripts] == ["", "application/json", "", ""]
    assert found.scripts[0][1] == "/* </body> */ const early = '<\\/script><\\!--';\n"
    assert found.scripts[2][1] == 'x = "<\\/script>";\n'
