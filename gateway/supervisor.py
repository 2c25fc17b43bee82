"""The process behind `tidegate serve`: starts the store, the providers' processes and the gateway workers, keeps them
running, and stops them in the order that loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gateway.child import Child
from gateway.config import Config, ConfigFaults, read_text
from gateway.control import ConfigSource, WorkerOrder, encode_frame
from gateway.directories import DirectoryFault, leave_run_dir, lock_data_dir, make_run_dir
from gateway.listeners import ListenFault, open_listeners
from gateway.logs import configure_logging
from gateway.ready_poll import wait_until_ready
from gateway.store_keeper import StoreKeeper, StoreServer
from plugins.errors import GatewayError
from plugins.interfaces import ProcessSpec, Runtime

log = logging.getLogger("tidegate")
EXIT_FAULT = 2
EXIT_CRASH = 1
MAX_EARLY_DEATHS = 5  # of one child, before all was ready once
WORKER_MARGIN_S = 5.0  # beyond shutdown_grace_s: to cancel what is still running and close up
PROCESS_STOP_S = 10.0
RELOADABLE = frozenset({"auth", "models", "prices"})
WORKER_ARGV = (sys.executable, "-m", "gateway.server")


@dataclass(frozen=True)
class Start:
    """Everything that can be refused before the first process starts, done."""

    config: Config
    source: ConfigSource
    runtime: Runtime
    listeners: list[socket.socket]
    processes: list[ProcessSpec] = field(default_factory=list[ProcessSpec])

    @property
    def port(self) -> int:
        """The real one, also where the config says 0."""
        return int(self.listeners[0].getsockname()[1])


def prepare_start(source: ConfigSource, config: Config) -> Start:
    """Lock the data directory, take the port, let the providers fetch what they need.

    Raises:
        ConfigFaults, DirectoryFault, ListenFault, GatewayError: the start is refused with one line for each fault.
    """
    server = config.server
    lock_data_dir(config.store.data_dir)
    runtime = Runtime(config.store.data_dir, make_run_dir(config.store.data_dir))
    listeners = open_listeners(server.host, server.port, server.workers)
    start = Start(config, source, runtime, listeners)
    for settings in config.providers:
        provider_type = config.parts.provider_types[settings.type]
        provider_type.prepare(settings, runtime)
        start.processes.extend(provider_type.processes(settings, runtime))
    return start


class Supervisor:
    """Runs until SIGTERM or SIGINT. `announce` is called once with the port when everything is ready."""

    def __init__(
        self,
        start: Start,
        announce: Callable[[int], None],
        store: StoreServer | None,
        worker_argv: tuple[str, ...] = WORKER_ARGV,
    ) -> None:
        self._start = start
        self._config = start.config
        self._source = start.source
        self._announce = announce
        self._announced = False
        self._store = None if store is None else StoreKeeper(store)
        self._store_url = start.config.store.url
        self._stop = asyncio.Event()
        self._reloading: asyncio.Task[None] | None = None
        self._exit_code = 0
        self._processes = [Child(spec, self._on_death) for spec in start.processes]
        self._worker_argv = worker_argv
        self._workers: list[Child] = []

    async def run(self) -> int:
        """Returns the exit code."""
        self._handle_signals()
        if self._store is not None:
            try:
                self._store_url = await self._store.start()
            except GatewayError as exc:
                sys.stderr.write(f"{exc}\n")
                return EXIT_FAULT
        self._workers = [self._worker(i, sock) for i, sock in enumerate(self._start.listeners)]
        async with asyncio.TaskGroup() as tasks:
            for child in (*self._processes, *self._workers):
                tasks.create_task(child.run())
            ready = tasks.create_task(self._announce_when_ready())
            await self._stop.wait()
            ready.cancel()
            await self._shut_down()
        return self._exit_code

    def _worker(self, index: int, listener: socket.socket) -> Child:
        order = self._order(listener)
        spec = ProcessSpec(f"worker {index}", self._worker_argv, stdin=encode_frame(order))
        return Child(spec, self._on_death, pass_fds=(listener.fileno(),))

    def _order(self, listener: socket.socket) -> WorkerOrder:
        run_dir = str(self._start.runtime.run_dir)
        return WorkerOrder(self._source, listener.fileno(), self._store_url, run_dir)

    def _on_death(self, child: Child, code: int) -> bool:
        """Whether to start it again: not when it never could work."""
        if self._announced:
            return True
        if code == EXIT_FAULT:  # it has said why
            self._give_up(EXIT_FAULT)
        elif child.deaths >= MAX_EARLY_DEATHS:
            log.error("%s ended %d times before all was ready", child.name, child.deaths)
            self._give_up(EXIT_CRASH)
        return not self._stop.is_set()

    def _give_up(self, exit_code: int) -> None:
        self._exit_code = self._exit_code or exit_code
        self._stop.set()

    async def _announce_when_ready(self) -> None:
        await wait_until_ready(self._config.server.host, self._start.port)
        self._announced = True
        self._announce(self._start.port)

    async def _shut_down(self) -> None:
        """Workers first, so that running requests end while engine and store still answer."""
        for listener in self._start.listeners:
            listener.close()
        grace_s = self._config.server.shutdown_grace_s + WORKER_MARGIN_S
        if not self._announced:
            grace_s = WORKER_MARGIN_S
        await asyncio.gather(*(worker.stop(grace_s, close_input=False) for worker in self._workers))
        await asyncio.gather(*(process.stop(PROCESS_STOP_S) for process in self._processes))
        if self._store is not None:
            await self._store.stop()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_stop_signal, signum)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload_signal)

    def _on_stop_signal(self, signum: signal.Signals) -> None:
        """The first one drains; a second SIGINT ends everything at once."""
        if self._stop.is_set() and signum == signal.SIGINT:
            for child in (*self._workers, *self._processes):
                child.kill()
        self._stop.set()

    def _on_reload_signal(self) -> None:
        self._reloading = asyncio.create_task(self.reload())

    async def reload(self) -> None:
        """Read the file again. Keys, models, prices and limits are taken over; anything else keeps the old config."""
        try:
            source = reread(self._source)
            config = source.parse()
        except ConfigFaults as exc:
            for line in exc.lines:
                log.error("reload refused, the old config stays: %s", line)
            return
        fixed = changed_sections(self._config, config) - RELOADABLE
        if fixed:
            names = ", ".join(sorted(fixed))
            log.error("reload refused, the old config stays: [%s] changed; restart for that", names)
            return
        self._config, self._source = config, source
        for worker, listener in zip(self._workers, self._start.listeners, strict=True):
            worker.first_input = encode_frame(self._order(listener))
            await worker.send(worker.first_input)
        log.info("reloaded %s", source.path)


def reread(source: ConfigSource) -> ConfigSource:
    """The same file as it is now. Raises ConfigFaults, also where there never was a file."""
    return ConfigSource(read_text(Path(source.path)), source.path, source.overrides)


def changed_sections(old: Config, new: Config) -> set[str]:
    """Names of the tables that differ."""
    names = set(vars(old)) - {"parts", "path"}
    return {name for name in names if getattr(old, name) != getattr(new, name)}


def run_supervisor(source: ConfigSource, config: Config, announce: Callable[[int], None]) -> int:
    """All of `tidegate serve` after the config was read. Returns the exit code; faults are on stderr."""
    configure_logging(config.telemetry)
    try:
        start = prepare_start(source, config)
    except DirectoryFault as exc:  # the directory may be another's
        sys.stderr.write(f"{exc}\n")
        return EXIT_FAULT
    except (ListenFault, GatewayError) as exc:
        sys.stderr.write(f"{exc}\n")
        leave_run_dir(config.store.data_dir)
        return EXIT_FAULT
    try:
        return asyncio.run(_supervise(start, announce))
    finally:
        leave_run_dir(config.store.data_dir)


async def _supervise(start: Start, announce: Callable[[int], None]) -> int:
    store: StoreServer | None = None
    if not start.config.store.url:
        from cache.embedded import EmbeddedStore  # noqa: PLC0415  imports redis

        store = EmbeddedStore(start.runtime.data_dir, start.runtime.run_dir)
    return await Supervisor(start, announce, store).run()
