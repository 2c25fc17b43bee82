"""A worker process whose model says a script: `model_path` names its JSON file. See scripted_model.py."""

from __future__ import annotations

import json
from pathlib import Path

from backend.engine.config import EngineConfig
from backend.engine.engine import LLMEngine
from backend.engine.grammar import GrammarCompiler
from backend.models.chat_template import ChatTemplate, TemplateError
from backend.options import WorkerSettings
from backend.worker import Loaded, exit_now, main
from tests.backend.scripted_model import ScriptModel, ScriptTokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def load_script(settings: WorkerSettings) -> Loaded:
    script = json.loads(Path(settings.model_path).read_text(encoding="utf-8"))
    tokenizer = ScriptTokenizer(script["pieces"])
    engine = LLMEngine(ScriptModel(script), tokenizer, EngineConfig(num_blocks=1024))
    template = ChatTemplate(script.get("template", TEMPLATE), bos_token="", eos_token="")
    grammars = GrammarCompiler(tokenizer)
    return Loaded(engine, tokenizer, template, TemplateError, "script", "script-1", grammars)


if __name__ == "__main__":
    exit_now(main(load_script))
