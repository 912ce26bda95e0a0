"""What a sweep looks like: text, CSV, a picture, and a page."""
