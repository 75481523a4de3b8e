"""Gradients, how they are made, and how they are judged."""
