"""What runs regions of a graph: :mod:`.base` says what an executor is, :mod:`.registry` lists them."""
