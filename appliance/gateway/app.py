"""The ASGI application: one coroutine a request. Raw ASGI, because every layer here is paid for by every token."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import MutableMapping
from typing import Any

from appliance.config.api_keys import ApiKey
from appliance.gateway.actions import Actions
from appliance.gateway.client import Client, Send
from appliance.gateway.connection import EXTENSION, ClientConnection
from appliance.gateway.cors import Cors
from appliance.gateway.envelope import Refused
from appliance.gateway.fallback import Fallback
from appliance.gateway.fuse import Fuse
from appliance.gateway.headers import legal_request_id
from appliance.gateway.inflight import InflightTable, LiveRequest, new_request_id
from appliance.gateway.intake import ClientGone, Intake, Receive
from appliance.gateway.live import Live
from appliance.gateway.metrics import Metrics
from appliance.gateway.pages import Pages
from appliance.gateway.reception import Reception
from appliance.gateway.relay import Relay
from appliance.gateway.report import Reporter
from appliance.gateway.routes import Kind, Route, route_of
from appliance.gateway.sse import dialect_of

log = logging.getLogger("gateway.app")

CLIENT_LEFT = 499
"""nginx's status for it; never sent, only counted."""


class App:
    """`__call__` is the top loop of the gateway: nothing passes it but an answer."""

    def __init__(
        self,
        cors: Cors,
        reception: Reception,
        fuse: Fuse,
        fallback: Fallback,
        intake: Intake,
        relay: Relay,
        pages: Pages,
        live: Live,
        actions: Actions,
        inflight: InflightTable,
        reporter: Reporter,
        metrics: Metrics,
    ) -> None:
        self._cors = cors
        self._reception = reception
        self._fuse = fuse
        self._fallback = fallback
        self._intake = intake
        self._relay = relay
        self._pages = pages
        self._live = live
        self._actions = actions
        self._inflight = inflight
        self._reporter = reporter
        self._metrics = metrics

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """One request, as ASGI calls it."""
        connection: ClientConnection = scope["extensions"][EXTENSION]
        client = Client(send, connection, legal_request_id(scope["headers"]) or new_request_id())
        task = connection.task = asyncio.current_task()
        assert task is not None
        connection.nudge = client.nudge
        try:
            await self._serve(scope, receive, client)
        except asyncio.CancelledError:
            if not connection.gone and connection.interruption is None:
                raise
            task.uncancel()
            await self._end_cancelled(scope["path"], client)
        finally:
            connection.task = connection.nudge = None
            self._metrics.requests[client.label, CLIENT_LEFT if connection.gone else client.outcome] += 1

    async def _serve(self, scope: MutableMapping[str, Any], receive: Receive, client: Client) -> None:
        try:
            if client.connection.interruption is not None:
                raise client.connection.interruption
            client.extra = self._cors.granted(scope["headers"])
            if client.extra and (preflight := self._cors.preflight(scope["method"], scope["headers"])) is not None:
                client.label = "preflight"
                await client.answer(204, preflight, b"")
                return
            route = route_of(scope["method"], scope["path"])
            client.label = route.label
            key = self._reception.key_of(scope["path"], route, scope["headers"])
            if route.kind in (Kind.JSON, Kind.OTHER):
                await self._pass(scope, receive, client, route, key)
                return
            await self._intake.discard(scope["headers"], receive, client.connection)
            if route.kind is Kind.EVENTS:
                await self._live.serve(client, scope["headers"], key)
            elif route.kind is Kind.ADMIN:
                await client.answer(*await self._actions.perform(scope["path"], key))
            else:
                await client.answer(*await self._pages.get(scope["path"], scope["query_string"], scope["headers"], key))
        except Refused as refused:
            self._metrics.refusals[refused.code] += 1
            await self._intake.discard(scope["headers"], receive, client.connection)
            await client.refuse(refused, dialect_of(scope["path"]))
        except ClientGone:
            pass
        except Exception:  # the top loop
            log.exception("a defect of the gateway, please report it: request %s, %s", client.request_id, client.label)
            await client.refuse(Refused(500, "gateway_defect", "the gateway failed; its journal says how"), dialect_of(scope["path"]))

    async def _pass(self, scope: MutableMapping[str, Any], receive: Receive, client: Client, route: Route, key: ApiKey) -> None:
        body = await self._intake.read(scope["headers"], receive, client.connection)
        try:
            request = self._reception.accept(scope, client.request_id, body, route, key)
            account = client.account = self._reception.account(request)
            await self._fuse.check(request)
            self._reception.counted(request, len(body))
            try:
                await self._answer(request, client)
            except asyncio.CancelledError:
                if client.connection.gone:
                    self._reporter.client_left(self._inflight.shapes([request])[0])
                raise
            finally:
                self._reception.settle(key, request, account)
            self._metrics.duration.observe(asyncio.get_running_loop().time() - request.arrived_s)
        finally:
            self._intake.drop(body)

    async def _answer(self, request: LiveRequest, client: Client) -> None:
        try:
            await self._relay.serve(request, client)
        except Refused as refused:
            if not await self._fallback.serve(request, client, refused):
                raise

    async def _end_cancelled(self, path: str, client: Client) -> None:
        """The client left, or the connection's own deadlines (or a drain) interrupted the request: then it is told."""
        interruption = client.connection.interruption
        if client.connection.gone or interruption is None:
            return
        with contextlib.suppress(asyncio.CancelledError):  # it left while it was being told
            await client.refuse(interruption, dialect_of(path))
