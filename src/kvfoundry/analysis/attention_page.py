"""The attention maps as one HTML file that opens offline: choose sample, layer and scale, read the passages.

What comes from data stands in a data element that the script reads as text; the page's policy lets run the one script
that it carries, by its hash, and forbids every fetch.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any


@cache
def _resource(name: str) -> str:
    return files("kvfoundry.analysis").joinpath(name).read_text(encoding="utf-8")


def render(title: str, about: dict[str, Any], samples: Sequence[dict[str, Any]]) -> str:
    """The page. samples: as in attention.json, with `texts`: name of a part -> its text."""
    code = _resource("attention.js")
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    facts = "".join(f"<div><dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd></div>" for k, v in about.items())
    # < as an escape, so that no text can end the element.
    data = json.dumps(list(samples), ensure_ascii=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{_resource("attention.css")}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<dl class="facts">{facts}</dl>
<form>
<label>Sample <select id="sample"></select></label>
<label>Columns <select id="columns"><option value="step">tokens of the answer</option>
<option value="layer">layers</option></select></label>
<label>Layer <select id="layer"></select></label>
<label>Share of <select id="of"><option value="passages">the attention to passages</option>
<option value="all">all attention</option></select></label>
</form>
<p id="question"></p>
<div class="scroll"><table id="map"></table></div>
<p class="quiet">Percent; a darker cell has more. ★ marks passages that the answer needs. Choose a row to read it.</p>
<section id="text" aria-live="polite"></section>
</main>
<script type="application/json" id="data">{data}</script>
<script>{code}</script>
</body>
</html>
"""
