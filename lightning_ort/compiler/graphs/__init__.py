"""Facts about graphs, their nodes and their tensors, and what a graph is not captured for."""
