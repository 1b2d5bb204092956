"""The special tokens of every task; its own begin at FIRST."""

PAD, EOS, BOS, FIRST = 0, 1, 2, 3
