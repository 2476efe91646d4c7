"""The routes."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from appliance.engine.api import metrics
from appliance.engine.api.answering import Generate
from appliance.engine.api.anthropic import count_message_tokens, read_message_request
from appliance.engine.api.chat import encode_chat, read_chat, read_end, read_messages, read_template_variables
from appliance.engine.api.completions import read_completion
from appliance.engine.api.errors import ApiError, bad_request
from appliance.engine.api.exchange import Job, Json, LookUp
from appliance.engine.api.fields import Fields
from appliance.engine.api.generate import read_generate
from appliance.engine.api.parameters import check_model, encode_prompt
from appliance.engine.api.service import LoadedModel, Service
from appliance.engine.api.tools import read_tools

log = logging.getLogger("appliance.engine.http")

COUNT = "/appliance/count"
"""In front of a generating endpoint's path: the same body, and its prompt is only counted. The gateway asks; it passes no such path on."""


PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/",
    "/v1/tokenize",
    "/v1/detokenize",
    "/generate",
    "/tokenize",
    "/detokenize",
)
"""For clients, as /health says them; one that ends in a slash stands for all that begin with it."""


def make_app(service: Service) -> Starlette:
    """The engine's HTTP application over this service."""
    pages = _Pages(service)
    readers = (
        ("/v1/chat/completions", read_chat),
        ("/v1/completions", read_completion),
        ("/v1/messages", read_message_request),
        ("/generate", read_generate),
    )
    look_ups = (
        ("/tokenize", _tokenize),
        ("/v1/tokenize", _tokenize),
        ("/detokenize", _detokenize),
        ("/v1/detokenize", _detokenize),
        ("/v1/messages/count_tokens", count_message_tokens),
    )
    routes = [
        Route("/health", pages.health),
        Route("/metrics", pages.metrics),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.one_model),
        *(Route(path, Generate(service, path, read), methods=["POST"]) for path, read in readers),
        *(Route(path, LookUp(service, path, compute), methods=["POST"]) for path, compute in look_ups),
        *(Route(f"{COUNT}{path}", LookUp(service, COUNT, _counter(read)), methods=["POST"]) for path, read in readers),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error, ApiError: _api_error, Exception: _defect})


class _Pages:
    """What is answered from the service's state alone."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    async def health(self, _request: Request) -> Response:
        """200 with progress and limits when requests are taken, else 503 with the word why not."""
        model = self._service.model
        answer: Json = {"status": self._service.status}
        if model is not None:
            stats = model.engine.stats()
            answer |= {"progress": stats.progress, "running": stats.running, "waiting": stats.waiting}
            answer |= {"kv_blocks_used": stats.kv_blocks_used, "block_violations": stats.block_violations}
            answer["limits"] = {**dataclasses.asdict(model.limits), "paths": PATHS}
        return JSONResponse(answer, 200 if answer["status"] == "ok" else 503)

    async def metrics(self, _request: Request) -> Response:
        """Prometheus' text format."""
        model = self._service.model
        page = metrics.render(self._service.metrics, None if model is None else model.engine.stats())
        return Response(page, media_type=metrics.CONTENT_TYPE)

    async def models(self, _request: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._card(self._service.loaded())]})

    async def one_model(self, request: Request) -> Response:
        """The one model by its name."""
        model, name = self._service.loaded(), request.path_params["name"]
        check_model(Fields({"model": name}), model)
        return JSONResponse(self._card(model))

    def _card(self, model: LoadedModel) -> Json:
        model_id = model.limits.model_id
        return {
            "id": model_id,
            "object": "model",
            "created": self._created,
            "owned_by": "llm-appliance",
            "root": model_id,
            "max_model_len": model.limits.context_length_tokens,
        }


def _tokenize(fields: Fields, model: LoadedModel) -> Json:
    """A text's or a conversation's token ids; the count is what a generating endpoint would charge."""
    check_model(fields, model)
    prompt, add_special_tokens = fields.text("prompt"), fields.flag("add_special_tokens", default=True)
    messages = None if fields.value("messages") is None else read_messages(fields)
    extra, tools = read_template_variables(fields), read_tools(fields, model)
    end = read_end(fields, messages or [])
    strings = fields.flag("return_token_strs")
    fields.end()
    if (prompt is None) == (messages is None):
        raise bad_request("send either prompt or messages", "prompt", "invalid_value")
    if messages is not None:
        ids = encode_chat(messages, extra, model, tools=tools.told, end=end)
    else:
        ids = encode_prompt(prompt or "", model, "prompt", add_special_tokens=add_special_tokens)
    names = {"token_strs": [model.text.token(token_id)[0] for token_id in ids]} if strings else {}
    return {"tokens": ids, "count": len(ids), "max_model_len": model.limits.context_length_tokens, **names}


def _counter(read: Callable[[Fields, LoadedModel, None], Job]) -> Callable[[Fields, LoadedModel], Json]:
    """The endpoint's own reader counts: the number cannot differ from what it would charge, nor a refusal from its own."""

    def count(fields: Fields, model: LoadedModel) -> Json:
        return {"prompt_tokens": read(fields, model, None).longest_prompt}

    return count


def _detokenize(fields: Fields, model: LoadedModel) -> Json:
    """The text of token ids, special tokens left out unless they are wanted."""
    check_model(fields, model)
    ids, without_special = fields.token_ids("tokens", model.text.vocabulary), fields.flag("skip_special_tokens", default=True)
    fields.end()
    if ids is None:
        raise bad_request("tokens must be a list of token ids", "tokens", "invalid_type")
    return {"prompt": model.text.decode(ids, skip_special_tokens=without_special)}


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path[:200]
    words = {404: f"this engine has no endpoint {path}; it has {', '.join(PATHS)}", 405: f"{path} does not take {method}"}
    response = ApiError(error.status_code, words.get(error.status_code, error.detail), code="unknown_endpoint").response()
    response.headers.update(error.headers or {})
    return response


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _defect(_request: Request, error: Exception) -> Response:
    """A defect of ours. Starlette raises it again behind this answer, and uvicorn logs the traceback."""
    log.error("A request failed in a way that nobody foresaw; please report this with the traceback below: %r", error)
    return ApiError(
        500, "the engine failed on this request in a way that nobody foresaw; its log has the traceback", code="defect"
    ).response()
