"""The special tokens of every task; a task's own tokens start at FIRST."""

PAD, EOS, BOS, FIRST = 0, 1, 2, 3
