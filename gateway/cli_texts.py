"""Texts of the command line: the config for `--model`, the summary of a config, what is printed once all is ready."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gateway.config import Config
from gateway.config_faults import ConfigFaults
from gateway.listeners import join_host

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_DEMO_NAME = "smollm2"


def default_config(model: str) -> str:
    """A config that serves one model to this machine. Raises ConfigFaults where `model` is nothing we know."""
    path, name = _model_path(model)
    return f"""
[auth]
mode = "open"

[[providers]]
name = "local"
type = "engine"
path = {json.dumps(path, ensure_ascii=False)}

[[models]]
name = {json.dumps(name, ensure_ascii=False)}
targets = [{json.dumps(f"local/{name}", ensure_ascii=False)}]
"""


def _model_path(model: str) -> tuple[str, str]:
    """What the engine is given as `path`, and the name that clients ask for."""
    if model == "demo":
        return "demo", _DEMO_NAME
    if model and Path(model).exists():
        path = Path(model).absolute()
        return str(path), path.stem if path.is_file() else path.name
    hub_name = model.removeprefix("hub:")
    if _HUB_NAME.fullmatch(hub_name) and not hub_name.endswith(".gguf"):
        return f"hub:{hub_name}", hub_name.rpartition("/")[2]
    raise ConfigFaults([f'--model: no such file or folder: "{model}"'])


def summary(config: Config) -> str:
    """One line for each thing an operator wants to be sure of."""
    server = config.server
    keys = "no key asked (open)" if config.auth.mode == "open" else f"{len(config.auth.keys)} keys"
    models = ", ".join(model.name for model in config.models)
    providers = ", ".join(f"{provider.name} ({provider.type})" for provider in config.providers)
    return (
        f"  listens on  {join_host(server.host, server.port)}, workers: {server.workers}, {keys}\n"
        f"  models      {models}\n"
        f"  providers   {providers}\n"
        f"  plugins     {', '.join(config.plugins.enabled) or 'none'}"
    )


def banner(config: Config, port: int) -> str:
    """Where it is, what it serves, and two ways to try it that can be copied as they are."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.server.host, config.server.host)
    url = f"http://{join_host(host, port)}/v1"
    is_open = config.auth.mode == "open"
    model = json.dumps(config.models[0].name)
    body = f'{{"model": {model}, "messages": [{{"role": "user", "content": "Say hello."}}]}}'
    key_line = "" if is_open else '  -H "Authorization: Bearer YOUR_KEY" \\\n'
    return f"""
Tidegate is ready at {url}
Models: {", ".join(model.name for model in config.models)}

curl {url}/chat/completions \\
{key_line}  -H "Content-Type: application/json" \\
  -d {_shell_quoted(body)}

python - <<'EOF'
from openai import OpenAI  # pip install openai
client = OpenAI(base_url="{url}", api_key="{"none" if is_open else "YOUR_KEY"}")
messages = [{{"role": "user", "content": "Say hello."}}]
answer = client.chat.completions.create(model={model}, messages=messages)
print(answer.choices[0].message.content)
EOF

Ctrl-C stops it.
"""


def _shell_quoted(text: str) -> str:
    quoted = text.replace("'", "'\\''")
    return f"'{quoted}'"
