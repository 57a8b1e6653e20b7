"""Its communication."""
