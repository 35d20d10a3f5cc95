"""The engine: the only place that knows every layer."""
