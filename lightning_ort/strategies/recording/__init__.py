"""Steps of a LightningModule that are recorded and replayed (:mod:`lightning_ort.recording`), with what they log."""
