"""The gRPC server, with health checks, reflection and TLS. Its calls count for the same limits and metrics as
HTTP requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rankmill.extensions.gateway.bodies import READ_SECONDS
from rankmill.extensions.gateway.gateway import Gateway
from rankmill.extensions.gateway.observation import HEADER, Observation, observing
from rankmill.extensions.gateway.refusals import EXPECTED, KINDS, Refusal, refusal_of
from rankmill.extensions.grpc.services import Call, TeiServices
from rankmill.extensions.grpc.settings import GrpcSettings
from rankmill.extensions.grpc.tei_pb2 import DESCRIPTOR
from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.runtime.http import shown_address

_Context = grpc.aio.ServicerContext[Any, Any]


_REFUSED_AT_ONCE = 64
"""The server accepts this many simultaneous calls beyond ``gateway_requests``, only to refuse them and to say
when to try again. gRPC itself refuses all further calls, and does not say when.
"""

logger = logging.getLogger(__name__)


class GrpcServer:
    """A gRPC server in one event loop. When it stops, calls in progress get ``gateway_stop_seconds`` to end.

    Parameters
    ----------
    gateway
        The parts that HTTP and gRPC share.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._own = gateway.own
        self._services = TeiServices(gateway)
        self._state = health.aio.HealthServicer()
        self._stopping: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen at `host` and `port`, and serve in the background. With port 0, any free port is taken.
        Returns the port.

        Raises
        ------
        ConfigError
            The process cannot listen at the address. The settings name a file for TLS, but lack the
            certificate or its key. Or a file for TLS cannot be read.
        """
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._own.gateway_body_mib << 20),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=self._own.gateway_requests + _REFUSED_AT_ONCE,
        )
        names = self._add_services()
        bound_port = self._listen(shown_address(host, port))
        for name in ("", *names):
            await self._state.set(name, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        return bound_port

    def stop(self) -> asyncio.Task[None]:
        """Take no more calls. The returned task waits until no call is in progress any more, but at most
        ``gateway_stop_seconds``.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        return self._stopping

    async def _stop(self) -> None:
        await self._state.enter_graceful_shutdown()
        await self._server.stop(self._own.gateway_stop_seconds)

    def _add_services(self) -> list[str]:
        names = [health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]
        for service in DESCRIPTOR.services_by_name.values():
            names.append(service.full_name)
            handlers = {method.name: self._handler(method) for method in service.methods}
            generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
            self._server.add_generic_rpc_handlers([generic])
        health_pb2_grpc.add_HealthServicer_to_server(self._state, self._server)
        reflection.enable_server_reflection(names, self._server)
        return names

    def _handler(self, method: MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
        """Make the handler of a gRPC method. For ``RerankStream``, it calls `TeiServices.rerank_stream`."""
        do = getattr(self._services, re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower())
        service = method.containing_service
        route, scores = f"/{service.full_name}/{method.name}", service.name != "Info"

        # Do not tell gRPC that a method takes a single message: it would wait for the message before the call
        # is admitted.
        async def one(requests: AsyncIterator[Any], context: _Context) -> Any:
            async with self._call(context, route, scores=scores) as call:
                return await do(requests if method.client_streaming else await _only(requests), call)

        async def several(requests: AsyncIterator[Any], context: _Context) -> None:
            async with (
                self._call(context, route, scores=scores) as call,
                aclosing(do(requests, call)) as replies,
            ):
                async for reply in replies:
                    await context.write(reply)

        kind = (
            grpc.stream_stream_rpc_method_handler
            if method.server_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return kind(
            several if method.server_streaming else one,
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )

    @asynccontextmanager
    async def _call(self, context: _Context, route: str, *, scores: bool) -> AsyncIterator[Call]:
        """Admit a call, and note facts about it. An error in the ``with`` block becomes the call's status.

        `scores` is false for a call that only asks about the model. The limits on requests in progress do not
        apply to a call without scores.
        """
        metadata = context.invocation_metadata() or ()
        headers = {str(name): value for name, value in metadata if isinstance(value, str)}
        with observing(headers.get(HEADER, ""), grpc.StatusCode.CANCELLED.name) as note:
            note.route, note.dialect = route, "tei"
            context.set_trailing_metadata(((HEADER, note.id),))
            try:
                if scores:
                    async with self._gateway.admitted(note, headers) as key:
                        with _readable():
                            yield Call(note, key)
                else:
                    with _readable():
                        yield Call(note, await self._gateway.identify(note, headers))
            except EXPECTED as error:
                await _abort(context, note, refusal_of(error, self._gateway.names))
            except Exception:
                logger.exception("the call of %s failed", route)
                text = f"the call failed; the gateway's log has the reason, with request={note.id}"
                await _abort(context, note, Refusal("backend", text))
            note.status = grpc.StatusCode.OK.name

    def _listen(self, address: str) -> int:
        credentials = _credentials(self._gateway.settings.of(GrpcSettings))
        try:
            if credentials:
                return self._server.add_secure_port(address, credentials)
            return self._server.add_insecure_port(address)
        except RuntimeError:
            raise ConfigError(
                f"gateway_grpc_address: cannot listen on {address}: in use, or not an address of this host"
            ) from None


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except DecodeError:
        raise Refusal("invalid", "the bytes that were sent are not a message of this method") from None


async def _only(requests: AsyncIterator[Any]) -> Any:
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for request in requests:
                return request
    except TimeoutError:
        raise Refusal(
            "slow", f"the message did not arrive within {READ_SECONDS:g} s; send it again"
        ) from None
    raise Refusal("invalid", "the call has no message")


async def _abort(context: _Context, note: Observation, refusal: Refusal) -> NoReturn:
    """End the call with the status of a refusal. A refusal's `retry_after` is sent in the form that gRPC's
    own retries obey.
    """
    trailing = [(HEADER, note.id)]
    if refusal.retry_after is not None:
        seconds = max(math.ceil(refusal.retry_after), 1)
        trailing += [("retry-after", str(seconds)), ("grpc-retry-pushback-ms", str(1000 * seconds))]
    note.status = KINDS[refusal.kind].grpc
    await context.abort(grpc.StatusCode[note.status], refusal.message, tuple(trailing))


def _credentials(settings: GrpcSettings) -> grpc.ServerCredentials | None:
    """Read the TLS key and certificates of the gRPC server, or return ``None`` if the settings name none."""
    files = (settings.gateway_grpc_key, settings.gateway_grpc_cert)
    if not any((*files, settings.gateway_grpc_client_ca)):
        return None
    if not all(files):
        raise ConfigError("gateway_grpc_cert and gateway_grpc_key belong together: give both")
    key, cert = (_read(file) for file in files)
    authorities = settings.gateway_grpc_client_ca and _read(settings.gateway_grpc_client_ca)
    return grpc.ssl_server_credentials([(key, cert)], authorities or None, bool(authorities))


def _read(file: str | None) -> bytes:
    path = Path(file or "")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: the certificate or key cannot be read: {error.strerror}") from None
