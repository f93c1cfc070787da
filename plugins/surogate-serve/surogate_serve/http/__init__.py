"""The HTTP face: an ASGI application with the routes of OpenAI and Anthropic, before models that generate."""

from __future__ import annotations
