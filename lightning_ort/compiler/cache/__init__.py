"""What earlier runs found out."""
