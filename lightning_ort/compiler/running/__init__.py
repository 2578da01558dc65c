"""What runs in each step, and what happens when it fails."""
