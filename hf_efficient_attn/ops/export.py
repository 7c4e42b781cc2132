"""Whether a graph for ONNX is being traced."""

import torch


def exporting_to_onnx() -> bool:
    """Whether this call is traced by `torch.onnx.export`.

    The graph must then consist of PyTorch's standard operators, and must not depend on the lengths of the example: the
    exporter drops the guards with which `torch.export` and `torch.compile` check the lengths of later calls.
    """
    return bool(torch.compiler.is_exporting() or torch.jit.is_tracing()) and _in_onnx_export()


def _in_onnx_export() -> bool:
    return bool(torch.onnx.is_in_onnx_export())


# Dynamo, with which the exporter tries again after a failure, otherwise takes the result for False. This is what
# `torch.compiler.assume_constant_result` does, which imports Dynamo as well: longer than all other imports together.
_in_onnx_export.__dict__["_dynamo_marked_constant"] = True
