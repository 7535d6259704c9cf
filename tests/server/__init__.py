"""End-to-end tests of the server over HTTP, mostly against the stand-in engine that says prompts back."""
