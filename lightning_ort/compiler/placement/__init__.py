"""Which executor runs a region: who supports it, and who is fastest."""
