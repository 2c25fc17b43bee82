"""One gateway worker process: `python -m gateway.server`, started by the supervisor only."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from gateway.config import Config, ConfigFaults
from gateway.control import OrderReader, WorkerOrder, read_first_order
from gateway.http_protocol import ServerConnection
from gateway.listeners import BACKLOG
from gateway.logs import configure_logging
from plugins.errors import GatewayError
from plugins.interfaces import Runtime

log = logging.getLogger("tidegate")
STDIN = 0
KEEP_ALIVE_S = 75
EXIT_FAULT = 2


class WorkerServer(uvicorn.Server):
    """Drains on SIGTERM, SIGINT or the supervisor's end, and then returns instead of dying by the signal."""

    def __init__(self, config: uvicorn.Config, app: Starlette) -> None:
        super().__init__(config)
        self._app = app

    def drain(self) -> None:
        """No new connections; running requests may end within the grace time."""
        self._app.state.gateway.readiness.draining = True
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.drain()

    async def follow(self, orders: OrderReader) -> None:
        """Take over each reloaded config; drain when the supervisor is gone."""
        await orders.open()
        while (order := await orders.next()) is not None:
            try:
                self._app.state.gateway.reload(order.config.parse())
                log.info("reloaded %s", order.config.path)
            except (ConfigFaults, GatewayError) as exc:
                log.error("reload refused, the old config stays: %s", exc)
        if not self.should_exit:
            log.warning("the supervisor is gone: draining")
        self.drain()


async def serve(server: WorkerServer, listener: socket.socket) -> None:
    # Each of our generators is closed by its user. The loop's list of all of them costs 2 us for each, 7 a request.
    sys.set_asyncgen_hooks(firstiter=None)
    following = asyncio.create_task(server.follow(OrderReader(STDIN)))
    try:
        await server.serve(sockets=[listener])
    finally:
        following.cancel()


def uvicorn_config(app: Starlette, config: Config) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop" if sys.platform != "win32" else "asyncio",
        http=ServerConnection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(config.server.shutdown_grace_s),
    )


def calm_garbage_collector() -> None:
    """Do not walk what lives as long as the process, nor look for cycles because a burst of requests has arrived.

    With Python's own thresholds a busy worker spends a fifth of its CPU time in the collector.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def run_worker(order: WorkerOrder) -> int:
    """Serve until told to stop. Returns the exit code; 2: a fault that a restart cannot mend."""
    try:
        config = order.config.parse()
        configure_logging(config.telemetry)
        from gateway.app import create_app  # noqa: PLC0415  after the check: a faulty config is told at once

        runtime = Runtime(config.store.data_dir, Path(order.run_dir))
        app = create_app(config, runtime, order.store_url)
    except (ConfigFaults, GatewayError) as exc:
        sys.stderr.write(f"{exc}\n")
        return EXIT_FAULT
    calm_garbage_collector()
    server_config = uvicorn_config(app, config)
    server = WorkerServer(server_config, app)
    with asyncio.Runner(loop_factory=server_config.get_loop_factory()) as runner:
        runner.run(serve(server, socket.socket(fileno=order.listen_fd)))
    return 0


def main() -> int:
    order = read_first_order(STDIN)
    return 0 if order is None else run_worker(order)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads of libraries must not hold a drained worker back
