"""As far as the benchmark uses it."""


class TorchDistBackend:
    """The default process group."""
