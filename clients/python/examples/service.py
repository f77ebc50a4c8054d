"""A web service over Bulkhead: speech that is streamed while it is made, uploaded voices, questions
about pictures.

    pip install fastapi uvicorn numpy pillow
    bulkhead up fleet.yaml
    uvicorn service:app

    curl -T me.wav localhost:8000/voices/me
    curl -N localhost:8000/speech --json '{"text": "Hello.", "voice": "me"}' >hello.wav
    curl -N 'localhost:8000/questions?prompt=What+is+this?' --data-binary @picture.png
    curl -N localhost:8000/progress

The models are `speech` and `vision` of the fleet, with the methods `speak` and `answer` of
`bulkhead.engines`, or those that $SPEECH_MODEL and $VISION_MODEL name. Each is a process of its
own: it is loaded by the first request, a client that goes away cancels its request, and if one
model's process dies, its requests get a 503, the other model goes on, and the next request finds a
new process. The service itself holds no model.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import struct
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from PIL import Image
from pydantic import BaseModel

import bulkhead

SPEECH = os.environ.get("SPEECH_MODEL", "speech")
VISION = os.environ.get("VISION_MODEL", "vision")
UPLOAD_BYTES_MAX = 32 << 20
VOICES_MAX = 64
PIECES_MAX = 8192  #: of an answer, that wait for a slow listener
STATUS = {"input_invalid": 422, "model_unknown": 404, "queue_full": 503, "worker_lost": 503, "worker_draining": 503,
          "model_quarantined": 503, "not_running": 503, "deadline_exceeded": 504, "out_of_memory": 507}  # fmt: skip


@asynccontextmanager
async def connected(app: FastAPI) -> AsyncIterator[None]:
    async with bulkhead.aio.connect() as app.state.daemon:
        yield


app = FastAPI(lifespan=connected)
#: By name: float32 [channels, samples], and how many samples a second has.
voices: dict[str, tuple[np.ndarray, int]] = {}


class Speech(BaseModel):
    text: str
    voice: str | None = None
    #: Of the model's method: `bulkhead info --model NAME` lists them.
    parameters: dict[str, Any] = {}


@app.exception_handler(bulkhead.Error)
async def failed(_: Request, error: bulkhead.Error) -> JSONResponse:
    told = {"code": error.code, "attempt": error.attempt, "remedy": error.remedy}
    return JSONResponse(told, STATUS.get(error.code, 500))


@app.put("/voices/{name}", status_code=201)
async def upload_voice(name: str, request: Request) -> dict[str, float]:
    """A WAV file of 16-bit PCM: the voice `name`, to speak with."""
    if name not in voices and len(voices) == VOICES_MAX:
        raise HTTPException(507, f"there are {VOICES_MAX} voices already")
    try:
        voices[name] = samples, rate = read_wav(await upload(request))
    except (wave.Error, EOFError) as error:
        raise HTTPException(422, f"the voice is not a WAV file: {error}") from None
    return {"seconds": samples.shape[1] / rate}


@app.post("/speech")
async def speak(asked: Speech, request: Request) -> StreamingResponse:
    """A WAV file that comes as it is spoken."""
    inputs, parameters = {}, {"text": asked.text, **asked.parameters}
    if asked.voice is not None:
        if asked.voice not in voices:
            raise HTTPException(404, f"there is no voice {asked.voice}: PUT /voices/{asked.voice}")
        inputs["reference"], parameters["reference_rate"] = voices[asked.voice]
    parts = request.app.state.daemon.stream(SPEECH, inputs, method="speak", parameters=parameters)
    return await streamed(spoken(parts), "audio/wav", request)


@app.post("/questions")
async def answer(prompt: str, request: Request) -> StreamingResponse:
    """The answer's text, as it comes. The body is a picture, or empty."""
    body = await upload(request)
    try:
        inputs = {"images": await asyncio.to_thread(read_picture, body)} if body else {}
    except (OSError, Image.DecompressionBombError) as error:
        raise HTTPException(422, f"the picture cannot be read: {error}") from None
    parts = request.app.state.daemon.stream(VISION, inputs, method="answer", parameters={"prompt": prompt})
    return await streamed(answered(parts), "text/plain; charset=utf-8", request)


