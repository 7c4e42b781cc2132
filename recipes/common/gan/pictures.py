"""Writes generated pictures as PNG files: grids, and named lines of pictures."""

import math
import pathlib
from collections.abc import Mapping

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from hf_efficient_attn.io.writing import replacing

_LINE_HEIGHT = 12  # pixels of a line of text
_GAP = 2


def to_bytes(pictures: Tensor) -> Tensor:
    """Convert pictures (N, 3, P, P) in [-1, 1] to (N, P, P, 3) uint8."""
    return ((pictures.detach().float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def grid(pictures: Tensor, columns: int) -> Image.Image:
    """Lay out pictures (N, 3, P, P) in [-1, 1] line by line on white."""
    side, lines = pictures.shape[-1] + _GAP, math.ceil(len(pictures) / columns)
    sheet = Image.new("RGB", (columns * side - _GAP, lines * side - _GAP), "white")
    for i, values in enumerate(to_bytes(pictures)):
        sheet.paste(Image.fromarray(values.numpy()), (i % columns * side, i // columns * side))
    return sheet


def named_rows(rows: Mapping[str, Tensor]) -> Image.Image:
    """Lay out one line of pictures (N, 3, P, P) for each name, with the name on its left."""
    sheets = {name: grid(pictures, len(pictures)) for name, pictures in rows.items()}
    probe = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    margin = 8 + math.ceil(max(probe.textlength(name) for name in sheets))
    height = max(next(iter(sheets.values())).height, _LINE_HEIGHT) + _GAP
    page = Image.new("RGB", (margin + max(sheet.width for sheet in sheets.values()), height * len(sheets)), "white")
    draw = ImageDraw.Draw(page)
    for i, (name, sheet) in enumerate(sheets.items()):
        draw.text((2, i * height + (height - _LINE_HEIGHT) // 2), name, fill="black")
        page.paste(sheet, (margin, i * height))
    return page


def save_png(image: Image.Image, path: pathlib.Path, colours: int | None = None) -> None:
    """Write a PIL image. A palette of `colours` makes the file about a third as large."""
    with replacing(path) as draft:
        (image.quantize(colours) if colours else image).save(draft, format="PNG", optimize=True)
