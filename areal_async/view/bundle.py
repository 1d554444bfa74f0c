"""The page as one file: its modules as one script, styles, Plotly and data inside; nothing is asked of a network.

What always holds: what runs is named by its digest in the file's own content security policy, so no text of a run can
become a script; data can't end the element that they stand in. The modules are the page's own, in which only `import`
and `export` are written as calls: browsers refuse to load modules beside a file that was opened from a disk. Only the
forms of `import` and `export` that the page uses are known; another one is an error, not a page that fails.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from typing import Final

import msgspec

_NAME: Final = r'"\./([\w.]+)"'
_IMPORT: Final = re.compile(rf"^import \{{([^}}]*)\}} from {_NAME};", re.MULTILINE)
_IMPORT_ONLY: Final = re.compile(rf"^import {_NAME};", re.MULTILINE)
_EXPORT_ALL: Final = re.compile(rf"^export \* from {_NAME};", re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ((?:async )?function\*?|class|const|let) (\w+)", re.MULTILINE)
_DYNAMIC: Final = re.compile(r"\bimport\(")
_LEFT: Final = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)
_STYLE: Final = re.compile(r' *<link rel="stylesheet" href="static/([\w.]+)">\n')
_CLASSIC: Final = re.compile(r' *<script src="static/([\w.]+)"></script>\n')
_MODULE: Final = re.compile(r' *<script type="module" src="static/([\w.]+)"></script>\n')

# `$` so that they are no names of the page
_LOADER: Final = """
const modules$ = new Map();
function load$(name) {
  if (!modules$.has(name)) {
    const names = {};
    modules$.set(name, names);
    factories$.get(name)(names);
  }
  return modules$.get(name);
}
async function import$(path) {
  const name = path.replace("./", "");
  if (!factories$.has(name)) throw new Error("it isn't in this file");
  return load$(name);
}
"""


def script(modules: Mapping[str, str], first: list[str]) -> str:
    """One classic script of these modules (name of the file -> text), which loads those named first, in this order.
    Errors: ValueError: a module imports one that isn't there, or has an `import` or `export` of another form."""
    factories = ",\n".join(f'["{name}", {_factory(name, modules)}]' for name in modules)
    loads = "".join(f'load$("{name}");\n' for name in first)
    return f'(() => {{\n"use strict";\nconst factories$ = new Map([\n{factories}\n]);\n{_LOADER}{loads}}})();\n'


def _factory(name: str, modules: Mapping[str, str]) -> str:
    text = modules[name]
    exported = [match[2] for match in _EXPORT.finditer(text)]
    for pattern, group in ((_IMPORT, 2), (_IMPORT_ONLY, 1), (_EXPORT_ALL, 1)):
        for match in pattern.finditer(text):
            if match[group] not in modules:
                raise ValueError(f"{name} imports {match[group]}, which isn't there")
    text = _IMPORT.sub(lambda match: f'const {{{_renamed(match[1])}}} = load$("{match[2]}");', text)
    text = _IMPORT_ONLY.sub(r'load$("\1");', text)
    text = _EXPORT_ALL.sub(r'Object.defineProperties(exports$, Object.getOwnPropertyDescriptors(load$("\1")));', text)
    text = _DYNAMIC.sub("import$(", _EXPORT.sub(r"\1 \2", text))
    if left := _LEFT.search(text):
        raise ValueError(f"{name}: can't be packed into one file: {left[0]}")
    # as getters: what a function of another module sees is the value of that moment, as with modules
    getters = ", ".join(f"{each}: {{ enumerable: true, get: () => {each} }}" for each in exported)
    return f"(exports$) => {{\nObject.defineProperties(exports$, {{ {getters} }});\n{text}}}"


def _renamed(names: str) -> str:
    return re.sub(r"(\w+) as (\w+)", r"\1: \2", names)


def page(index: str, files: Mapping[str, str], plotly: str, data: object, first: list[str]) -> str:
    """index: text of index.html. files: the page's styles and scripts. plotly: its script. data: by address, what the
    page would ask for. first: modules that are loaded before the page's own. Errors: ValueError, as `script`."""
    scripts: list[str] = []

    def classic(text: str) -> str:
        safe = _inside(text)
        scripts.append(safe)
        return f"<script>{safe}</script>\n"

    text = _STYLE.sub(lambda match: f"<style>\n{files[match[1]]}</style>\n", index)
    text = _CLASSIC.sub(lambda match: classic(files[match[1]]), text)
    main = _MODULE.search(text)
    if main is None or "</body>" not in text or '<meta charset="utf-8">' not in text:
        raise ValueError("index.html: has no module, body or character set to put the rest at")
    text = text.replace(main[0], "")
    modules = {name: body for name, body in files.items() if name.endswith(".js") and name not in _classics(index)}
    inside = (
        f'<script type="application/json" id="areal-data">{as_json(data)}</script>\n'
        + classic(plotly)
        + classic(script(modules, [*first, main[1]]))
    )
    above, end, below = text.rpartition("</body>")
    text = f"{above}{inside}{end}{below}"
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_digest, scripts))}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    told = f'<meta charset="utf-8">\n    <meta http-equiv="Content-Security-Policy" content="{policy}">'
    return text.replace('<meta charset="utf-8">', told, 1)


def _classics(index: str) -> set[str]:
    return {match[1] for match in _CLASSIC.finditer(index)}


def as_json(data: object) -> str:
    """JSON that may stand in a script element: without any `<`, which could end it or open a comment."""
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")


def _inside(text: str) -> str:
    """A script that can't end its own element: in strings, templates and patterns these mean the same."""
    return text.replace("\r\n", "\n").replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
