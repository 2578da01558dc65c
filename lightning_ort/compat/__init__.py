"""Private and undocumented names of other packages, each behind one small function that says which version it is of."""
