"""What a model is for, and inputs of any length for it: real texts and pictures, or random ones.

A text model without a file of texts is given the help texts that every Python has (`pydoc_data.topics`).
"""

import inspect
import math
import pathlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_efficient_attn.conversion import extend_positions
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import look
from hf_efficient_attn.integration.models import transformers_models
from hf_efficient_attn.io.reading import open_picture, pictures_of, special_tokens, text_of

TASKS = ("embedding", "causal-lm", "masked-lm", "image-classification")
GENERATED = "generated"
# Every so many tokens a masked language model has to guess one.
_MASK_EVERY = 7
# Characters of a text that are looked at for each token that is wanted: a token has about four.
_CHARACTERS = 16
_TOKENIZERS = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
# Tokens that may stand beside those of the picture: of a class, of distillation, registers.
_BESIDE = 16


class Inputs(NamedTuple):
    """One batch of rows of one length.

    values: arguments of the model. tokens: of a row, as its attention sees them. pixels: side of the pictures, None for
    text. masked: bool (rows, tokens), where a masked language model has to guess; None elsewhere.
    """

    values: dict[str, Any]
    tokens: int
    pixels: int | None
    masked: Tensor | None


def task_of(model: nn.Module) -> str:
    """One of `TASKS`, by the class of the model, which is that of its checkpoint's `architectures`.

    Raises:
        UnsupportedAttentionError: a model of another kind (an encoder with a decoder, sound, several inputs).
    """
    name = type(model).__name__
    if model.main_input_name == "pixel_values" and not hasattr(model.config, "text_config"):
        return "image-classification" if "ForImageClassification" in name else "embedding"
    if model.main_input_name == "input_ids" and not getattr(model.config, "is_encoder_decoder", False):
        if "ForMaskedLM" in name:
            return "masked-lm"
        return "causal-lm" if "ForCausalLM" in name or "LMHead" in name else "embedding"
    raise UnsupportedAttentionError(
        f"{name} takes {model.main_input_name}, or has an encoder and a decoder: measured are encoders of text and "
        "pictures, masked and causal language models, and image classifiers"
    )


def positions_of(model: nn.Module) -> int | None:
    """Tokens that a text model has positions for; None where they have no end that is known."""
    from hf_efficient_attn.conversion.positions import position_offset, position_tables

    try:
        return min(table.num_embeddings - position_offset(table) for _, table, _ in position_tables(model))
    except UnsupportedAttentionError:
        # Rotary positions are computed, but the model was trained for so many.
        return getattr(model.config, "max_position_embeddings", None)


def has_table(model: nn.Module) -> bool:
    """Whether the positions are a table, which has to grow for longer texts."""
    return getattr(model.config, "rope_parameters", None) is None


