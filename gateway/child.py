"""One child process, kept alive: started again with backoff when it dies, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import gateway
from plugins.interfaces import ProcessSpec

log = logging.getLogger("tidegate")
MAX_BACKOFF_S = 10.0
HEALTHY_AFTER_S = 10.0  # who lived so long starts anew with the shortest backoff
SOURCE_ROOT = Path(gateway.__file__).parents[1]


class Backoff:
    """How long to wait before the next start: doubled at each quick death."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._next_s = first_s

    def after(self, lived_s: float) -> float:
        if lived_s >= HEALTHY_AFTER_S:
            self._next_s = self._first_s
        delay_s = self._next_s
        self._next_s = min(delay_s * 2, MAX_BACKOFF_S)
        return delay_s


class Child:
    """`spec.stdin` is written at each start; `on_death` hears the exit code and says whether to start again."""

    def __init__(
        self,
        spec: ProcessSpec,
        on_death: Callable[[Child, int], bool],
        pass_fds: tuple[int, ...] = (),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name = spec.name
        self.first_input = spec.stdin
        self.deaths = 0
        self._spec = spec
        self._on_death = on_death
        self._pass_fds = pass_fds
        self._sleep = sleep
        self._process: Process | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def run(self) -> None:
        """Returns after `stop`, or when `on_death` wants no other start."""
        backoff = Backoff(self._spec.restart_backoff_s)
        while not self._stopping.is_set():
            started_s = time.monotonic()
            code = await self._run_once()
            if self._stopping.is_set():
                return
            self.deaths += 1
            if not self._on_death(self, code):
                return
            delay_s = backoff.after(time.monotonic() - started_s)
            log.error("%s ended (%s); again in %.1f s", self.name, _how(code), delay_s)
            await self._pause(delay_s)

    async def send(self, frame: bytes) -> None:
        """Write to the running process; lost without harm when it is just dying."""
        process = self._process
        if process is not None and process.stdin is not None and process.returncode is None:
            with suppress(ConnectionError):
                process.stdin.write(frame)
                await process.stdin.drain()

    async def stop(self, grace_s: float, close_input: bool = True) -> None:
        """SIGTERM and the end of its input, then SIGKILL after `grace_s`."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        self.signal(signal.SIGTERM)
        if process.stdin is not None and close_input:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            log.error("%s did not end within %.0f s: killed", self.name, grace_s)
            self.kill()
            await process.wait()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def signal(self, signum: signal.Signals) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(signum)

    async def _run_once(self) -> int:
        """Start, feed and await one process. Returns its exit code; 127: it could not be started."""
        try:
            process = await create_subprocess_exec(
                *self._spec.argv,
                stdin=PIPE,
                env=_environment(self._spec),
                pass_fds=self._pass_fds,
                process_group=0,  # a ^C of the terminal is ours to handle, not the child's
            )
        except OSError as exc:
            log.error("%s cannot be started: %s", self.name, exc.strerror)
            return 127
        self._process = process
        try:
            await self.send(self.first_input)
            if self._stopping.is_set():  # told to stop while it was being started
                self.signal(signal.SIGTERM)
            return await process.wait()
        finally:
            if process.returncode is None:  # we are being cancelled
                self.kill()

    async def _pause(self, delay_s: float) -> None:
        """Sleep, but not into a stop."""
        stopped = asyncio.ensure_future(self._stopping.wait())
        slept = asyncio.ensure_future(self._sleep(delay_s))
        try:
            await asyncio.wait({stopped, slept}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            slept.cancel()


def _environment(spec: ProcessSpec) -> dict[str, str]:
    """Ours, with our own packages first on the path: a folder named `cache` in the working directory is not ours."""
    path = os.pathsep.join(filter(None, (str(SOURCE_ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **spec.env}


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
