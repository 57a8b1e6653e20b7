"""A pretended FlashInfer. A package, so that it stands in front of one that is installed."""
