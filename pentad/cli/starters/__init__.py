"""Files that `pentad init` copies into a new task: each is a start, meant to be changed."""
