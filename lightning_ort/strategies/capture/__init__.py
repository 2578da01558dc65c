"""The steps of a LightningModule, captured.

- :mod:`.capture`: what a strategy calls
- :mod:`.step`: one step, which runs in the way that its race (:mod:`lightning_ort.strategies.race`) says
- :mod:`.module`: what the steps of one module share
- :mod:`.shims`: replacements for the module's helpers while a step runs
- :mod:`.dynamo_monitor`: what dynamo did during a step
"""
