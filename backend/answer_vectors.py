"""From the worker's messages about one embeddings request to the gateway's events."""

from __future__ import annotations

import secrets
import time

from backend.answer import fingerprint, refusal
from backend.protocol import Accepted, Delta, Ready, Rejected
from plugins.errors import UpstreamError
from plugins.events import Embedding, Event, Finished, Request, Started, Usage


class EmbeddingsAnswer:
    """See `backend.answer.Answer`: one vector for each input, in the order in which they are done."""

    def __init__(self, request: Request, model: str, ready: Ready) -> None:
        self.done = False
        self._model = model
        self._fingerprint = fingerprint(ready)
        self._num_open = len(request.prompts)
        self._num_prompt_tokens = 0

    def read(self, messages: list[Accepted | Rejected | Delta]) -> list[Event]:
        """Raises GatewayError where the worker refused or failed."""
        events: list[Event] = []
        for message in messages:
            if isinstance(message, Delta):
                events.append(self._vector(message))
            elif isinstance(message, Accepted):
                self._num_prompt_tokens = message.num_prompt_tokens
                events.append(self._started())
            else:
                self.done = True
                raise refusal(message)
        if self._num_open == 0:
            self.done = True
            events += [Finished("stop"), Usage(prompt_tokens=self._num_prompt_tokens)]
        return events

    def _started(self) -> Started:
        answer_id = f"embd-{secrets.token_hex(12)}"
        return Started(answer_id, self._model, int(time.time()), self._fingerprint)

    def _vector(self, delta: Delta) -> Embedding:
        if not delta.embedding:
            raise UpstreamError(f"the engine gave up: {delta.error or delta.finish_reason}")
        self._num_open -= 1
        return Embedding(delta.embedding, delta.index)
