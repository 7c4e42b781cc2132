"""Tiny random models of every supported family, and small budgets of every method."""

import re

import torch
import transformers

import hf_efficient_attn as hea
from hf_efficient_attn.integration.cache import cache_argument
from instances import FIRST, INSTANCES

# Hyperparameters so small that 70 tokens are more than the exact budget.
SMALL = {method: dict(instance.hyperparameters) for method, instance in FIRST.items()}
SMALL["nearfar"] |= {"num_probes": 0, "near_share": 0.0}  # other values have no effect in decoders, which refuse them
_missing = set(hea.available_methods()) - set(SMALL)
assert not _missing, f"every method needs a row in tests/instances.py; there is none for {sorted(_missing)}"
METHODS = list(hea.available_methods())
CAUSAL = [name for name in METHODS if hea.method_info(name).causal]
# Methods whose budget can be the whole sequence.
EXACT = list(dict.fromkeys(i.method for i in INSTANCES if i.limit == "exact"))
# Methods for which decoding a token gives the last output of the whole sequence. The others attend to all cached keys
# exactly.
SAME_BY_STEP = list(dict.fromkeys(i.method for i in INSTANCES if not i.exact_steps))
RANDOM = [i.method for i in FIRST.values() if i.random]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
TEXT = {"vocab_size": 60, "max_position_embeddings": 128}
IMAGE = {"image_size": 32, "patch_size": 4}
FAMILY_VALUES = {
    "bert": ("Bert", {**SIZES, **TEXT}, "ForMaskedLM"),
    "roberta": ("Roberta", {**SIZES, **TEXT, "max_position_embeddings": 130}, "ForMaskedLM"),
    "distilbert": ("DistilBert", {**TEXT, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}, "ForMaskedLM"),
    "vit": ("ViT", {**SIZES, **IMAGE}, "ForImageClassification"),
    "deit": ("DeiT", {**SIZES, **IMAGE}, "ForImageClassification"),
    "gpt2": ("GPT2", {"vocab_size": 60, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}, "LMHeadModel"),
    "llama": ("Llama", {**SIZES, **TEXT, "num_attention_heads": 4, "num_key_value_heads": 2}, "ForCausalLM"),
}
# T2T-ViT for images of 32 pixels: 256 and 64 tokens in the stages, 16 and the class token in the backbone.
T2T_VIT = {
    "image_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "token_dim": 16, "t2t_strides": [2, 2, 2], "num_labels": 3,
}  # fmt: skip
FAMILIES = list(FAMILY_VALUES)
ENCODERS = ["bert", "roberta", "distilbert"]
IMAGES = ["vit", "deit"]
DECODERS = ["gpt2", "llama"]


def tiny_config(family: str, method: str | None = None, **changes):
    """The config of a tiny model; with `method`, that method at its small budget."""
    name, values, *_ = FAMILY_VALUES[family]
    tokens = {} if family in IMAGES else {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}
    config = getattr(transformers, f"{name}Config")(**{**values, **tokens, **changes})
    if method is not None:
        config.efficient_attention = {"method": method, **SMALL[method]}
    return config


def tiny_class(family: str, head: bool = False):
    name, _, with_head = FAMILY_VALUES[family]
    return getattr(transformers, name + (with_head if head else "Model"))


def tiny_model(family: str, method: str | None = None, *, head: bool = False, seed: int = 0, **changes):
    """A tiny model in eval mode."""
    torch.manual_seed(seed)
    return enlarged(tiny_class(family, head)(tiny_config(family, method, **changes)))


@torch.no_grad()
def enlarged(model: torch.nn.Module, factor: float = 10.0) -> torch.nn.Module:
    """The model in eval mode. The weights of its layers are larger than usual, so that attention is not uniform."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and re.search(r"\d\.", name):
            parameter.mul_(factor)
    return model.eval()


def tiny_batch(family: str, batch: int = 2, length: int = 70, padding: str = "none", seed: int = 0) -> dict:
    """Input of a model. With `padding` "left" or "right" the second batch row has 50 tokens."""
    generator = torch.Generator().manual_seed(seed)
    if family in IMAGES:
        return {"pixel_values": torch.randn(batch, 3, 32, 32, generator=generator)}
    inputs = {"input_ids": torch.randint(5, 60, (batch, length), generator=generator)}
    if padding != "none":
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[1, slice(0, length - 50) if padding == "left" else slice(50, None)] = 0
        inputs["attention_mask"] = mask
    return inputs


def reloaded(model, folder, **options):
    """The model as it comes back from a folder in which it is saved."""
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, **options)


def output(model, inputs: dict, **options) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, **options)[0]


def generate(model, inputs: dict, new: int = 12, **options) -> torch.Tensor:
    """The new tokens of a call of `generate`."""
    torch.manual_seed(3)
    ids = model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, **{"do_sample": False, **options})
    # Some versions of Transformers return one token too many if all drafts of an assistant are right.
    return ids[:, inputs["input_ids"].shape[1] :][:, :new]


def decode(model, ids: torch.Tensor, cuts, cache=None, mask=None, *, grad: bool = False) -> torch.Tensor:
    """The logits of the tokens that the cache does not have yet, in calls that end at `cuts` and at the last token."""
    cache = transformers.DynamicCache(config=model.config) if cache is None else cache
    mask, outs, start = torch.ones_like(ids) if mask is None else mask, [], cache.get_seq_length()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for end in (*(cut for cut in cuts if start < cut < ids.shape[1]), ids.shape[1]):
        call = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end], "use_cache": True}
        with torch.set_grad_enabled(grad):
            outs.append(model(ids[:, start:end], **{cache_argument(): cache}, **call).logits)
        start = end
    return torch.cat(outs, 1)
