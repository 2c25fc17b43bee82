"""A small good config, and what the reader says of a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import Config, ConfigFaults, parse_config

SERVER = '[auth]\nmode = "open"\n'
PROVIDER = '[[providers]]\nname = "up"\ntype = "openai_compatible"\nbase_url = "http://h/v1"\n'
MODEL = '[[models]]\nname = "m"\ntargets = ["up/x"]\n'
GOOD = SERVER + PROVIDER + MODEL  # lines 1-2, 3-6, 7-9


def parse(text: str) -> Config:
    return parse_config(text, Path("config.toml"))


def faults(text: str) -> list[str]:
    with pytest.raises(ConfigFaults) as caught:
        parse(text)
    return caught.value.lines
