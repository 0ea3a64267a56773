"""Limits of a file of overrides, read in seconds."""

MAX_FILE_BYTES = 2**18  # three thousand entries of three lines, half a second to parse
MAX_TEXT = 500  # characters of a selector, key or value: names of parameters have 50 to 150
MAX_DEPTH = 8  # of lists and mappings, and merges: an entry with lists in its selector takes four
MAX_VALUES = 2**16  # with aliases followed: six thousand entries
MAX_SETTINGS = 100  # of an entry: all optimizers together have forty
MAX_MISTAKES = 200  # of a file; each looks for similar names
