"""Storage: parameters and optimizer states in fewer bits than they are computed in."""
