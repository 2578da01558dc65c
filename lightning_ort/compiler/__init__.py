"""From a graph that dynamo captured to a callable on executors and torch, in order of execution.

1. :mod:`.backend`: the entry point of ``torch.compile``; reads as the pipeline
2. :mod:`.lowering`: decompositions for AOTAutograd, passes over its graphs
3. :mod:`.placer`: asks the executors what they support, cuts the graph, builds and times its regions

   - :mod:`.executors`: what an executor is (``base``), the list of them (``registry``), ONNX Runtime (``ort``), torch
   - :mod:`.autotune`: the fastest variant of each op that has several
   - :mod:`.regions`: the cut into regions such as ``ort_1`` and ``torch_2``
   - :mod:`.region_module`: a region as torch runs it
   - :mod:`.timing`: executors against torch
   - :mod:`.cache`, :mod:`.fingerprint`, :mod:`.cache_folder`: answers, models and times from earlier runs

4. :mod:`.linking`: one function of the regions
5. :mod:`.guarded_region`, :mod:`.fallbacks`: a region, or a graph, that fails while it runs continues in torch
6. :mod:`.report`: what ran where, why not elsewhere, and how fast

Used by several: :mod:`.nodes` and :mod:`.layouts` (facts about nodes and tensors), :mod:`.output_shapes` (symbolic
sizes as functions of a region's inputs), :mod:`.masks` and :mod:`.mask_kernel` (dropout masks),
:mod:`.openmp` (torch's threads). What a whole step can run on instead is in :mod:`.engines`.
"""
