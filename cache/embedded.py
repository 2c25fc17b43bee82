"""The private store: a Valkey server on a Unix socket that keeps everything in the data directory.

Two locks guard the directory. The supervisor holds `store.owner`; the server process holds `store.lock`: it inherits
the descriptor, so the kernel frees the lock exactly when the server is gone. Owner lock free, server lock held: a
supervisor was killed. The next one asks the orphan to shut down, waits for the lock and starts its own server.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from asyncio.subprocess import DEVNULL, Process, create_subprocess_exec
from pathlib import Path
from urllib.parse import quote

from cache.connection import CONNECTION_ERRORS, Connection, answers
from cache.server_binary import find_server_binary
from plugins.errors import StoreUnavailable

log = logging.getLogger("tidegate")
MAX_SOCKET_PATH_BYTES = 103  # macOS; Linux allows 107
MAX_LOG_BYTES = 1 << 20
STOP_TIMEOUT_S = 10.0
POLL_S = 0.01


class EmbeddedStore:
    """One server process on `data_dir`/store. `run_dir` holds its socket and is made private to this user.

    It writes its file before it answers, but at most two seconds late while the disk is busy: so much a kill may cost.
    A clean stop loses nothing.
    """

    def __init__(self, data_dir: Path, run_dir: Path) -> None:
        self._store_dir = data_dir.absolute() / "store"
        self._log_path = self._store_dir / "store.log"
        self._run_dir = run_dir.absolute()
        self._socket_path = self._run_dir / "store.sock"
        self._owner_fd: int | None = None
        self._process: Process | None = None
        self._log_start = 0  # where the log of this start begins

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self._socket_path))}"

    @property
    def pid(self) -> int | None:
        """Of the running server."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> str:
        """Start the server, also again after it died, and return its URL once it answers.

        Raises:
            StoreUnavailable: no server program, a directory that cannot be used, another owner of it, or the server
                does not start; one line says which.
        """
        binary = find_server_binary()
        try:
            self._make_directories()
            self._take_ownership()
            await self._launch(binary)
            await self._wait_until_it_answers()
        except OSError as exc:
            await self.stop()
            raise StoreUnavailable(
                f"the store cannot use {exc.filename or self._store_dir}: {exc.strerror}"
            ) from exc
        except BaseException:
            await self.stop()
            raise
        return self.url

    async def wait(self) -> None:
        """Returns when the server has died or was stopped."""
        if self._process is not None:
            await self._process.wait()

    async def stop(self) -> None:
        """Shut the server down cleanly, its data on disk, and give the directory back."""
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()  # for Valkey the same as SHUTDOWN
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:  # frozen: what it acknowledged is in the append-only file
                process.kill()
                await process.wait()
        self._process = None
        if self._owner_fd is not None:
            os.close(self._owner_fd)
            self._owner_fd = None

    def _make_directories(self) -> None:
        for directory in (self._store_dir, self._run_dir):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if directory.stat().st_mode & 0o077:
                directory.chmod(0o700)
        length = len(os.fsencode(self._socket_path))
        if length > MAX_SOCKET_PATH_BYTES:
            raise StoreUnavailable(
                f"the path of the store's socket is too long: {length} bytes of at most {MAX_SOCKET_PATH_BYTES}: "
                f"{self._socket_path}"
            )

    def _take_ownership(self) -> None:
        if self._owner_fd is not None:  # a restart
            return
        owner_fd = _open_lock_file(self._store_dir / "store.owner")
        if not _lock(owner_fd):
            os.close(owner_fd)
            raise StoreUnavailable(f"another Tidegate is running on {self._store_dir.parent}")
        self._owner_fd = owner_fd

    async def _launch(self, binary: Path) -> None:
        lock_fd = _open_lock_file(self._store_dir / "store.lock")
        try:
            if not _lock(lock_fd):
                await self._dismiss_orphan(lock_fd)
            os.ftruncate(lock_fd, 0)
            os.pwrite(lock_fd, self.url.encode(), 0)  # where the next supervisor finds an orphan
            self._trim_log()
            with self._log_path.open("ab") as log_file:
                self._process = await create_subprocess_exec(
                    *(str(binary), *self._options()),
                    stdin=DEVNULL,
                    stdout=log_file,
                    stderr=log_file,
                    pass_fds=(lock_fd,),
                    start_new_session=True,  # the terminal's ^C is ours to handle, not the server's
                )
        finally:
            os.close(
                lock_fd
            )  # the server keeps its own copy of the descriptor, and with it the lock

    def _options(self) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self._socket_path),
            "unixsocketperm": "600",
            "dir": str(self._store_dir),
            "daemonize": "no",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "aof-load-truncated": "yes",
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        return [word for name, value in settings.items() for word in (f"--{name}", value)]

    def _trim_log(self) -> None:
        self._log_start = self._log_path.stat().st_size if self._log_path.exists() else 0
        if self._log_start > MAX_LOG_BYTES:
            self._log_path.unlink()
            self._log_start = 0

    async def _wait_until_it_answers(self) -> None:
        """However long it takes to load its file: as long as the process lives there is hope."""
        process = self._process
        assert process is not None
        connection = Connection(self.url)
        while not await answers(connection, timeout_s=1.0):
            if process.returncode is not None:
                raise StoreUnavailable(f"the store does not start: {self._last_log_line()}")
            await asyncio.sleep(POLL_S)
        await connection.close()

    def _last_log_line(self) -> str:
        log_text = self._log_path.read_bytes()[self._log_start :].decode(errors="replace")
        said = [line for line in log_text.split("\n") if line.strip()]
        if not said:
            return f"it could not even write to {self._log_path}; is the disk full?"
        return said[-1].split(" # ")[-1]

    async def _dismiss_orphan(self, lock_fd: int) -> None:
        """Ask the server that a killed supervisor left behind to end, and wait for its lock."""
        orphan_url = os.pread(lock_fd, 4096, 0).decode(errors="replace")
        log.warning("store: a server of an earlier run still lives; asking it to shut down")
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._shut_down(orphan_url)
                while not _lock(lock_fd):  # noqa: ASYNC110  no event tells
                    await asyncio.sleep(POLL_S)
        except TimeoutError as exc:
            raise StoreUnavailable(
                f"a store server of an earlier run still holds {self._store_dir} and does not shut down; "
                "end that process, then start again"
            ) from exc

    async def _shut_down(self, url: str) -> None:
        connection = Connection(url)
        try:
            reply = await connection.exchange([("CONFIG", "GET", "dir")])
            if reply[0][1] == os.fsencode(self._store_dir):  # not somebody else's on a reused path
                await connection.exchange([("SHUTDOWN",)])
        except CONNECTION_ERRORS:  # it ends, which is what we want; the lock will tell
            pass
        finally:
            await connection.close()


def _open_lock_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(fd: int) -> bool:
    """True where the lock is ours now; the kernel frees it when the last copy of the descriptor is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
