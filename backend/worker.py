"""The engine's process: `python -m backend.worker`, one for each replica of a local model.

It reads one frame of settings from standard input, loads the model, and serves gateway processes on a Unix socket.
Standard input stays open for as long as the supervisor lives; when it ends, so does the worker. A model that cannot
be loaded is one line on standard error and exit code 2; an engine that cannot go on is exit code 1.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import msgspec

from backend.chat_reader import ChatReader, ChatTemplate, chat_reader
from backend.engine.config import EngineConfig
from backend.engine_thread import Engine
from backend.options import EngineOptions, WorkerSettings
from backend.prompts import PromptReader, Tokenizer
from backend.protocol import Ready
from backend.worker_server import WorkerServer

if TYPE_CHECKING:
    from backend.engine.grammar import GrammarCompiler
    from backend.models.batch import Model
    from backend.models.native_head import Head
    from backend.models.tokenizer import Tokenizer as ModelTokenizer

LOAD_FAILED = 2
SWITCH_INTERVAL_S = 0.001  # how long the event loop may wait for the engine thread's Python code
logger = logging.getLogger(__name__)


class LoadFault(Exception):
    """The model cannot be served; the message is one line."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to generate."""

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate | None
    template_error: type[Exception]
    name: str
    fingerprint: str
    grammars: GrammarCompiler | None = None  # None: answers cannot be held to a form
    reasoning: bool = True  # reasoning blocks are told apart


Load = Callable[[WorkerSettings], Loaded]


