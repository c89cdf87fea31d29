"""Code that exists for speed only; without it every result stays the same."""
