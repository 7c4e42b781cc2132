"""Goals of speed, in times faster than exact attention in the same dtype and causality.

`recipes.benchmarks.attention` compares with them. All hold for default hyperparameters and a head dimension of 64.
GPU_GOALS are estimates by arithmetic for a GPU of the class of an H100; they were not measured. HALF_GOALS hold on
processors with AMX, whose exact attention is 2.3 to 2.7 times as fast in bfloat16 as in float32.
"""

# (length, causal, backward) -> {label: goal}
Goals = dict[tuple[int, bool, bool], dict[str, float]]

_PERFORMER = "performer (num_features=64)"

# One row and 8 heads in float32.
SPEED_GOALS: Goals = {
    (8192, False, False): {
        "nearfar": 9, "kdeformer": 10, "hyperattention": 10, "longformer": 9, "linear": 60, _PERFORMER: 30,
        "nystromformer": 32, "linformer": 9, "reformer": 8, "scatterbrain": 6, "eva": 7,
    },
    (16384, False, False): {
        "nearfar": 16, "kdeformer": 14, "hyperattention": 14, "longformer": 17, "linear": 60, _PERFORMER: 30,
        "nystromformer": 35, "linformer": 18, "reformer": 12, "scatterbrain": 8, "eva": 11,
    },
    (8192, False, True): {"kdeformer": 4, "hyperattention": 4, "longformer": 4, "linear": 20, _PERFORMER: 10},
    (8192, True, False): {
        "nearfar": 2.5, "kdeformer": 2, "hyperattention": 2, "longformer": 5, "linear": 12, _PERFORMER: 6,
        "performer": 1, "eva": 2.5,
    },
}  # fmt: skip

# One row and 8 heads in bfloat16.
_HALF = {
    "nearfar": 5.0, "kdeformer": 5.0, "hyperattention": 5.0, "longformer": 5.0, "nystromformer": 15.0, "linear": 25.0,
    _PERFORMER: 12.0, "linformer": 6.0,
}  # fmt: skip
HALF_GOALS: Goals = {
    (4096, False, False): dict.fromkeys(_HALF, 2.0),
    (8192, False, False): _HALF,
    (16384, False, False): {
        "nearfar": 9, "kdeformer": 9, "hyperattention": 9, "longformer": 9, "nystromformer": 25, "linear": 40,
        _PERFORMER: 20, "linformer": 11,
    },
    (8192, False, True): {name: goal / 2 for name, goal in _HALF.items()},
    (8192, True, False): {"linear": 5, "longformer": 4, "kdeformer": 1.5},
}  # fmt: skip

# One row and 16 heads in bfloat16 on a GPU, against the flash kernel.
GPU_GOALS: Goals = {
    (length, False, False): dict(
        zip(("kdeformer", "hyperattention", "longformer", "linear", "performer", "nystromformer"), goals, strict=True)
    )
    for length, goals in {
        16384: (4, 5, 13, 20, 6, 5),
        65536: (18, 21, 54, 96, 27, 39),
        131072: (37, 43, 108, 198, 55, 89),
    }.items()
}

# Short sequences, 8 heads in float32: (length, batch, budget) -> {label: goal}
_FROM_512 = {"longformer": 1.0, "nystromformer": 1.0, "linear": 1.0, "performer": 1.0}
SHORT_GOALS: dict[tuple[int, int, int], dict[str, float]] = {
    (512, 1, 64): _FROM_512,
    (512, 8, 64): _FROM_512,
    (1024, 1, 128): {"kdeformer": 1.3, "hyperattention": 1.5, "longformer": 2.5, "nystromformer": 4},
    (1024, 8, 128): {"kdeformer": 1.3, "hyperattention": 1.5, "longformer": 2.5, "nystromformer": 4},
}
