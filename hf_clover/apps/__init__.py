"""What a person talks to: a chat in the console, text as it appears, a server for OpenAI's clients."""
