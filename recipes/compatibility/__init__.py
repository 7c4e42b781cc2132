"""Which models of Transformers run with the methods of this package, by Transformers' own model testers.

- `testers`: finds the test files of a checkout and what they know about each model.
- `checks`: what is checked of one model class and one method.
- `report`: the table of the findings.
"""
