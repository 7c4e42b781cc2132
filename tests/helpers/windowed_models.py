"""Tiny models with a sliding window of their own in some layers."""

import copy

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from helpers.model_types import sizes
from tiny_models import enlarged

KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
# Models with windows in layers 0 and 2.
WINDOW = {"sliding_window": 20}
LOCAL = {**WINDOW, "cls_token_id": 2, "sep_token_id": 3}
SHARED = {**WINDOW, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 60}
MIXED = {
    "Qwen2": {"use_sliding_window": True, **WINDOW},
    **dict.fromkeys(("Gemma3Text", "Cohere2", "Olmo3", "Exaone4"), WINDOW),
    **dict.fromkeys(("ModernBertDecoder", "ModernBert"), LOCAL),
    "Gemma4Text": SHARED,
    # Configs with values for single layers.
    "NeoMME": {**WINDOW, "head_dim": 16, "embedding_rank": 8, "embedding_dim": 16},
    "Step3p7Text": {**WINDOW, "num_sliding_attention_heads": 8, "mlp_layer_types": ["dense"] * 3},
}
BUDGET = hea.NearFarConfig().with_budget(1024)
WARNING = "layers with a sliding window of the model's own stay exact"


def exact_model(name: str, head: str = "Model", **changes):
    kind = getattr(transformers, f"{name}Config", None)
    if kind is None:
        pytest.skip("this Transformers does not have the model")
    values = {"num_hidden_layers": 3, "max_position_embeddings": 1024, "layer_types": KINDS, **MIXED[name], **changes}
    config = kind(**sizes(kind, **copy.deepcopy(values)))
    torch.manual_seed(0)
    kind = getattr(transformers, (name + head).replace("TextFor", "For"))
    model = kind(config)
    for weight in (x for x in model.parameters() if x.ndim > 1 and not x.any()):  # NeoMME's last projections
        torch.nn.init.normal_(weight, std=0.02)
    return enlarged(model, 6.0)


def converted(model, method=BUDGET, **options):
    with pytest.warns(UserWarning, match=WARNING):
        return hea.convert(copy.deepcopy(model), method, **options)
