"""Log lines on stderr: JSON for machines, text for people. What is logged never holds content or a secret."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec

from gateway.config_schema import TelemetryConfig

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(config: TelemetryConfig) -> None:
    """Set up this process. Other libraries speak up from "warning" on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tidegate").setLevel(LEVELS[config.log_level])


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, `extra` fields as they are, error with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        line |= {k: v for k, v in vars(record).items() if k not in _STANDARD_FIELDS}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.000 warning store: answers again request_id=req_1`."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).astimezone()
        extra = "".join(f" {k}={v}" for k, v in vars(record).items() if k not in _STANDARD_FIELDS)
        text = (
            f"{when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03d} {record.levelname.lower()} "
        )
        text += record.getMessage() + extra
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text
