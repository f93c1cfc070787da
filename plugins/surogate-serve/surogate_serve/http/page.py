"""`GET /`: the chat page, one file without anything from elsewhere, which its policy holds it to."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .limits import Settings
from .requests import exchange_of


def policy_of(page: str) -> str:
    """The Content-Security-Policy under which the page's own styles and script run, by their hashes, and nothing else:
    what a model writes can become neither, and nothing is asked of another host."""

    def hashes(tag: str) -> str:
        bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class PageRoute:
    """The page, read once."""

    def __init__(self) -> None:
        self._page = files("surogate_serve").joinpath("page", "index.html").read_text(encoding="utf-8")
        self._headers = {
            "content-security-policy": policy_of(self._page),
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }

    async def page(self, request: Request) -> Response:
        exchange_of(request).route = "/"
        return Response(self._page, 200, self._headers, media_type="text/html")


def router(models: Mapping[str, Any], settings: Settings) -> APIRouter:
    """The route of this module."""
    routes = APIRouter()
    routes.add_api_route("/", PageRoute().page, methods=["GET"], response_model=None, include_in_schema=False)
    return routes
