"""How parameters and optimizer states are kept in fewer bits than they are computed in."""
