"""ironhorse: transformer training in Rust, checked against PyTorch.

Importing this package needs numpy at most; the parts that need torch (`ironhorse.reference`,
`ironhorse.export`) import it themselves.
"""

__version__ = "0.1.0"
