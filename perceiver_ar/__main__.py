"""python -m perceiver_ar, as torchrun starts it."""

from perceiver_ar.cli import main

if __name__ == "__main__":
    main()
