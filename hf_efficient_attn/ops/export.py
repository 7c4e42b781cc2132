"""Whether a graph for ONNX is being traced."""

import torch


def exporting_to_onnx() -> bool:
    """Whether this call is traced by `torch.onnx.export`.

    The graph must then consist of PyTorch's standard operators, and must not depend on the lengths of the example: the
    exporter drops the guards with which `torch.export` and `torch.compile` check the lengths of later calls.
    """
    return bool(torch.compiler.is_exporting() or torch.jit.is_tracing()) and in_onnx_export()


def in_onnx_export() -> bool:
    """Whether `torch.onnx.export` runs. `integration` marks the result as a constant for Dynamo."""
    return bool(torch.onnx.is_in_onnx_export())
