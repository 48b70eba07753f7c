"""An HTTP server with OpenAI's interface over the engine: the `serve` extra."""