@app.get("/progress")
async def progress(request: Request) -> StreamingResponse:
    """What happens to both models, as server-sent events: states, and how far a load is."""
    events = await request.app.state.daemon.events(SPEECH, VISION)

    async def told() -> AsyncIterator[bytes]:
        async with events:
            async for event in events:
                yield f"data: {json.dumps(event)}\n\n".encode()

    return StreamingResponse(told(), media_type="text/event-stream")


async def streamed(content: AsyncIterator[bytes], media_type: str, request: Request) -> StreamingResponse:
    """Begins when the model has given something: what fails before has an HTTP
    status of its own. A listener who leaves before cancels too."""
    pieces = read_ahead(content)
    first = asyncio.ensure_future(anext(pieces))
    left = asyncio.ensure_future(request.receive())  # after the body nothing comes but the end
    try:
        await asyncio.wait((first, left), return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            raise HTTPException(499, "the listener has left")
        begun = first.result()
    finally:
        first.cancel()
        left.cancel()

    async def whole() -> AsyncIterator[bytes]:
        yield begun
        async for piece in pieces:
            yield piece

    return StreamingResponse(whole(), media_type=media_type)


async def read_ahead(content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Takes what a model gives at once, however slow the listener's network is: a worker cancels a
    stream that is not read."""
    queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(PIECES_MAX)

    async def read() -> None:
        end = None
        try:
            async for piece in content:
                await queue.put(piece)
        except Exception as error:  # whatever it is, the listener's
            end = error
        await queue.put(end)

    reading = asyncio.create_task(read())
    try:
        while isinstance(piece := await queue.get(), bytes):
            yield piece
    finally:
        reading.cancel()
    if piece is not None:
        raise piece


async def spoken(parts: AsyncIterator[bulkhead.Reply]) -> AsyncIterator[bytes]:
    is_first = True
    async for part in parts:
        if "audio" not in part or not (part.more or is_first):
            continue  # progress; or the whole answer after its parts
        sound = part["audio"].numpy()
        if is_first:
            yield wav_header(sound.shape[0], part.values_json["sample_rate"])
        is_first = False
        yield (sound.T.clip(-1, 1) * 32767).astype("<i2").tobytes()


async def answered(parts: AsyncIterator[bulkhead.Reply]) -> AsyncIterator[bytes]:
    is_first = True
    async for part in parts:
        if part.values_json.get("text") and (part.more or is_first):
            is_first = False
            yield part.values_json["text"].encode()
    if is_first:
        yield b""


def wav_header(channels: int, rate: int) -> bytes:
    """Of a sound whose length is not known yet: players take it to the end."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, 2 * channels * rate, 2 * channels, 16)
    return b"RIFF\xff\xff\xff\xffWAVE" + form + b"data\xff\xff\xff\xff"


def read_wav(data: bytes) -> tuple[np.ndarray, int]:
    with wave.open(io.BytesIO(data)) as file:
        if file.getsampwidth() != 2:
            raise wave.Error("16-bit PCM is read")
        frames = file.readframes(file.getnframes())
        if len(frames) % (2 * file.getnchannels()):
            raise wave.Error("the file is truncated")
        samples = np.frombuffer(frames, "<i2").reshape(-1, file.getnchannels())
        return np.ascontiguousarray(samples.T, np.float32) / np.float32(32768), file.getframerate()


def read_picture(data: bytes) -> np.ndarray:
    """uint8 [1, height, width, 3]"""
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB"))[None]


async def upload(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > UPLOAD_BYTES_MAX:
            raise HTTPException(413, f"more than {UPLOAD_BYTES_MAX >> 20} MiB")
    return bytes(body)
