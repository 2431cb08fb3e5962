"""Programs for people and clients: a chat in the console, text shown while it is generated, an OpenAI-style server."""
