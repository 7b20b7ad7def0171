"""The page to try a model: one file without external parts, light or dark, for any script and direction."""

import base64
import hashlib

from lingvo_moe.core.pages import rendering

_STYLE, _SCRIPT = (
    "".join(rendering.source(__package__, name) for name in names)
    for names in (("style.css", "translate.css"), ("translate.js",))
)
PAGE = rendering.html(__package__, "translate.html", style=_STYLE, script=_SCRIPT)


def _hash(inline: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"


# What the browser lets the page do: its own style and script, and requests to this server.
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
