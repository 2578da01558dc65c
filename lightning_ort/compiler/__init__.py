"""From a graph that dynamo captured to a callable on ONNX Runtime and torch, in the order of execution.

- :mod:`.backend`: the entry point of ``torch.compile``; reads as the pipeline
- :mod:`.lowering`: decompositions for AOTAutograd, passes over its graphs
- :mod:`.support`: can ONNX Runtime run this node, and if not, why
- :mod:`.partitioning`: regions, ``ort_N`` and ``torch_N``
- :mod:`.region_module`: a region as torch runs it, in the memory layouts that were traced (:mod:`.layouts`)
- :mod:`.conversion`: a region as an ONNX model, one small function an ATen op
- :mod:`.kernels`: what the installed onnxruntime really has
- :mod:`.session`: the model as a session
- :mod:`.placement`: who is faster
- :mod:`.cache`: decisions kept between runs
- :mod:`.runtime`: the hot path
- :mod:`.sizes`: symbolic sizes of a region, as functions of its inputs
- :mod:`.linking`: one function of the regions
- :mod:`.fallbacks`: a graph that fails while it runs is done in eager
- :mod:`.report`: what ran where, why not, how fast
"""
