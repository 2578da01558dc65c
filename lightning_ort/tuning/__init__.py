"""Finds the fastest way to train a module on this machine: ``lightning-ort tune`` and :func:`lightning_ort.tune`.

- :mod:`~lightning_ort.tuning.candidate`: one way to train, as data, and as a part of a LightningCLI configuration
- :mod:`~lightning_ort.tuning.project`: what is trained, and how a candidate trains it
- :mod:`~lightning_ort.tuning.probe`: what has to be known of the module and its data, from two steps
- :mod:`~lightning_ort.tuning.space`: the candidates that are tried, stage by stage, with the reasons
- :mod:`~lightning_ort.tuning.trials`: the times of a candidate: when it is clearly faster, and learns as float32 does
- :mod:`~lightning_ort.tuning.trainer_process`: a Trainer in a process of its own
- :mod:`~lightning_ort.tuning.measuring`: trials, started and sampled within a time
- :mod:`~lightning_ort.tuning.search`: the stages in turns, within a time
- :mod:`~lightning_ort.tuning.result`: what came out, :mod:`~lightning_ort.tuning.picture` as a plot
- :mod:`~lightning_ort.tuning.api`: all of this in turn
"""
