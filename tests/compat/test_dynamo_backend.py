"""AOTAutograd as a backend of ``torch.compile``."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_ort.compat.aot_autograd import backward_at_once
from lightning_ort.compat.dynamo import aot_backend
from lightning_ort.compat.torch_graphs import boxed


def test_aot_backend_compiles_forward_and_backward_graphs() -> None:
    compiled: list[str] = []

    def compiler(kind: str) -> Callable[..., Any]:
        def compile_graph(gm: Any, inputs: Any) -> Any:
            compiled.append(kind)
            assert all(
                isinstance(node.target, torch._ops.OpOverload) for node in gm.graph.nodes if node.op[:4] == "call"
            )
            return boxed(gm.forward)

        return compile_graph

    backend = aot_backend(
        fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), inference_compiler=compiler("inference")
    )
    x = torch.randn(3, requires_grad=True)
    with backward_at_once(autocast=False):
        y = torch.compile(lambda x: x.sin() * 2, backend=backend)(x)
    assert compiled == ["forward", "backward"]
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())
    with torch.no_grad():
        torch.compile(lambda x: x.cos(), backend=backend)(x)
    assert compiled == ["forward", "backward", "inference"]
