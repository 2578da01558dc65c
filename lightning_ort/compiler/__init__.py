"""From a graph that dynamo captured to a callable on executors and torch, in order of execution.

1. :mod:`.backend`, :mod:`.compilation`: the entry point of ``torch.compile``; what a run asks for is in :mod:`.request`
2. :mod:`.graphs`: facts about graphs and nodes, and what a graph is not captured for; :mod:`.lowering`: decompositions
   for AOTAutograd, passes over its graphs
3. :mod:`.regions`: the cut into regions such as ``ort_1`` and ``torch_2``, and one function of all of them
4. :mod:`.placement`: asks the executors what they support, builds regions and times them; :mod:`.cache` has the
   answers, models and times of earlier runs
5. :mod:`.executors`: what an executor is (``base``), the list of them (``registry``), ONNX Runtime (``ort``), torch
6. :mod:`.running`: what runs in each step; a region, or a graph, that fails meanwhile continues in torch
7. :mod:`.report`: what ran where, how fast, and for which :mod:`.reason` not elsewhere; :mod:`.run_part` is what a
   Trainer's run adds

:mod:`.machine` is the process: memory and threads. What a whole step can run on instead is in :mod:`.engines`.
"""
