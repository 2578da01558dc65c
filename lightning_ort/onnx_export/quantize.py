"""An exported model with 16- or 8-bit weights, by ONNX Runtime's own tools: :func:`write_quantized`."""

from pathlib import Path
from typing import Literal

from lightning_ort.compat.onnxruntime import mark_preprocessed

Quantize = Literal["fp16", "int8"]


def write_quantized(source: Path, target: Path, kind: Quantize) -> None:
    """Write a model with smaller weights; inputs and outputs keep their dtypes.

    ``"fp16"`` computes in float16. ``"int8"`` has 8-bit weights in matrix products, convolutions and embeddings, and
    quantizes what they are multiplied with in each run.
    """
    import onnx
    import onnx_ir as ir

    model = onnx.load(source)
    # the tools transpose weights under their old names, and then refuse the shapes noted for these (onnxruntime 1.19)
    del model.graph.value_info[:]
    if kind == "fp16":
        from onnxruntime.transformers.float16 import convert_float_to_float16

        half = ir.from_proto(convert_float_to_float16(model, keep_io_types=True))
        half.graph.sort()  # its casts of the inputs come last (onnxruntime 1.19)
        ir.save(half, target)
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic

    mark_preprocessed(model)  # constants and BatchNorms are folded already, and it warns without
    # unsigned: the CPU has no ConvInteger for signed weights, and sums of u8 x s8 overflow before AVX-512 VNNI
    quantize_dynamic(model, target, weight_type=QuantType.QUInt8)