class ModelData:
    """Rows of inputs for a model.

    Args:
        model: in eval mode, as loaded from `folder`.
        folder: of the checkpoint, where its tokenizer or the settings of its image processor lie.
        file: a text (.txt, .jsonl, gzipped too), or a folder or zip file of pictures; None for what there is.
        longest: tokens of the longest row that will be asked for; the model's position table must be that long.
        rows: how many are wanted of each length; there may be fewer in the data.
        shorter: whether a text that is too short for `longest` sets it instead of being refused.

    Attributes:
        task: one of `TASKS`. name: of the data, "generated" for random numbers. real: False for these. rows: of each
        length.

    Raises:
        UnsupportedAttentionError: a file that cannot be read or holds too little, or one for a model that has no
            tokenizer or image processor beside it.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: pathlib.Path,
        file: pathlib.Path | None,
        *,
        longest: int,
        rows: int,
        shorter: bool = False,
    ) -> None:
        self.task, self.rows, self.longest = task_of(model), rows, longest
        self.is_image = model.main_input_name == "pixel_values"
        self.config, self.dtype = model.config, dtype_of(model)
        self.name = GENERATED if file is None else file.name
        if self.is_image:
            self._open_pictures(model, folder, file)
        else:
            self._open_text(folder, file, shorter)
        self.real = self.name != GENERATED

    def _open_text(self, folder: pathlib.Path, file: pathlib.Path | None, shorter: bool) -> None:
        self.mask_token: int | None = None
        if not any((folder / name).is_file() for name in _TOKENIZERS):
            if file is not None:
                raise UnsupportedAttentionError(
                    f"{folder} holds no tokenizer, so that the text of {file} cannot become token ids: put one "
                    "there, or leave the data out for random ids"
                )
            self.before = self.after = ()
            generator = torch.Generator().manual_seed(0)
            self.stream = torch.randint(self.config.vocab_size, (self.rows * self.longest,), generator=generator)
            return
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        if file is None:
            import pydoc_data.topics

            topics = pydoc_data.topics.topics
            # The longest first, so that rows are of few topics.
            text = "\n\n".join(sorted(topics.values(), key=lambda text: (-len(text), text)))
            self.name = "pydoc_data.topics"
        else:
            text = text_of(file)
        text = text[: _CHARACTERS * self.rows * self.longest]
        self.before, self.after = special_tokens(tokenizer)
        self.mask_token = tokenizer.mask_token_id
        self.stream = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        special = len(self.before) + len(self.after)
        if shorter and len(self.stream):
            self.longest = min(self.longest, len(self.stream) + special)
        needed = self.longest - special
        if needed < 1 or len(self.stream) < needed:
            raise UnsupportedAttentionError(
                f"{self.name} gives {len(self.stream)} tokens, and a row of {self.longest} needs {max(needed, 1)}: "
                "give more text, or other lengths"
            )
        self.rows = min(self.rows, max(1, len(self.stream) // self.longest))

    def _open_pictures(self, model: nn.Module, folder: pathlib.Path, file: pathlib.Path | None) -> None:
        image, patch = (_side(getattr(model.config, name, None)) for name in ("image_size", "patch_size"))
        if image is None or patch is None:
            raise UnsupportedAttentionError(
                f"the config of {type(model).__name__} has no image_size and patch_size: how many tokens a picture "
                "becomes is not known"
            )
        self.native, self.patch = image, patch
        self.resizes = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
        noise = torch.zeros(1, getattr(model.config, "num_channels", 3), image, image, dtype=self.dtype)
        longest = look(model, {"pixel_values": noise}).longest
        # Pixels from one token to the next where there are most: fewer than a patch has in the stages of a T2T-ViT.
        finer = (
            step for step in range(patch, 0, -1) if image % step == 0 and longest - (image // step) ** 2 <= _BESIDE
        )
        self.step = next(finer, patch)
        # A class token, and in some models one of distillation or registers.
        self.extra = longest - (image // self.step) ** 2
        self.pictures, self.processor = None, None
        if file is None:
            return
        if not (folder / "preprocessor_config.json").is_file():
            raise UnsupportedAttentionError(
                f"{folder} holds no preprocessor_config.json, which says how pictures become numbers: put one "
                "there, or leave the data out for random pixels"
            )
        try:
            import PIL  # noqa: F401
        except ImportError:
            raise UnsupportedAttentionError("reading pictures needs Pillow: pip install pillow") from None
        # Where it is defined: the name in `transformers` asks for torchvision up to 5.12.
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        self.processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        found = pictures_of(file)
        # Of sorted files of classes the first ones would be of one class.
        self.pictures = found[:: max(1, len(found) // self.rows)][: self.rows]
        self.rows = len(self.pictures)

    @property
    def native_tokens(self) -> int:
        """Tokens of a picture of the size that an image model was made for."""
        return (self.native // self.step) ** 2 + self.extra

    def pixels_for(self, length: int) -> int:
        """Side of the square picture, of whole patches, whose number of tokens comes nearest to `length`."""
        return self.patch * max(1, round(self.step * math.sqrt(max(1, length - self.extra)) / self.patch))

    def tokens_for(self, length: int) -> int:
        """Tokens of a row that is asked for by `length`."""
        return (self.pixels_for(length) // self.step) ** 2 + self.extra if self.is_image else length

    def inputs(self, length: int, start: int, count: int) -> Inputs:
        """Rows start, start + 1, ... of `length` tokens, `count` at most; pictures of the nearest size."""
        rows = range(start, min(start + count, self.rows))
        return self._image_inputs(length, rows) if self.is_image else self._text_inputs(length, rows)

    def _text_inputs(self, length: int, rows: range) -> Inputs:
        body = length - len(self.before) - len(self.after)
        if body < 1:
            raise UnsupportedAttentionError(f"a length of {length} leaves no room beside the special tokens: give more")
        cut = [
            [*self.before, *self.stream[row * self.longest : row * self.longest + body].tolist(), *self.after]
            for row in rows
        ]
        ids, masked = torch.tensor(cut), None
        if self.task == "masked-lm" and self.mask_token is not None:
            place = torch.arange(length) - len(self.before)
            inside = (place >= 0) & (place < body)
            masked = (inside & (place % _MASK_EVERY == min(_MASK_EVERY // 2, body - 1))).expand_as(ids)
            ids = ids.masked_fill(masked, self.mask_token)
        return Inputs({"input_ids": ids}, length, None, masked)

    def _image_inputs(self, length: int, rows: range) -> Inputs:
        pixels = self.pixels_for(length)
        if pixels != self.native and not self.resizes:
            raise UnsupportedAttentionError(
                f"the model takes pictures of {self.native} x {self.native} pixels alone: give --lengths "
                f"{self.native_tokens}"
            )
        if self.pictures is None:
            generator = torch.Generator().manual_seed(rows.start)
            size = (len(rows), getattr(self.config, "num_channels", 3), pixels, pixels)
            values = torch.randn(size, generator=generator)
        else:
            pictures = [open_picture(*self.pictures[row]) for row in rows]
            size = {"height": pixels, "width": pixels}
            options = {"crop_size": size} if getattr(self.processor, "do_center_crop", False) else {}
            values = self.processor(images=pictures, size=size, return_tensors="pt", **options)["pixel_values"]
        given: dict[str, Any] = {"pixel_values": values.to(self.dtype)}
        if pixels != self.native:
            given["interpolate_pos_encoding"] = True
        return Inputs(given, self.tokens_for(length), pixels, None)


def _side(size: Any) -> int | None:
    """A size as configs give it, if it is that of a square."""
    if isinstance(size, (list, tuple)) and len(set(size)) == 1:
        size = size[0]
    return size if isinstance(size, int) and size > 0 else None


def make_room(model: nn.Module, length: int) -> str | None:
    """Let a text model take `length` tokens, in place; a sentence that says what was done, None where nothing was.

    Raises:
        UnsupportedAttentionError: its positions cannot grow.
    """
    present = positions_of(model)
    if present is None or length <= present:
        return None
    if not has_table(model):
        return (
            f"The model was trained for {present} positions; beyond them its rotary positions are computed, untrained. "
            "Agreement is to exact attention at the same length."
        )
    extend_positions(model, length)
    return (
        f"The model has {present} positions; for longer texts its table was repeated up to {length}, untrained. "
        "Agreement is to exact attention at the same length."
    )


def dtype_of(model: nn.Module) -> torch.dtype:
    """The floating type of a model's parameters."""
    return next(p.dtype for p in transformers_models(model)[0].parameters() if p.is_floating_point())
