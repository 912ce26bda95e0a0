"""Progressive packs: the delta of an expert's tensor as an embedded code, so that a budget buys precision."""
