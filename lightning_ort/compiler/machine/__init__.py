"""The process and its devices: memory and threads."""
