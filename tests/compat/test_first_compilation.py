import gc
import subprocess
import sys
import textwrap

import pytest
import torch
from torch._decomp import core_aten_decompositions

from lightning_ort.compat import first_compilation as compat

FIT = """
    import linecache
    import sys
    import torch
    from torch import nn
    from lightning.pytorch import LightningModule, Trainer
    from lightning_ort import ORTConfig, ORTStrategy

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

        def training_step(self, batch, batch_idx):
            return self.net(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    strategy = ORTStrategy(config=ORTConfig(engine="ort", start="now", placement="always", cache_dir=None))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", strategy=strategy, max_steps=3, enable_model_summary=False, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=4))
    assert strategy.report.graphs[0].regions[0].executor == "ort", strategy.report.to_text()
    print([name for name in ("networkx", "torch.distributed.tensor.experimental", "torch._inductor.compile_fx")
           if name in sys.modules])
    print([file for file, found in linecache.cache.items() if len(found) > 1 and file.endswith(
        ("symbolic_convert.py", "fake_tensor.py", "output_graph.py"))])  # sources that were read stay in memory

    from torch._functorch._activation_checkpointing.graph_info_provider import GraphInfoProvider as Graph

    graph = Graph(["a", "b"], [("a", "b")], ["a", "b"], {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0})
    print(list(graph.recomputable_node_only_graph.edges))
    import networkx
    print(type(graph.recomputable_node_only_graph) is networkx.DiGraph)
"""


def test_a_step_is_compiled_without_what_nothing_of_it_needs() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(FIT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-4:] == ["[]", "[]", "[('a', 'b')]", "True"]


def test_core_decompositions() -> None:
    assert compat.core_decompositions().keys() == core_aten_decompositions().keys()
    silu = torch.ops.aten.silu_backward.default
    grad, x = torch.randn(2, 5)
    torch.testing.assert_close(compat.core_decompositions()[silu](grad, x), silu(grad, x))


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_as_before_afterwards(collects: bool) -> None:
    (gc.enable if collects else gc.disable)()
    try:
        with compat.without_collections():
            assert not gc.isenabled()
        assert gc.isenabled() == collects
    finally:
        gc.enable()
