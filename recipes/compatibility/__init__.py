"""Which models of Transformers run with the methods of this package, by Transformers' own model testers."""
