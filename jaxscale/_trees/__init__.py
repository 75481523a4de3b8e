"""Trees and calls, which know no loss scale."""
