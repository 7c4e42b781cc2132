"""Inputs of any length for a model, and the task that the model is for."""

import contextlib
import importlib.util
import math
import pathlib
import pydoc_data.topics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only
from transformers import AutoTokenizer, PreTrainedModel

# Up to Transformers 5.12, `transformers.AutoImageProcessor` needs torchvision.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from hf_efficient_attn.conversion import extend_positions
from hf_efficient_attn.conversion.convert import is_rotary, num_positions
from hf_efficient_attn.errors import UnsupportedAttentionError, refusing
from hf_efficient_attn.evaluation.capture import capture_attention, forward, summarize_attention, takes_pictures
from hf_efficient_attn.io.reading import open_picture, pictures_of, special_tokens, text_of, texts_in

# Files and folders with inputs: one or several.
Files: TypeAlias = str | pathlib.Path | Sequence[pathlib.Path]
GENERATED, DOCUMENTATION = "generated", "pydoc_data.topics"
# In the inputs of a masked language model, one of this many tokens is masked.
_MASK_INTERVAL = 7
# Texts whose windows alternate, and characters that are tokenized at a time.
_TEXTS, _PART = 64, 1 << 20
# Tokens of a decoder beside an encoder: translations and summaries are short.
_DECODER_TOKENS = 128


class Inputs(NamedTuple):
    """A batch of inputs of one length."""

    values: dict[str, Any]  # the arguments of the model
    tokens: int  # of each input in the model's attention
    pixels: int | None = None  # height and width of the pictures; None for text
    masked: Tensor | None = None  # bool (B, N), the tokens that a masked language model predicts
    targets: Tensor | None = None  # (number of masked tokens,), what they were, one input after another

    def to(self, device: torch.device) -> "Inputs":
        """The inputs on a device."""
        return cast("Inputs", tree_map_only(Tensor, lambda x: x.to(device), self))


def task_of(model: PreTrainedModel) -> str:
    """The task of a model according to its class; a model of another kind (speech, several inputs) is refused.

    It is "embedding", "causal-lm", "masked-lm", "text-to-text" (an encoder-decoder that predicts tokens) or
    "image-classification".
    """
    name = type(model).__name__
    if takes_pictures(model) and not hasattr(model.config, "text_config"):
        return "image-classification" if "ForImageClassification" in name else "embedding"
    if model.main_input_name != "input_ids":
        raise UnsupportedAttentionError(
            f"{name} takes {model.main_input_name}. Supported are models of text, encoders of pictures, and image "
            "classifiers; for other models call hea.calibrate or hea.distill with batches of your own"
        )
    if is_encoder_decoder(model):
        return "embedding" if model.get_output_embeddings() is None else "text-to-text"
    if "ForMaskedLM" in name:
        return "masked-lm"
    return "causal-lm" if "ForCausalLM" in name or "LMHead" in name else "embedding"


def is_encoder_decoder(model: PreTrainedModel) -> bool:
    """Whether a model has an encoder and a decoder; a stack that was taken out of it has not."""
    both = hasattr(model.base_model, "encoder") and hasattr(model.base_model, "decoder")
    return both and bool(getattr(model.config, "is_encoder_decoder", False))


def allow_length(model: PreTrainedModel, length: int) -> str | None:
    """Extend the positions of a text model to `length` tokens, in place; refuse a model that cannot be extended.

    Returns a sentence that describes the extension; None if the model takes `length` tokens already.
    """
    positions = num_positions(model)
    if positions is None or length <= positions:
        return None
    if is_rotary(model.config):
        extension = f"was trained for {positions} positions; rotary positions beyond them are computed, but untrained"
    else:
        extend_positions(model, length)
        extension = f"has {positions} positions; for longer texts its table is repeated up to {length}, untrained"
    return f"The model {extension}. Results are compared with exact attention at the same length."


