"""Several answers to one request (`n`, several prompts): each a sequence of its own, told as choices of one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from appliance.engine.api.exchange import Job, Json
from appliance.engine.api.generation import Ending, Generation, GenerationFailed, Piece, joined


def together(endings: Sequence[Ending], prompts: int) -> Ending:
    """For the usage: each prompt counts once, the answers all."""
    firsts = endings[:: len(endings) // prompts]
    return replace(
        endings[0],
        prompt_tokens=sum(ending.prompt_tokens for ending in firsts),
        cached_tokens=sum(ending.cached_tokens for ending in firsts),
        completion_tokens=sum(ending.completion_tokens for ending in endings),
    )


async def whole(job: Job, generations: Sequence[Generation]) -> Json:
    """The answer without a stream.

    Raises:
        GenerationFailed: one of them could not be finished.
    """
    pieces = await asyncio.gather(*(_all_of(generation) for generation in generations))
    endings = [generation.ending() for generation in generations]
    answers = [shape.whole(piece, ending) for shape, piece, ending in zip(job.shapes, pieces, endings, strict=True)]
    choices = [choice for answer in answers for choice in answer["choices"]]
    frame = job.shape.whole(replace(pieces[0], text="", token_ids=(), likelihoods=()), together(endings, job.prompts))
    return {**frame, "choices": choices}


async def _all_of(generation: Generation) -> Piece:
    return joined([piece async for piece in generation.pieces()])


async def events(job: Job, generations: Sequence[Generation]) -> AsyncIterator[bytes]:
    """The stream: every choice's events as they come, and one usage.

    Raises:
        GenerationFailed: one of them could not be finished.
    """
    # One piece at a time is in hand: what the client does not take yet waits in the generations, as numbers.
    told: asyncio.Queue[tuple[int, Piece | GenerationFailed | None]] = asyncio.Queue(maxsize=1)
    pumps = [asyncio.create_task(_pump(index, generation, told)) for index, generation in enumerate(generations)]
    begun: set[int] = set()
    running = len(generations)
    try:
        while running:
            index, what = await told.get()
            shape = job.shapes[index]
            if isinstance(what, GenerationFailed):
                raise what
            values = [] if index in begun else shape.begin()
            begun.add(index)
            if what is None:
                running -= 1
                values += shape.end(generations[index].ending())[:1]
            else:
                values += shape.piece(what)
            for value in values:
                yield shape.encode(value)
    finally:
        for pump in pumps:
            pump.cancel()
    for value in job.shape.end(together([generation.ending() for generation in generations], job.prompts))[1:]:
        yield job.shape.encode(value)
    yield job.shape.last


async def _pump(index: int, generation: Generation, told: asyncio.Queue[tuple[int, Piece | GenerationFailed | None]]) -> None:
    try:
        async for piece in generation.pieces():
            await told.put((index, piece))
        await told.put((index, None))
    except GenerationFailed as failure:
        await told.put((index, failure))
