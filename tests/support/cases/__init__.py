"""The case harness: runs folders of odd inputs through the command line and checks what came out.

A case is a folder of tiny checkpoints with a ``case.json`` that says, without Mergefile syntax, what to merge, what to
do to the files between builds, and what must come out. Levels: `errors`, `tensors`, `recipe` know no case;
`values`, `checks`, `state`, `outcome` judge a state; `files`, `launch`, `steps` change one; `case`, `runner` tie them
together. Any key that the harness does not know fails the test.
"""
