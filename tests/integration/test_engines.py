"""Engines that divide a model over processes: tensor parallelism, FSDP2, and what is refused."""

import copy

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_efficient_attn as hea
import processes
from processes import refused

LENGTH = 48
METHODS = {
    "kdeformer": {"block_size": 8, "num_samples": 8},
    "linear": {"feature_map": "hedgehog", "num_features": 8},
    "performer": {"num_features": 16},
    "eva": {"num_landmarks": 4, "window_size": 4},
    "nearfar": {"block_size": 4, "num_samples": 12},
}


def llama(method, num_kv_heads=4, noise=0.1):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, max_position_embeddings=80, num_key_value_heads=num_kv_heads, num_hidden_layers=2,
        num_attention_heads=8, hidden_size=64, intermediate_size=96,
    )  # fmt: skip
    model = hea.convert(LlamaForCausalLM(config).eval().double(), method, **METHODS.get(method, {}))
    with torch.no_grad():  # so that the learned parameters of the heads differ
        for name, x in model.named_parameters():
            if "learned_parameters" in name:
                x.add_(noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x.dtype))
    return model


def ids():
    return torch.randint(0, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def relative(found, wanted):
    return float((found - wanted).detach().abs().max() / wanted.detach().abs().max())


def largest_error(whole, divided, is_summed=lambda name: True):
    """The largest difference of the gradients, summed over the processes where `is_summed` says so."""
    errors = []
    for (name, one), (_, other) in zip(whole.named_parameters(), divided.named_parameters(), strict=True):
        if one.grad is not None:
            grad = torch.zeros_like(one) if other.grad is None else other.grad.clone()
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            if is_summed(name):
                dist.all_reduce(grad)
            errors.append(float((grad - one.grad).abs().max() / one.grad.abs().max().clamp(min=1.0)))
    return max(errors)


def test_an_engine_that_gives_attention_some_heads_is_refused(monkeypatch):
    """As DeepSpeed's Ulysses does, it puts a function of its own in the place of the method's."""
    attend = ALL_ATTENTION_FUNCTIONS["kdeformer"]

    def wrapper(module, query, key, value, *args, **kwargs):
        return attend(module, query[:, :4], key[:, :2], value[:, :2], *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "kdeformer", wrapper)
    with pytest.raises(hea.UnsupportedAttentionError, match=r"4 of 8 heads, .* not known which .*Ulysses \(sp_size\)"):
        llama("kdeformer")(ids())


def by_tensor_parallelism(folder, methods):
    """The differences of the logits and of a generated sequence from one process, or the refusal."""
    found = {}
    for method in methods:
        whole = AutoModelForCausalLM.from_pretrained(f"{folder}/{method}").double().eval()
        with torch.no_grad():
            wanted = whole(ids()).logits
        divided = AutoModelForCausalLM.from_pretrained(f"{folder}/{method}", tp_plan="auto", dtype=torch.float64)
        with torch.no_grad():
            found[method] = [relative(divided.eval()(ids()).logits, wanted)]
        first = ids()[:, :20]
        mine, other = (m.generate(first, max_new_tokens=4, do_sample=False) for m in (divided, whole))
        found[method].append(float((mine != other).sum()))
        divided(ids()).logits.square().sum().backward()
        whole(ids()).logits.square().sum().backward()
        # Every process has the learned parameters of its own heads.
        found[method].append(largest_error(whole, divided, lambda name: "learned_parameters" in name))
    return found


def test_tensor_parallelism(tmp_path):
    methods = ("kdeformer", "linear", "eva")
    for method in methods:
        llama(method).save_pretrained(tmp_path / "models" / method)
    arguments = str(tmp_path / "models"), methods
    for found in processes.run(2, tmp_path / "run", by_tensor_parallelism, *arguments):
        assert all(max(errors) < 1e-6 for errors in found.values()), found


def by_fsdp2(methods):
    """The differences of the logits and of the gradients from one process with all sequences."""
    from torch.distributed.fsdp import fully_shard

    found = {}
    for method in methods:
        whole, rank = llama(method), dist.get_rank()
        divided = copy.deepcopy(whole)
        for layer in divided.model.layers:
            fully_shard(layer)
        fully_shard(divided)
        logits, wanted = divided(ids()[rank : rank + 1]).logits, whole(ids()).logits
        logits.square().sum().backward()
        (wanted.square().sum() / 2).backward()  # FSDP takes the mean over the processes
        error = largest_error(whole, divided, lambda name: False)
        found[method] = max(relative(logits, wanted[rank : rank + 1]), error)
    return found


def test_fsdp2(tmp_path):
    for found in processes.run(2, tmp_path, by_fsdp2, list(METHODS)):
        assert all(error < 1e-6 for error in found.values()), found


def in_context_parallelism():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    model, tokens = llama("linear"), ids()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    with context_parallel(mesh["cp"], buffers=[tokens], buffer_seq_dims=[1]):
        inside = refused(lambda: model(tokens, use_cache=False))
    return inside, refused(lambda: model(ids()))


def test_context_parallelism_is_refused(tmp_path):
    for inside, outside in processes.run(2, tmp_path, in_context_parallelism):
        assert outside is None
        assert "cp_size" in inside and "hf_efficient_attn.sequence_parallel" in inside


def test_modules_that_accelerate_prepared_for_context_parallelism_are_refused():
    big_modeling = pytest.importorskip("accelerate.big_modeling")
    model = llama("linear")
    big_modeling._attach_context_parallel_hooks(model)
    with pytest.raises(hea.UnsupportedAttentionError, match="context parallelism"):
        model(ids())
