"""How a loss scale starts and moves: the policies."""
