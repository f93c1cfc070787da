"""The OpenAPI document: request bodies are read by hand, for errors in each API's own shape, and told here."""

from __future__ import annotations

from typing import Any

import pydantic
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from .guard import OPEN_PATHS

ERRORS = {
    "400": "The request cannot be understood or met; the error names the field.",
    "401": "No API key of this server was given.",
    "404": "There is no such model or thing.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "Too many requests wait.",
    "500": "The server failed.",
    "501": "The server does not have this feature.",
    "503": "The server cannot answer now.",
}


def json_body(kind: type[pydantic.BaseModel]) -> dict[str, Any]:
    """What a route adds to its entry for a body of ``kind``. `document` moves the definitions to their place."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def document(app: FastAPI, with_keys: bool) -> dict[str, Any]:
    """The document of all routes, with errors and keys."""
    result = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = result.setdefault("components", {}).setdefault("schemas", {})
    error = {"type": "object", "properties": {"error": {"type": "object"}}, "required": ["error"]}
    for name, path in result["paths"].items():
        for operation in path.values():
            if with_keys and name in OPEN_PATHS:
                operation["security"] = []
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            if "$defs" in body.get("schema", {}):
                components.update(body["schema"].pop("$defs"))
            if "stream" in body.get("schema", {}).get("properties", {}):
                operation["responses"]["200"]["content"]["text/event-stream"] = {}
            operation["responses"].pop("422", None)
            for status, text in ERRORS.items():
                operation["responses"].setdefault(
                    status, {"description": text, "content": {"application/json": {"schema": error}}}
                )
    if with_keys:
        result["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        result["security"] = [{"bearer": []}, {"x-api-key": []}]
    return result