def main(load: Load) -> int:
    """Serve until standard input ends or SIGTERM comes -> exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the supervisor, which drains
    settings = read_settings(0)
    logging.basicConfig(level=logging.INFO, format=f"engine {settings.name}: %(message)s")
    stdin = StdinWatch()
    started_s = time.monotonic()
    try:
        loaded = load(settings)
    except LoadFault as exc:
        print(f"engine {settings.name}: {exc}", file=sys.stderr)  # noqa: T201
        return LOAD_FAILED
    logger.info("%s loaded in %.1f s", loaded.name, time.monotonic() - started_s)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    asyncio.run(_serve(settings, loaded, stdin))
    return 0


def read_settings(fd: int) -> WorkerSettings:
    """The one frame on standard input; what follows is only waited on, so nothing may be read ahead."""
    size = int.from_bytes(_read_exactly(fd, 4), "big")
    return msgspec.msgpack.decode(_read_exactly(fd, size), type=WorkerSettings)


def _read_exactly(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(fd, size - len(data))
        if not chunk:
            raise SystemExit("standard input ended before the settings were complete")
        data += chunk
    return data


class StdinWatch:
    """Waits for the end of standard input. Until someone can end the process in order, it just ends."""

    def __init__(self) -> None:
        self.on_end: Callable[[], object] = lambda: os._exit(0)
        Thread(target=self._wait, name="stdin", daemon=True).start()

    def _wait(self) -> None:
        while os.read(0, 4096):
            pass
        self.on_end()


async def _serve(settings: WorkerSettings, loaded: Loaded, stdin: StdinWatch) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    stdin.on_end = lambda: loop.call_soon_threadsafe(stop.set)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    server = _new_server(loaded)
    umask = os.umask(0o177)  # the socket is its owner's alone from the first moment
    listener = await loop.create_unix_server(server.new_session, settings.socket_path)
    os.umask(umask)
    server.engine_thread.start()
    logger.info(
        "ready: context %d tokens, %d KV blocks",
        server.ready.max_model_len,
        server.ready.num_blocks,
    )
    await stop.wait()
    listener.close()
    server.close()
    Path(settings.socket_path).unlink(missing_ok=True)  # noqa: ASYNC240  (the last thing that happens)


def _new_server(loaded: Loaded) -> WorkerServer:
    engine, tokenizer = loaded.engine, loaded.tokenizer
    chat = _chat_reader(loaded)
    reader = PromptReader(
        tokenizer,
        chat,
        engine.max_model_len,
        engine.vocab_size,
        loaded.grammars,
    )
    num_blocks = engine.stats().num_blocks
    ready = Ready(
        loaded.name, loaded.fingerprint, engine.max_model_len, engine.vocab_size, num_blocks
    )
    if chat is not None:
        ready.tool_notation, ready.reasons = chat.calls.notation, chat.reasons
    return WorkerServer(engine, reader, ready)


def _chat_reader(loaded: Loaded) -> ChatReader | None:
    if loaded.template is None:
        return None
    return chat_reader(
        loaded.template, loaded.template_error, loaded.tokenizer, reasoning=loaded.reasoning
    )


def load_engine(settings: WorkerSettings, clock: Callable[[], float] = time.monotonic) -> Loaded:
    """`clock` gives seconds: the engine measures its steps by it. Raises LoadFault."""
    from backend.engine.engine import (
        LLMEngine,  # torch takes seconds to import: only where it is used
    )
    from backend.engine.grammar import GrammarCompiler
    from backend.models.chat_template import TemplateError
    from backend.models.loader import ModelLoadError, load_model

    options = settings.options
    try:
        path = _model_path(settings)
        loaded = load_model(
            path,
            dtype=options.dtype,
            quantization=options.quantization,
            kv_cache_dtype=options.kv_cache_dtype,
            activations=options.activations,
            max_model_len=options.max_model_len,
            threads=settings.threads,
        )
        logger.info("%s runs on the %s tier", loaded.name, loaded.tier)
        engine = LLMEngine(
            loaded.model,
            loaded.tokenizer,
            _engine_config(options, path),
            draft_model=_load_draft(settings, loaded.tokenizer),
            draft_head=_load_head(options.head_path),
            clock=clock,
        )
        template = _template(settings, loaded.tokenizer) or loaded.chat_template
    except (ModelLoadError, TemplateError, ValueError, MemoryError, OSError) as exc:
        raise LoadFault(str(exc) or type(exc).__name__) from exc
    return Loaded(
        engine,
        loaded.tokenizer,
        template,
        TemplateError,
        loaded.name,
        loaded.model.fingerprint,
        GrammarCompiler(loaded.tokenizer) if loaded.tokenizer.eos_ids else None,
        options.reasoning == "auto",
    )


def _engine_config(options: EngineOptions, path: Path) -> EngineConfig:
    from backend.models.pooling import stated_pooling

    config = options.engine_config()
    stated = stated_pooling(path) if options.pooling == "auto" else None
    return msgspec.structs.replace(config, pooling=stated) if stated else config


def _load_draft(settings: WorkerSettings, tokenizer: ModelTokenizer) -> Model | None:
    """The model that guesses tokens for the other. ValueError when it does not know the same ones."""
    from backend.models.loader import load_model

    options = settings.options
    if not options.draft_path:
        return None
    draft = load_model(
        Path(options.draft_path),
        dtype=options.dtype,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        activations=options.activations,
        threads=settings.threads,
    )
    token_ids = range(tokenizer.vocab_size)
    same_size = draft.tokenizer.vocab_size == tokenizer.vocab_size
    if not same_size or any(
        tokenizer.token_bytes(i) != draft.tokenizer.token_bytes(i) for i in token_ids
    ):
        raise ValueError(f"{options.draft_path}: the draft model has another tokenizer")
    return draft.model


def _load_head(path: str) -> Head | None:
    from backend.models.draft_head import load_draft_head
    from backend.models.native_head import fast_head

    return fast_head(load_draft_head(Path(path))) if path else None


def _model_path(settings: WorkerSettings) -> Path:
    """Files were fetched before the start; this finds them again."""
    from backend.models.locate import locate_model

    return locate_model(settings.model_path, Path(settings.data_dir))


def _template(settings: WorkerSettings, tokenizer: ModelTokenizer) -> ChatTemplate | None:
    from backend.models.chat_template import ChatTemplate as ModelTemplate

    if not settings.template:
        return None
    bos, eos = tokenizer.bos_id, min(tokenizer.eos_ids, default=None)
    return ModelTemplate(
        Path(settings.template).read_text(encoding="utf-8"),
        bos_token="" if bos is None else tokenizer.token_text(bos),
        eos_token="" if eos is None else tokenizer.token_text(eos),
    )


def exit_now(code: int) -> None:
    """End without waiting for the engine thread: a step under way has nobody left to read it."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_now(main(load_engine))
