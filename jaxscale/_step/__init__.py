"""Steps: states, gradients and policies, tied together."""
