"""An image classifier as a feature network for FID and the inception score."""

import json
import pathlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageClassification, ViTImageProcessorPil

from hf_efficient_attn.checkpoint.loading import no_progress_bar
from hf_efficient_attn.errors import UnsupportedAttentionError


class FeatureNetwork:
    """An image classifier as feature network: returns the input of its last layer, and its probabilities.

    Args:
        folder: any folder that `AutoModelForImageClassification` loads. Pictures are resized and normalised as its
            `preprocessor_config.json` says. Without that file the network gets them in [-1, 1].

    Raises:
        UnsupportedAttentionError: the folder holds no image classifier, or its classifier is not a linear layer.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        if not (folder / "config.json").is_file():
            raise UnsupportedAttentionError(
                f"--features {folder} holds no config.json: it must be the folder of an image classifier, such as "
                "`python -m recipes.biggan_features` writes"
            )
        with no_progress_bar():
            self.model = AutoModelForImageClassification.from_pretrained(folder, local_files_only=True).eval()
        settings = folder / "preprocessor_config.json"
        self._settings: dict[str, Any] = json.loads(settings.read_text()) if settings.is_file() else {}
        heads = [
            module
            for module in self.model.modules()
            if isinstance(module, nn.Linear) and module.out_features == self.model.config.num_labels
        ]
        if not heads:
            raise UnsupportedAttentionError(f"--features {folder}: no linear layer computes the model's labels")
        self._recorded: list[Tensor] = []
        heads[-1].register_forward_pre_hook(lambda _, inputs: self._recorded.append(inputs[0]))

    def prepare(self, pictures: Tensor) -> Tensor:
        """Resize and normalise pictures (N, 3, P, P) in [-1, 1] for the network."""
        size = self._settings.get("size") if self._settings.get("do_resize", True) else None
        if size is not None:
            side = size if isinstance(size, int) else size.get("height", size.get("shortest_edge"))
            if side is not None and side != pictures.shape[-1]:
                pictures = nn.functional.interpolate(pictures, (side, side), mode="bilinear", antialias=True)
        if not self._settings or not self._settings.get("do_normalize", True):
            return pictures if not self._settings else (pictures + 1) / 2
        mean, std = (
            torch.tensor(self._settings[f"image_{what}"], dtype=pictures.dtype).view(-1, 1, 1)
            for what in ("mean", "std")
        )
        return ((pictures + 1) / 2 - mean) / std

    @torch.inference_mode()
    def __call__(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Features (N, D) and probabilities (N, classes) of pictures (N, 3, P, P) in [-1, 1]."""
        self._recorded.clear()
        logits = self.model(pixel_values=self.prepare(pictures)).logits
        return self._recorded.pop().flatten(1), logits.softmax(1)


def save(model: nn.Module, folder: pathlib.Path, pixels: int = 32) -> None:
    """Save a classifier with a `preprocessor_config.json` that describes its inputs."""
    model.save_pretrained(folder)
    half, size = [0.5] * 3, {"height": pixels, "width": pixels}
    ViTImageProcessorPil(size=size, image_mean=half, image_std=half).save_pretrained(folder)
