"""One sequence on the engine, as the event loop sees it: tokens come from the engine's thread, text goes out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from appliance.engine.api.continuation import BEGINNING, Continuation
from appliance.engine.api.errors import ApiError
from appliance.engine.api.service import LoadedModel
from appliance.engine.detokenize import StopStrings
from appliance.engine.messages import FinishReason, GenerateRequest, Likelihood, RequestRefused, TokenOutput

NOTHING_SHOWN: Mapping[int, bytes] = MappingProxyType({})


class GenerationFailed(Exception):
    """The engine gave this sequence up; the message is one sentence for the client.

    Attributes:
        hopeless: the same request would fail again.
    """

    def __init__(self, message: str, hopeless: bool = False) -> None:
        super().__init__(message)
        self.hopeless = hopeless


@dataclass(frozen=True, slots=True)
class Piece:
    """What came since the last piece. The text may lag behind the tokens: half characters and possible stop strings wait.

    Attributes:
        likelihoods: one a token, where they were asked for.
        prompt_likelihoods: of the prompt's tokens but the first, where they were asked for; in the first piece.
    """

    text: str
    token_ids: tuple[int, ...]
    likelihoods: tuple[Likelihood, ...] = ()
    prompt_likelihoods: tuple[Likelihood, ...] = ()


def joined(pieces: Iterable[Piece]) -> Piece:
    """All of them as one."""
    parts = list(pieces)
    return Piece(
        "".join(piece.text for piece in parts),
        tuple(token for piece in parts for token in piece.token_ids),
        tuple(likelihood for piece in parts for likelihood in piece.likelihoods),
        tuple(likelihood for piece in parts for likelihood in piece.prompt_likelihoods),
    )


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended, and its counts."""

    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    matched_stop: str | None


class Generation:
    """Pieces of one answer. Made by `submitted`.

    Attributes:
        told: the beginning of the answer, which its client has from an earlier engine life.
    """

    def __init__(
        self, model: LoadedModel, request: GenerateRequest, stops: Iterable[str], continuation: Continuation, shown: Mapping[int, bytes]
    ) -> None:
        self._engine = model.engine
        self._request = request
        self._detokenizer = model.text.detokenizer(request.prompt_ids, shown)
        self._stops = StopStrings(stops)
        self._loop = asyncio.get_running_loop()
        # Holds at most max_new_tokens small integers, however slowly the client reads.
        self._outputs: asyncio.Queue[TokenOutput] = asyncio.Queue()
        self._finish: FinishReason | None = None
        self.cached_tokens = continuation.ticket.cached_tokens if continuation.ticket is not None else 0
        self.completion_tokens = 0
        self.told = self._begin(continuation)
        self.started_s = time.monotonic()
        self.first_token_s: float | None = None
        """From submission to the first output; None until then."""

    @property
    def finish(self) -> FinishReason | None:
        """How it ended; None while it goes on, or was left by its client."""
        return self._finish

    @property
    def succeeded(self) -> bool:
        """It ended as an answer should."""
        return self._finish in (FinishReason.STOP, FinishReason.LENGTH)

    def _begin(self, continuation: Continuation) -> Piece:
        """Take in the tokens of an earlier life, by the way that all tokens go, so that text and counts come out as they did then."""
        request = self._request
        known = [TokenOutput(request.request_id, request.answer_ids)] if request.answer_ids else []
        said, due = (known, []) if continuation.sent else ([], known)
        if continuation.finish is not None:
            (said if continuation.sent else due).append(TokenOutput(request.request_id, finish=continuation.finish))
        elif request.answer_ids and len(request.answer_ids) >= request.sampling.max_new_tokens:
            due.append(TokenOutput(request.request_id, finish=FinishReason.LENGTH))  # the context has shrunk, down to just this
        for output in due:
            self._outputs.put_nowait(output)
        self._complete = any(output.finish is not None for output in (*said, *due))
        return self._take(said)

    def submit(self) -> None:
        """Give the sequence to the engine, unless there is nothing left to compute.

        Raises:
            ApiError: 422: it can never run.
        """
        if self._complete or self._finish is not None:
            return
        try:
            self._engine.submit(self._request, self._receive)
        except RequestRefused as refusal:
            raise ApiError(422, str(refusal), code="context_length_exceeded") from None

    def abort(self) -> None:
        """Make the engine drop the sequence, unless it has ended."""
        if self._finish is None:
            self._engine.abort(self._request.request_id)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer as it grows, the last piece once it has ended. What piled up meanwhile comes as one piece.

        Raises:
            GenerationFailed: the engine could not finish it.
        """
        while self._finish is None:
            outputs = [await self._outputs.get()]
            while not self._outputs.empty():
                outputs.append(self._outputs.get_nowait())
            if self.first_token_s is None:
                self.first_token_s = time.monotonic() - self.started_s
            yield self._take(outputs)

    def ending(self) -> Ending:
        """Once the pieces have ended."""
        assert self._finish is not None, "asked for the ending of an answer that goes on"
        return Ending(self._finish, len(self._request.prompt_ids), self.completion_tokens, self.cached_tokens, self._stops.matched)

    def _receive(self, output: TokenOutput) -> None:
        # Called by the engine's thread. The loop is closed only while the process exits: nobody is left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)

    def _take(self, outputs: list[TokenOutput]) -> Piece:
        text: list[str] = []
        token_ids: list[int] = []
        likelihoods: list[Likelihood] = []
        of_prompt = tuple(likelihood for output in outputs for likelihood in output.prompt_likelihoods)
        for output in outputs:
            likelihoods += output.likelihoods
            self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
            for token_id in output.token_ids:
                token_ids.append(token_id)
                self.completion_tokens += 1
                text.append(self._stops.feed(self._detokenizer.feed((token_id,))))
                if self._stops.matched is not None:
                    self.abort()
                    self._finish = FinishReason.STOP
                    return Piece("".join(text), tuple(token_ids), tuple(likelihoods[: len(token_ids)]), of_prompt)
            if output.finish is not None:
                text.append(self._end(output))
        return Piece("".join(text), tuple(token_ids), tuple(likelihoods), of_prompt)

    def _end(self, output: TokenOutput) -> str:
        """The text that was still held back."""
        self._finish = output.finish
        if output.finish is FinishReason.ERROR:
            raise GenerationFailed(output.error or "the engine could not finish this answer", output.hopeless)
        if output.finish is FinishReason.ABORT:
            raise GenerationFailed("the engine dropped this answer before its end")
        text = self._stops.feed(self._detokenizer.flush())
        if self._stops.matched is not None:
            self._finish = FinishReason.STOP
        return text + self._stops.flush()


@contextlib.contextmanager
def submitted(
    model: LoadedModel,
    request: GenerateRequest,
    stops: Iterable[str],
    continuation: Continuation = BEGINNING,
    shown: Mapping[int, bytes] = NOTHING_SHOWN,
) -> Iterator[Generation]:
    """A generation that is aborted when it is left before its end, by an error or because the client went away.

    Args:
        shown: special tokens that its text has; see ModelText.marks.
    """
    generation = Generation(model, request, stops, continuation, shown)
    generation.submit()
    try:
        yield generation
    finally:
        generation.abort()
