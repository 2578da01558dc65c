"""The steps of a LightningModule, captured.

- :mod:`.steps`: what a strategy calls, and one captured step
- :mod:`.module`: what the steps of one module share
- :mod:`.shims`: replacements for the module's helpers while a step runs
- :mod:`.dynamo_monitor`: what dynamo did during a step
- :mod:`.autotuner`: which engine runs a step
"""
