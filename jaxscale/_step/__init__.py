"""What ties states, gradients and policies together in a step."""
