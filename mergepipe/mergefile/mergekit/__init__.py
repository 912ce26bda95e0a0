"""mergekit's configurations, read and written as a Mergefile: what `mergepipe import` does.

The steps: YAML with line numbers (`yamltext`), each document against mergekit's schema (`document`, `settings`,
`references`), the base and the experts as our operators take them (`roles`, `methods`), mergekit's parameter scopes as
ours (`scopes`, `merging`), then the text (`text`). `imported` puts them together. Whatever cannot be said in a
Mergefile is a problem with its reason; whatever changes on the way is a note.
"""
