"""Names of layers: their order, short form and seeds, and which names a config accepts."""

import subprocess
import sys

import pytest

import hf_efficient_attn as hea
from hf_efficient_attn.integration.layers import check_layer, in_order, layer_seed, parse_layers, ranges


def test_order_none_first_then_names_then_numbers():
    assert in_order([3, "t2t.1", None, 0, "t2t.0", 3]) == [None, "t2t.0", "t2t.1", 0, 3]


@pytest.mark.parametrize("text", ["0", "0-3,5", "t2t.0,t2t.1", "t2t.1,0,2-4"])
def test_the_short_form_is_read_back(text):
    assert ranges(parse_layers(text)) == text


@pytest.mark.exhaustive
def test_every_layer_has_its_own_seed_which_is_equal_in_every_process():
    names = [f"{stack}.{i}.{part}" for stack in ("encoder", "stage") for i in range(500) for part in ("", "a", "b1")]
    layers = [*range(200), "t2t.0", "t2t.1", *names]
    seeds = [layer_seed(layer) for layer in layers]
    assert len(set(seeds)) == len(layers) and max(seeds) < 2**31 and seeds[:3] == [1000003, 2000006, 3000009]
    program = "from hf_efficient_attn.integration.layers import layer_seed; print(layer_seed('t2t.0'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == layer_seed("t2t.0")


@pytest.mark.parametrize(
    "layer", ["3", "-1", "", " t2t.0", "t2t..0", "t2t.0`", "a" * 65, "[x](y)", "t2t.0\n", True, 1.5, -1, None]
)
def test_invalid_layers_are_refused(layer):
    with pytest.raises(hea.UnsupportedAttentionError, match="non-negative integer"):
        check_layer(layer)


def test_a_config_keeps_names():
    settings = hea.EfficientAttentionConfig("kdeformer", {"num_samples": 8}, ["t2t.0", 2])
    assert settings.to_dict()["layers"] == ["t2t.0", 2]
    again = hea.EfficientAttentionConfig.from_dict(settings.to_dict())
    assert again == settings and again.named_layers() == ["t2t.0", 2]
    assert again.for_layer("t2t.0").num_samples == 8 and again.for_layer("t2t.1") is None
    mix = hea.EfficientAttentionConfig(
        layers=[{"layers": ["t2t.0"], "method": "linear"}, {"layers": [0, "t2t.1"], "method": "performer"}]
    )
    assert mix.named_layers() == ["t2t.0", "t2t.1", 0]
    with pytest.raises(hea.UnsupportedAttentionError, match=r"more than once: \['t2t.0'\]"):
        hea.EfficientAttentionConfig("linear", None, ["t2t.0", "t2t.0"])
