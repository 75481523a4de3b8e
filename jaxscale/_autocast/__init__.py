"""Half-precision computation without touching the model."""
