"""Files that `pentad init` copies into a new task, as a start to be edited."""