class ModelData:
    """Inputs for a model: texts or pictures of files, Python's documentation (`pydoc_data.topics`), or random pixels.

    Args:
        model, folder: in eval mode, and the checkpoint that it was loaded from, with its tokenizer or image processor.
        data: texts (.txt, .jsonl, or gzipped) and folders of texts, or folders and zip files of pictures: one or
            several. None for Python's documentation, or for random pixels.
        longest: largest number of tokens that will be requested; the model must have as many positions.
        rows: requested number of inputs of each length; the data may contain fewer.
        shorter: whether to reduce `longest` to the length of a text that is too short, instead of refusing the text.

    Attributes:
        task, name: see `task_of`, and the name of the data; "generated" for random pixels.
        is_real: whether the data are not random pixels.
        rows: number of inputs of each length.
        native, native_tokens: height and width of the pictures that the model was trained with, and their tokens.
        resizing: as `resizing_of` returns it.

    A file that cannot be read, data that are too short, and a model without tokenizer or image processor, are refused.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        folder: pathlib.Path,
        data: Files | None,
        *,
        longest: int,
        rows: int,
        shorter: bool = False,
    ) -> None:
        self.task, self.rows, self.longest = task_of(model), rows, longest
        self.is_image, self.is_pair = takes_pictures(model), is_encoder_decoder(model)
        self.config, self.dtype = model.config, model.dtype
        files = [pathlib.Path(data)] if isinstance(data, str | pathlib.Path) else list(data or ())
        others = f" and {len(files) - 1} more" if len(files) > 1 else ""
        self.name = f"{files[0].name}{others}" if files else GENERATED if self.is_image else DOCUMENTATION
        self.is_real = bool(files) or not self.is_image
        self.special: tuple[tuple[int, ...], tuple[int, ...]] = (), ()  # before and after a text
        self.processor: Any = None
        self.pictures: list[tuple[str, Callable[[], bytes]]] = []
        if self.is_image:
            self._open_pictures(model, folder, files)
        else:
            self._open_text(folder, files, shorter)

    def _open_text(self, folder: pathlib.Path, files: Sequence[pathlib.Path], shorter: bool) -> None:
        what = f"{folder} contains no tokenizer that can be loaded: add the tokenizer of the model"
        with refusing(what):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        names = tokenizer.vocab_files_names.values()  # ByT5 has none
        known = ("tokenizer.json", "tekken.json", "vocab.json", "vocab.txt", *names)
        if names and not any(path.name in known or path.suffix == ".model" for path in folder.iterdir()):
            raise UnsupportedAttentionError(what)  # without files Transformers makes a tokenizer that knows no word
        # Of the documentation the longest topics first, so that an input contains few of them.
        topics = sorted(pydoc_data.topics.topics.values(), key=lambda text: (-len(text), text))
        texts = opened_texts(files) if files else iter(["\n\n".join(topics)])

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

        self.special, self.mask_token = special_tokens(tokenizer), tokenizer.mask_token_id
        windows = islice(windows_of(texts, encode, self.longest), self.rows)
        self.token_ids = torch.tensor([*chain.from_iterable(windows)], dtype=torch.int64)
        count, num_special = len(self.token_ids), sum(map(len, self.special))
        if shorter and count:
            self.longest = min(self.longest, count + num_special)
        self.check_length(self.longest)
        if count < (needed := self.longest - num_special):
            raise UnsupportedAttentionError(
                f"{self.name} has {count} tokens, but an input of {self.longest} tokens needs {needed}: give more "
                "text, or other lengths"
            )
        self.rows = min(self.rows, max(1, count // self.longest))

    def _open_pictures(self, model: PreTrainedModel, folder: pathlib.Path, files: Sequence[pathlib.Path]) -> None:
        kind = type(model).__name__
        image, patch = (side_of(getattr(model.config, name, None)) for name in ("image_size", "patch_size"))
        if image is None or patch is None:
            raise UnsupportedAttentionError(
                f"only square pictures are measured, and the config of {kind} has no image_size and patch_size of "
                "squares: call hea.calibrate or hea.distill with batches of your own"
            )
        self.native, self.patch, self._channels = image, patch, getattr(model.config, "num_channels", 3)
        what = f"{kind} fails with a picture alone, so call hea.calibrate or hea.distill with batches of your own"
        with refusing(what, UnsupportedAttentionError):
            self.native_tokens = summarize_attention(model, _black(model, image)).max_kv_len
        # Pixels per token where there are most tokens. In the stages of a T2T-ViT they are fewer than those of a patch.
        grid = image // patch
        side = grid if grid**2 <= self.native_tokens < 2 * grid**2 else math.isqrt(self.native_tokens)
        self.step = patch if side == grid else image // side
        self.extra_tokens = self.native_tokens - side**2  # class tokens and the like
        self.resizing = resizing_of(model, image + patch)
        if not files:
            return
        advice = "leave the data out for random pixels"
        if self._channels not in (1, 3):
            raise UnsupportedAttentionError(f"{kind} takes {self._channels} channels, files have 1 or 3: {advice}")
        if importlib.util.find_spec("PIL") is None:
            raise UnsupportedAttentionError("reading pictures needs Pillow: pip install pillow")
        with refusing(f"{folder} has no preprocessor_config.json that can be loaded: add it, or {advice}"):
            self.processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        pictures = [picture for file in files for picture in pictures_of(file)]
        self.rows = min(self.rows, len(pictures))
        # At regular intervals: if files are sorted by class, the first ones belong to one class.
        self.pictures = pictures[:: len(pictures) // self.rows][: self.rows]

    def pixels_for(self, length: int) -> int:
        """Height and width of the square picture of whole patches whose number of tokens is nearest to `length`."""
        count = round(self.step * math.sqrt(max(1, length - self.extra_tokens)) / self.patch)
        return self.native if length == self.native_tokens else self.patch * max(1, count)

    def tokens_for(self, length: int) -> int:
        """Number of tokens of the inputs that `inputs` returns for `length`."""
        return (self.pixels_for(length) // self.step) ** 2 + self.extra_tokens if self.is_image else length

    def check_length(self, length: int) -> None:
        """Refuse a length that the model or its tokenizer cannot have, with `UnsupportedAttentionError`."""
        if self.is_image and self.pixels_for(length) != self.native and self.resizing is None:
            raise UnsupportedAttentionError(
                f"the model takes pictures of {self.native} x {self.native} pixels only: give --lengths "
                f"{self.native_tokens}"
            )
        if length <= sum(map(len, self.special)):
            raise UnsupportedAttentionError(f"a length of {length} only holds the special tokens: give a larger one")

    def inputs(self, length: int, start: int, count: int, chunk: int | None = None) -> Inputs:
        """The inputs with the indices start, ..., start + count - 1, as far as they exist, of a length that is checked.

        Pictures have the nearest possible number of tokens. With `chunk`, pieces of this many tokens take the place of
        each text. They have special tokens, and the last two overlap, so that all are as long.
        """
        self.check_length(length)
        indices = range(start, min(start + count, self.rows))
        return self._image_inputs(length, indices) if self.is_image else self._text_inputs(length, indices, chunk)

    def _text_inputs(self, length: int, indices: range, chunk: int | None) -> Inputs:
        before, after = self.special
        num_special = len(before) + len(after)
        whole, size = length - num_special, (chunk or length) - num_special
        pieces = [*range(0, whole - size, size), whole - size]
        texts = []
        for index in indices:
            text = self.token_ids[index * self.longest :][:whole]
            texts += [[*before, *text[piece : piece + size].tolist(), *after] for piece in pieces]
        ids, masked, targets = torch.tensor(texts), None, None
        if self.task == "masked-lm" and self.mask_token is not None:
            position = torch.arange(length) - len(before)
            is_text = (position >= 0) & (position < size)
            masked = (is_text & (position % _MASK_INTERVAL == min(_MASK_INTERVAL // 2, size - 1))).expand_as(ids)
            targets, ids = ids[masked], ids.masked_fill(masked, self.mask_token)
        values = {"input_ids": ids}
        if self.is_pair:  # the decoder gets the beginning of the encoder's text
            known = (getattr(self.config, name, None) for name in ("decoder_start_token_id", "bos_token_id"))
            start = next((token for token in known if token is not None), 0)
            values["decoder_input_ids"] = pad(ids[:, : _DECODER_TOKENS - 1], (1, 0), value=start)
        return Inputs(values, length, None, masked, targets)

    def _image_inputs(self, length: int, indices: range) -> Inputs:
        pixels = self.pixels_for(length)
        if self.processor is None:
            generator = torch.Generator().manual_seed(indices.start)
            values = torch.randn(len(indices), self._channels, pixels, pixels, generator=generator, dtype=torch.float32)
        else:
            mode = "L" if self._channels == 1 else "RGB"
            size = {"height": pixels, "width": pixels}
            pictures = [open_picture(*self.pictures[index]).convert(mode) for index in indices]
            options = {"crop_size": size, "do_resize": True, "do_convert_rgb": False, "return_tensors": "pt"}
            with refusing("preprocessor_config.json does not fit the pictures of this model, so correct it"):
                values = self.processor(images=pictures, size=size, **options)["pixel_values"]
        resizing = (pixels != self.native and self.resizing) or {}
        return Inputs({"pixel_values": values.to(self.dtype), **resizing}, self.tokens_for(length), pixels)


def _black(model: PreTrainedModel, pixels: int) -> Tensor:
    """A square picture."""
    return torch.zeros(1, getattr(model.config, "num_channels", 3), pixels, pixels, dtype=model.dtype)


def resizing_of(model: PreTrainedModel, pixels: int) -> dict[str, bool] | None:
    """The arguments with which a model takes square pictures of a size that is not its own; None if it takes none."""
    for arguments in ({}, {"interpolate_pos_encoding": True}):
        with contextlib.suppress(Exception), capture_attention(model, lambda call: None):  # an error of any type
            forward(model, _black(model, pixels), **arguments)
            return arguments
    return None


def side_of(size: Any) -> int | None:
    """The height and width of a square from a config; None if there is none."""
    if isinstance(size, (list, tuple)) and len(set(size)) == 1:
        size = size[0]
    return size if isinstance(size, int) and size > 0 else None


def opened_texts(files: Sequence[pathlib.Path]) -> Iterator[str]:
    """The texts of files and folders in an order drawn at random, each read when it is needed."""
    paths = [path for file in files for path in texts_in(file)]
    for index in torch.randperm(len(paths), generator=torch.Generator().manual_seed(0)).tolist():
        yield text_of(paths[index])


def windows_of(texts: Iterable[str], encode: Callable[[str], Sequence[int]], length: int) -> Iterator[list[int]]:
    """The tokens of some texts in windows of `length` tokens; the last window can be shorter.

    From several texts at a time come the first windows, then the second ones, and so on. What is left at the ends of
    these texts follows, so that many short texts make windows, too. Texts are read and tokenized as far as windows are
    taken, and how many are taken changes none of them.
    """
    waiting, ends = iter(texts), list[int]()

    def windows(text: str) -> Iterator[list[int]]:
        tokens: list[int] = []
        for start in range(0, len(text), _PART):
            tokens += encode(text[start : start + _PART])
            whole = len(tokens) // length * length
            yield from (tokens[i : i + length] for i in range(0, whole, length))
            tokens = tokens[whole:]
        ends.extend(tokens)

    while opened := [windows(text) for text in islice(waiting, _TEXTS)]:
        while opened:
            for one in list(opened):
                window = next(one, None)
                if window is None:
                    opened.remove(one)
                else:
                    yield window
        whole = len(ends) // length * length
        yield from (ends[i : i + length] for i in range(0, whole, length))
        del ends[:whole]
    if ends:
        yield ends
