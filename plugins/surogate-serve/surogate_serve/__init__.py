"""Serving for Surogate: an HTTP face with the APIs of OpenAI and Anthropic before the core's native engine loop."""

from __future__ import annotations
