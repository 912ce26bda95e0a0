"""How costs grow with a model's size: sparse families of real shapes, planned and looked at."""
