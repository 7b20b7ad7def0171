"""Refuses requests from pages of other web sites, which can make a visitor's browser send requests to any address.

Such a page cannot read the answers, unless its name is pointed at this machine after the page was loaded (DNS
rebinding); then the Host header has that name.
"""

import ipaddress
from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit

import tornado.httputil

from lingvo_moe.tasks.text.serving.request_error import RequestError


def check_caller(request: tornado.httputil.HTTPServerRequest, names: Sequence[str] | None) -> None:
    """Refuses requests that a browser sends for another site's page; programs send no such headers.

    `names`: by which the server is called, besides localhost and addresses; None for any.

    Raises:
        RequestError: 403.
    """
    headers = request.headers
    host = headers.get("Host", "").lower()
    name = _split(f"//{host}").hostname or host
    if host and names is not None and not _is_local(name) and name not in names:
        raise RequestError(
            403,
            f"this server does not go by the name {name[:80]}; if it should, start it with"
            f" --server_names={name[:80]}",
        )
    if request.method in ("GET", "HEAD"):
        return
    said, origin = headers.get("Sec-Fetch-Site"), headers.get("Origin")
    own_page = said in ("same-origin", "none")
    if said is None:  # an old browser, a page without encryption, or no browser
        page = _split(origin or "")
        same = page.netloc.lower() == host != ""
        own_page = origin is None or same or page.hostname in (names or ())
    if not own_page:
        raise RequestError(
            403,
            f"a page of {(origin or 'another site')[:80]} cannot use this server from a browser; have that site's"
            " own server ask",
        )


def _split(url: str) -> SplitResult:
    """Splits a URL; the result for anything else has no host."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _is_local(name: str) -> bool:
    """Localhost, or an address: a name that leads elsewhere is neither."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.rstrip(".").rpartition(".")[2] == "localhost"
    return True
