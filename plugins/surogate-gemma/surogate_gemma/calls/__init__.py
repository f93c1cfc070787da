"""How Gemma calls functions: its notations, read and written, and the formats of answers that they belong to."""
