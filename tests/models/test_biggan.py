"""BigGAN as a Transformers model: configuration, outputs, methods, training, saving, noise and names."""

import copy
import json

import pytest
import torch
import transformers
from torch.nn import functional
from transformers import AutoConfig, AutoModel

import hf_efficient_attn as hea
from hf_efficient_attn.evaluation import analyze
from hf_efficient_attn.models.biggan import (
    BigGANConfig,
    BigGANModel,
    class_index,
    class_indices,
    class_names,
    truncated_noise,
)
from instances import APPROXIMATE

# Images of 32 pixels; attention works at 16 x 16 pixels, with 256 queries and 64 keys.
LAYERS = [[True, 16, 8], [False, 8, 8], [True, 8, 4], [False, 4, 2], [True, 2, 1]]
SIZES = {"channel_width": 8, "z_dim": 12, "num_classes": 6, "layers": LAYERS, "attention_layer_position": 3}
RECTANGULAR = [name for name in hea.available_methods() if hea.method_info(name).rectangular]
SQUARE = [name for name in hea.available_methods() if not hea.method_info(name).rectangular]


def tiny(method: str | None = None, seed: int = 0, sharpness: float = 1.5, **changes) -> BigGANModel:
    """Return a small model in eval mode, whose weights and statistics make every part affect the output."""
    config = BigGANConfig(**{**SIZES, **changes})
    if method is not None:
        config.efficient_attention = {"method": method}
    model = BigGANModel(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gamma"):
                parameter.fill_(0.8)
            elif parameter.ndim > 1 and "learned_parameters" not in name:
                std = sharpness if ".theta." in name or ".phi." in name else 1.0
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(std * noise / parameter[0].numel() ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("running_means"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("running_vars"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
        if config.spectral_norm:
            model.train()
            for _ in range(8):
                model(torch.randn(2, config.z_dim, generator=generator), 0)
            model.eval()
    return model


def inputs(batch: int = 3, truncation: float = 0.5) -> dict:
    z = truncated_noise(batch, SIZES["z_dim"], truncation, seed=5)
    return {"z": z, "class_label": torch.arange(batch) % SIZES["num_classes"], "truncation": truncation}


@torch.no_grad()
def images(model: BigGANModel, **changes) -> torch.Tensor:
    return model(**{**inputs(), **changes}).images


def with_budget(method: str, budget: int):
    return hea.method_info(method).config_class(**APPROXIMATE.get(method, {})).with_budget(budget)


@pytest.mark.parametrize(
    ("size", "num_blocks", "num_queries", "head_dim"),
    [(128, 10, 64**2, 32), (256, 12, 64**2, 64), (512, 14, 64**2, 64)],
)
def test_published_architectures(size, num_blocks, num_queries, head_dim):
    config = BigGANConfig.from_name(f"biggan-deep-{size}")
    assert (config.output_dim, len(config.layers), config.num_classes) == (size, num_blocks, 1000)
    with torch.device("meta"):
        model = BigGANModel(config)
        attention = model.generator.layers[8]
    assert type(attention).__name__ == "BigGANAttention" and attention.num_heads == config.num_attention_heads == 1
    assert config.attention_resolution**2 == num_queries and attention.max_tokens == num_queries // 4
    assert (attention.head_dim, attention.value_head_dim) == (head_dim, 4 * head_dim)
    assert config.id2label[1] == "goldfish, Carassius auratus"
    # The counts of pytorch-pretrained-biggan.
    assert sum(p.numel() for p in model.parameters()) == {128: 50_388_609, 256: 55_880_833, 512: 56_163_905}[size]
    assert BigGANConfig(output_dim=size).layers == config.layers


def test_numbers_of_classes_agree(tmp_path):
    assert BigGANConfig().num_labels == 1000
    for given in ({"num_classes": 3}, {"num_labels": 3}, {"id2label": {0: "a", 1: "b", 2: "c"}}):
        config = BigGANConfig(**given)
        config.save_pretrained(tmp_path)
        again = BigGANConfig.from_pretrained(tmp_path)
        for each in (config, again, copy.deepcopy(config), BigGANConfig.from_dict(config.to_dict())):
            assert each.num_classes == each.num_labels == len(each.id2label) == 3
            assert each.id2label == config.id2label
    assert json.loads((tmp_path / "config.json").read_text())["num_classes"] == 3
    assert BigGANConfig.from_pretrained(tmp_path, num_classes=4).num_labels == 4


def test_wrong_output_dim_is_replaced_with_a_warning(caplog):
    transformers.utils.logging.enable_propagation()
    transformers.utils.logging.set_verbosity_warning()
    assert BigGANConfig(**SIZES).output_dim == 32 and not caplog.records
    assert BigGANConfig(**SIZES, output_dim=128).output_dim == 32
    assert "output_dim=128 is taken as 32" in caplog.text


def test_all_forms_of_a_class_label_give_the_same_image():
    model, given = tiny(), inputs()
    labels = given["class_label"]
    expected = images(model)
    assert expected.shape == (3, 3, 32, 32) and expected.abs().max() <= 1 and expected.std() > 0.2
    for form in (functional.one_hot(labels, 6), functional.one_hot(labels, 6).float(), labels.int(), labels.tolist()):
        assert torch.allclose(images(model, class_label=form), expected, atol=1e-5)
    one = images(model, class_label=2)
    assert torch.allclose(one, images(model, class_label=torch.tensor([2, 2, 2])), atol=1e-5)
    assert torch.equal(images(model, truncation=torch.tensor(0.5)), expected)
    half = torch.zeros(3, 6).index_fill_(1, torch.tensor([0, 1]), 0.5)
    assert not torch.allclose(images(model, class_label=half), expected, atol=1e-2)
    assert torch.equal(model(**given, return_dict=False)[0], model(**given)[0])
    assert isinstance(model(**given, return_dict=False), tuple)
    alone = model(given["z"][[1]], given["class_label"][[1]], given["truncation"]).images
    assert torch.allclose(alone[0], expected[1], atol=1e-5)
    model.set_attn_implementation("eager")
    assert torch.allclose(images(model), expected, atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "kdeformer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, implementation):
    # Logits reach some hundreds, since BigGAN's attention does not scale them.
    model = tiny(sharpness=20.0)
    model.set_attn_implementation(implementation)
    exact = images(model)
    half = images(model.to(dtype))
    assert half.dtype == dtype and torch.isfinite(half).all()
    assert (half.float() - exact).abs().mean() < 0.05
    with torch.autocast("cpu", dtype=dtype):
        assert torch.isfinite(images(model.float())).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", [None, "kdeformer"])
@pytest.mark.parametrize("backend", ["count", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_compiled_graph_serves_every_truncation(backend, method):
    """A graph with the rows of the first truncation as constants would silently give wrong images for the others."""
    small = {"layers": [[True, 16, 8], [False, 8, 4], [False, 4, 2], [False, 2, 1]], "attention_layer_position": 1}
    model = tiny(**small) if method is None else hea.convert(tiny(**small), with_budget(method, 4))
    torch.compiler.reset()
    graphs, tolerance = [], 1e-5 if backend == "count" else 1e-4

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=count if backend == "count" else backend)
    for truncation in (0.5, 0.43, 0.47, 1.0, 0.58, 0.02, 0.01):
        given = inputs(truncation=truncation)
        assert torch.allclose(compiled(**given).images, model(**given).images, atol=tolerance), truncation
    assert len(graphs) <= 7


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The folder of `tiny()`."""
    folder = tmp_path_factory.mktemp("exact")
    tiny().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("method", RECTANGULAR)
def test_every_rectangular_method_runs_saves_and_loads(method, stored, tmp_path):
    model = tiny()
    exact = images(model)
    hea.convert(model, with_budget(method, 16))
    state = torch.get_rng_state()
    first = images(model)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.isfinite(first).all() and not torch.allclose(first, exact, atol=1e-4)
    assert torch.equal(images(model), first)
    model.save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path).eval()
    assert type(model) is BigGANModel and model.config._attn_implementation == method
    assert torch.equal(images(model), first)
    other = BigGANModel.from_pretrained(
        stored, attn_implementation=method, efficient_attention=with_budget(method, 16).to_dict()
    ).eval()
    if not hea.method_info(method).learned_parameters:
        assert torch.equal(images(other), first)
    assert torch.equal(images(hea.convert(model, "sdpa")), exact)


@pytest.mark.parametrize("method", SQUARE)
def test_methods_without_a_rectangular_form_are_refused(method, stored):
    model = tiny()
    for switch in (
        lambda: BigGANModel.from_pretrained(stored, attn_implementation=method),
        lambda: hea.convert(model, method),
        lambda: model.set_attn_implementation(method),
    ):
        with pytest.raises(hea.UnsupportedAttentionError, match=f"fewer keys than queries.*{method}.*kdeformer"):
            switch()
        assert model.config._attn_implementation == "sdpa"
    images(model)


@pytest.mark.parametrize("spectral_norm", [False, True])
def test_new_models_are_initialized_however_they_are_created(spectral_norm, tmp_path):
    config = BigGANConfig(**SIZES, spectral_norm=spectral_norm)
    torch.manual_seed(0)
    models = [BigGANModel(config), AutoModel.from_config(config)]
    models[0].save_pretrained(tmp_path)
    # With another number of classes than in the file, the class embedding is new.
    other, report = BigGANModel.from_pretrained(
        tmp_path, num_classes=4, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert [name for name, *_ in report["mismatched_keys"]] == ["embeddings.weight"]
    for model in (*models, other):
        assert all(torch.isfinite(value).all() for value in model.state_dict().values())
        assert model.embeddings.weight.std().item() == pytest.approx(0.02, rel=0.4)
        assert model.generator.layers[3].gamma.item() == 0
        assert torch.equal(model.generator.bn.running_vars, torch.ones(51, 8))
        given = {**inputs(), "class_label": 1}
        assert torch.isfinite(model.eval()(**given).images).all()


@pytest.mark.parametrize("spectral_norm", [False, True])
def test_saving_and_loading_keeps_the_output(spectral_norm, tmp_path):
    model = tiny(spectral_norm=spectral_norm)
    first = images(model)
    for turn, auto in enumerate((BigGANModel, AutoModel)):
        model.save_pretrained(tmp_path / str(turn), max_shard_size="100KB" if turn else "1GB")
        config = AutoConfig.from_pretrained(tmp_path / str(turn))
        assert type(config) is BigGANConfig and config.spectral_norm is spectral_norm
        model, report = auto.from_pretrained(tmp_path / str(turn), output_loading_info=True)
        assert not any(report.values())
        # After loading a weight has another memory alignment, and its spectral norm rounds differently.
        assert torch.allclose(images(model.eval()), first, atol=1e-5 if spectral_norm else 0.0)
    assert torch.allclose(images(copy.deepcopy(model)), first, atol=1e-5)
    half = BigGANModel.from_pretrained(tmp_path / "1", dtype=torch.bfloat16).eval()
    assert (images(half).float() - first).abs().mean() < 0.05


def test_spectral_norm_is_removed_and_added_on_loading(tmp_path):
    kept = tiny(spectral_norm=True)
    kept.save_pretrained(tmp_path / "kept")
    plain, report = BigGANModel.from_pretrained(tmp_path / "kept", spectral_norm=False, output_loading_info=True)
    assert not any(report.values()) and "generator.conv_to_rgb.weight" in plain.state_dict()
    assert torch.allclose(images(plain.eval()), images(kept), atol=1e-5)
    plain.save_pretrained(tmp_path / "plain")
    again, report = BigGANModel.from_pretrained(tmp_path / "plain", spectral_norm=True, output_loading_info=True)
    assert report["missing_keys"] and all(key.endswith(("._u", "._v")) for key in report["missing_keys"])
    assert not report["unexpected_keys"]
    # The plain weights have norm 1, up to the error of the power iteration.
    assert torch.allclose(images(again.eval()), images(kept), atol=0.1)
    with pytest.raises(ValueError, match="leave save_original_format out"):
        plain.save_pretrained("nowhere", save_original_format=True)


@pytest.mark.parametrize(
    ("spectral_norm", "method"),
    [(False, "linformer"), (True, "kdeformer"), pytest.param(True, "sdpa", marks=pytest.mark.exhaustive)],
)
def test_gradients_reach_every_parameter(spectral_norm, method):
    model = tiny(spectral_norm=spectral_norm)
    if method != "sdpa":
        hea.convert(model, with_budget(method, 16))
    model.train()
    torch.manual_seed(1)
    weight = torch.randn(6, 3, 32, 32)
    given = {"z": torch.randn(6, 12), "class_label": torch.arange(6)}
    (model(**given).images * weight).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        # Batch normalization by batch statistics cancels a preceding bias.
        if not name.endswith(("conv_0.bias", "conv_1.bias", "conv_2.bias")):
            assert parameter.grad.abs().max() > 0, name
    given = {"z": torch.randn(6, 12, requires_grad=True), "class_label": torch.rand(6, 6, requires_grad=True)}
    model.eval()(**given).images.sum().backward()
    assert given["z"].grad.abs().max() > 0 and given["class_label"].grad.abs().max() > 0


def checkpoint(model, enable: bool) -> None:
    """Switch gradient checkpointing by the name that this version of Transformers has; it changed in 5.23."""
    last = "enable" if enable else "disable"
    for name in ("activation", "gradient"):
        if hasattr(model, f"{name}_checkpointing_{last}"):
            getattr(model, f"{name}_checkpointing_{last}")()
            return


def test_gradient_checkpointing_gives_the_same_gradients():
    model = hea.convert(tiny(), with_budget("kdeformer", 16)).train()
    attention, found = model.generator.layers[3], []
    for enable in (True, False):
        checkpoint(model, enable)
        assert all(block.gradient_checkpointing == enable for block in model.generator.layers if block is not attention)
        model.zero_grad()
        torch.manual_seed(2)
        model(**inputs()).images.square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))
    with pytest.raises(ValueError, match="other weights"):
        checkpoint(tiny(spectral_norm=True), True)


def test_statistics_after_training():
    """After `set_statistics`, eval mode gives the output of training mode, up to sampling noise."""
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    model.train()(**inputs())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval().set_statistics([0.43, 0.8], num_samples=200, batch_size=100, seed=1, progress=False)
    assert not model.training and not any(module.training for module in model.modules())
    changed = [
        row
        for row in range(51)
        if not torch.equal(model.generator.bn.running_means[row], before["generator.bn.running_means"][row])
    ]
    assert changed == [21, 22, 40]
    tables = [name for name in before if "running" in name]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name not in tables)
    given = {"z": truncated_noise(100, 12, 0.43, 9), "class_label": torch.arange(100) % 6, "truncation": 0.43}
    with torch.no_grad():
        measured, wrong = model(**given).images, model(**{**given, "truncation": 0.9}).images
        expected = model.train()(**given).images
    model.eval()
    assert (measured - expected).abs().mean() < 0.1 < 0.2 < (wrong - expected).abs().mean()
    # The input of the first normalization is linear in the noise, so its moments are known.
    first = model.generator.layers[0].bn_0
    z, labels = truncated_noise(6_000, 12, 0.8, 3), torch.arange(6_000) % 6
    with torch.no_grad():
        x = model.generator.gen_z(torch.cat((z, model.embeddings.weight.t()[labels]), 1)).unflatten(1, (16, -1))
    assert torch.allclose(first.running_means[40], x.mean((0, 1)), atol=0.1)
    assert torch.allclose(first.running_vars[40], x.var((0, 1)), rtol=0.15)


def test_statistics_are_repeatable_and_leave_the_global_state_alone():
    tables = []
    for seed in (3, 3, 4):
        model, state = tiny(), torch.get_rng_state()
        model.train()
        model.set_statistics([1.0], num_samples=30, batch_size=8, seed=seed, progress=False)
        assert torch.equal(state, torch.get_rng_state()) and model.training
        tables.append(model.generator.bn.running_vars[50].clone())
    assert torch.equal(tables[0], tables[1]) and not torch.equal(tables[0], tables[2])
    # In batches of different sizes, all samples have the same weight.
    model, seen = tiny(n_stats=4), []
    first = model.generator.layers[0].bn_0
    first.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model.set_statistics([1.0], num_samples=20, batch_size=8, progress=False)
    x = torch.cat(seen)
    assert len(seen) == 3 and len(x) == 20
    assert torch.allclose(first.running_means[3], x.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(first.running_vars[3], x.var((0, 2, 3), unbiased=False), rtol=1e-4)
    rows = model.generator.bn.running_vars.clone()
    model.set_statistics(num_samples=4, batch_size=4, progress=False)
    assert (model.generator.bn.running_vars != rows).any(1).all()


def test_noise_without_a_seed_is_that_of_the_global_generator():
    """With a seed it is that of the package: see test_biggan_package.py."""
    state = torch.get_rng_state()
    noise = truncated_noise(500, 40, 0.5, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert 0.9 < noise.abs().max() <= 1.0
    torch.manual_seed(4)
    first = truncated_noise(2, 4)
    torch.manual_seed(4)
    assert torch.equal(first, truncated_noise(2, 4)) and not torch.equal(first, truncated_noise(2, 4))


def test_classes_by_name():
    names = class_names()
    assert [names[i] for i in (0, 207, 999)] == ["tench", "golden retriever", "toilet tissue"]
    given = ("Goldfish", "white shark", "WHITE_SHARK", "n01440764", "tennis ball", "partridge", 9)
    assert class_indices(given).tolist() == [1, 2, 2, 0, 852, 86, 9]


REFUSALS = [
    # Sizes that form no network.
    *(
        (words, lambda changes=changes: BigGANConfig(**changes))
        for words, changes in [
            ("z_dim must be an integer of at least 1", {"z_dim": 0}),
            ("n_stats must be an integer of at least 2", {"n_stats": 1}),
            ("eps must be positive", {"eps": 0.0}),
            ("num_classes", {"num_classes": 0}),
            (r"none of the published \[128, 256, 512\]", {"output_dim": 64}),
            ("none of the 10 layers", {"attention_layer_position": 10}),
            *(("take 16 channels and keep or halve them", {"layers": [[True, *pair]]}) for pair in ((8, 8), (16, 4))),
            ("must end with 1 times", {"layers": [[True, 16, 8]], "attention_layer_position": 0}),
            ("doubles the resolution", {"layers": [[True, 16]]}),
            ("attention has 4 channels and needs 8", {"channel_width": 2}),
            ("twice", {"num_classes": 4, "id2label": {0: "a"}}),
        ]
    ),
    ("Did you mean 'biggan-deep-256'", lambda: BigGANConfig.from_name("biggan-deep-265")),
    # Inputs.
    *(
        ("numbered from 0 to 5", lambda label=label: images(tiny(), class_label=label))
        for label in (torch.tensor([0, 1, 6]), torch.tensor([0, -1, 2]), 6)
    ),
    *(
        ("class_label must be", lambda label=label: images(tiny(), class_label=label))
        for label in (torch.zeros(3, 5), torch.zeros(2, dtype=torch.long), torch.zeros(3))
    ),
    (r"z must be \(batch, 12\)", lambda: images(tiny(), z=torch.zeros(3, 11))),
    *(("truncation must be above 0", lambda x=x: images(tiny(), truncation=x)) for x in (0.0, 1.01, float("nan"))),
    ("at most 1", lambda: truncated_noise(2, truncation=1.5)),
    # Statistics.
    *(
        (words, lambda given=given: tiny().set_statistics(**{"num_samples": 4, "progress": False, **given}))
        for words, given in [
            ("truncation must be above 0", {"truncations": [0.0]}),
            ("same row", {"truncations": [0.43, 0.42]}),
            ("num_samples=0 .* must be at least 1", {"num_samples": 0}),
            ("batch_size=-1 must be at least 1", {"batch_size": -1}),
        ]
    ),
    # Classes that are unknown or ambiguous.
    *(
        (words, lambda name=name: class_index(name))
        for words, name in [
            ("n02012849.*n03126707", "crane"),
            ("638.*639", "maillot"),
            ("'goldfish'", "goldfsh"),
            ("bubble", "soap bubbles"),
            ("class_names", "qqqq"),
            *(("0 to 999", number) for number in (1000, -1)),
            ("no class None", None),
        ]
    ),
    ("class_index", lambda: class_indices("goldfish")),
]


@pytest.mark.parametrize(("words", "call"), REFUSALS)
def test_refusals(words, call):
    with pytest.raises(ValueError, match=words):
        call()


def test_calibrate_and_analyze():
    """By default both use only methods that take fewer keys than queries."""
    model = tiny()
    batches = [inputs(truncation=truncation) for truncation in (0.4, 0.5, 0.6)]
    config = hea.calibrate(model, batches, max_error=0.9, budgets=[8, 16])
    assert config.named_layers() == [0] and config.for_layer(0).method != "longformer"
    before = images(model)
    assert not torch.equal(images(hea.convert(model, config)), before)
    with pytest.raises(hea.UnsupportedAttentionError, match="fewer keys than queries and longformer"):
        hea.calibrate(model, batches, max_error=0.9, methods=["longformer"], budgets=[8])
    found = analyze.analyze(model, batches[0], budgets=[8])
    expected = {"kdeformer", "kdeformer (near_field=window)", "nearfar", "nystromformer"}
    assert set(found["layers"][0]["errors"]) == expected
