"""The Mergefile: schema, parsing with every problem in one go, and the parameters of each tensor.

`parse.load_mergefile` reads one, `resolve.resolve` gives the parameters of a tensor, `template.render_template` writes
the one that a project starts with. Nothing here imports numpy, torch or networkx.
"""
