"""The steps of a LightningModule, captured."""
