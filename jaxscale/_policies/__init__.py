"""The policies: how a loss scale starts, and how it moves."""
