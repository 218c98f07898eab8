"""A trial of one engine: recorded chat and an endless batch on it, in several ways, and what chat saw of each."""
