"""Which way a step runs."""
