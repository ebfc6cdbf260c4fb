"""The bodies of requests in /openapi.json: routes read them by hand, so their schemas are put there by hand. Used by
api.py."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from erniekit.serve.schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)

BODIES: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)


def body_of(kind: type[BaseModel] | None) -> dict[str, Any]:
    if kind is None:
        return {}
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def name_schemas(app: FastAPI) -> None:
    """The bodies are read by hand, so their schemas are put into the OpenAPI page by hand."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        page = plain()
        schemas = page.setdefault("components", {}).setdefault("schemas", {})
        for kind in BODIES if ChatRequest.__name__ not in schemas else ():
            schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[kind.__name__] = schema
        return page

    app.openapi = openapi  # type: ignore[method-assign]
