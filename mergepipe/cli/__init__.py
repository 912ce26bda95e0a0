"""The command line: a thin skin over the Python API. Commands one file each, and the rendering of what they return."""
