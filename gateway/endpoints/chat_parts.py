"""Content parts of chat messages as clients write them -> parts of our vocabulary."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from gateway.endpoints.openai_validation import invalid_value, missing, unknown_value
from plugins.events import Json, Media, Part, Refusal, Text


class ImageUrlBody(Struct):
    url: str
    detail: str | None = None


class InputAudioBody(Struct):
    data: str
    format: str | None = None


class FileBody(Struct):
    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None


class PartBody(Struct, kw_only=True):
    type: str
    text: str | None = None
    image_url: str | ImageUrlBody | None = None
    input_audio: InputAudioBody | None = None
    file: FileBody | None = None
    refusal: str | None = None
    cache_control: Json | None = None


def _read_text(part: PartBody, path: str) -> Part:
    if part.text is None:
        raise missing(f"{path}.text")
    return Text(part.text, part.cache_control)


def _read_image(part: PartBody, path: str) -> Part:
    image = part.image_url
    if image is None:
        raise missing(f"{path}.image_url")
    if isinstance(image, str):
        image = ImageUrlBody(image)
    media = Media("image", detail=image.detail, cache_control=part.cache_control)
    return _with_source(media, image.url, f"{path}.image_url.url")


def _read_audio(part: PartBody, path: str) -> Part:
    audio = part.input_audio
    if audio is None:
        raise missing(f"{path}.input_audio")
    media_type = f"audio/{audio.format}" if audio.format else None
    return Media(
        "audio",
        data_base64=audio.data,
        media_type=media_type,
        cache_control=part.cache_control,
    )


def _read_file(part: PartBody, path: str) -> Part:
    file = part.file
    if file is None:
        raise missing(f"{path}.file")
    if file.file_id is None and file.file_data is None:
        raise missing(f"{path}.file.file_id")
    media = Media(
        "file",
        file_id=file.file_id,
        filename=file.filename,
        cache_control=part.cache_control,
    )
    if file.file_data is None:
        return media
    if not file.file_data.startswith("data:"):
        media.data_base64 = file.file_data
        return media
    return _with_source(media, file.file_data, f"{path}.file.file_data")


def _read_refusal(part: PartBody, path: str) -> Part:
    if part.refusal is None:
        raise missing(f"{path}.refusal")
    return Refusal(part.refusal)


_PART_READERS: dict[str, Callable[[PartBody, str], Part]] = {
    "text": _read_text,
    "image_url": _read_image,
    "input_audio": _read_audio,
    "file": _read_file,
    "refusal": _read_refusal,
}


def _with_source(media: Media, url: str, path: str) -> Media:
    """A data URI becomes its bytes and bare media type; any other URL stays one."""
    if url[:5].lower() != "data:":
        media.url = url
        return media
    header, comma, data = url[5:].partition(",")
    if not comma or not header.endswith(";base64"):
        raise invalid_value(path, "expected a data URI of the form 'data:TYPE;base64,DATA'.")
    media.media_type = header.partition(";")[0]
    media.data_base64 = data
    return media


def read_parts(content: list[PartBody], path: str) -> list[Part]:
    parts: list[Part] = []
    for j, part in enumerate(content):
        reader = _PART_READERS.get(part.type)
        where = f"{path}.content[{j}]"
        if reader is None:
            raise unknown_value(f"{where}.type", part.type, list(_PART_READERS))
        parts.append(reader(part, where))
    return parts
