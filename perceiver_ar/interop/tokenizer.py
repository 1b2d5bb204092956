"""A vocabulary of this library as a tokenizer of the transformers library."""

from pathlib import Path
from typing import Any

import numpy as np
from transformers import AddedToken, PreTrainedTokenizer

from perceiver_ar import vocabulary
from perceiver_ar.special import BOS, EOS, FIRST, PAD
from perceiver_ar.vocabulary import FILES, Kind, TokenizerFile, Vocabulary, as_utf8

SPECIAL = {PAD: "<|pad|>", EOS: "<|eos|>", BOS: "<|bos|>"}


class PerceiverARTokenizer(PreTrainedTokenizer):
    """Gives the tokens that a prompt of `perceiver-ar generate` has: BOS, then those of the text."""

    vocab_files_names = {  # noqa: RUF012
        "pieces_file": FILES["unigram"],
        "words_file": FILES["words"],
        "json_file": FILES["tokenizers"],
    }
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012
    padding_side = "left"

    def __init__(
        self,
        kind: Kind | None = None,
        pieces_file: str | None = None,
        words_file: str | None = None,
        json_file: str | None = None,
        **settings: Any,
    ) -> None:
        """kind: which of the files it has, if any."""
        if kind is None:
            raise ValueError("this model has no tokenizer: its tokens are not text.")
        file = {"words": words_file, "tokenizers": json_file}.get(kind, pieces_file)
        if kind != "bytes" and file is None:
            raise ValueError(f"a tokenizer of kind '{kind}' needs its file, {FILES[kind]}.")
        content = b"" if file is None or kind == "bytes" else Path(file).read_bytes()
        self.kind: Kind = kind
        self.vocabulary = vocabulary.load(kind, content)
        self.names = _names(self.vocabulary)
        self.ids = {name: number for number, name in enumerate(self.names)}
        self._added_tokens_decoder = {
            number: AddedToken(name, special=True, normalized=False) for number, name in SPECIAL.items()
        }
        named = dict(zip(("pad_token", "eos_token", "bos_token"), SPECIAL.values(), strict=True))
        settings = {"split_special_tokens": True} | settings  # their names in a text are but text
        super().__init__(**named | settings, kind=kind, special_tokens_pattern="bos")

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    def get_vocab(self) -> dict[str, int]:
        return self.ids | self.added_tokens_encoder

    def _tokenize(self, text: str, **settings: Any) -> list[str]:
        found = self.vocabulary.encode(as_utf8(text), final=False)
        return [self.names[number] for number in found.tolist()]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self.ids.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self.names[index] if index < len(self.names) else f"<|{index}|>"  # of a resized model

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of tokens; special ones, and such as were added, as they are called."""
        text, run = "", list[int]()
        for token in [*tokens, None]:
            number = None if token is None else self.ids.get(token)
            if number is not None and number >= FIRST:
                run.append(number)
                continue
            text += self.vocabulary.decode(np.array(run, dtype=np.int64)).decode(errors="replace")
            text, run = text + (token or ""), []
        return text

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        if self.kind not in FILES:
            return ()
        place = Path(save_directory, (filename_prefix or "") + FILES[self.kind])
        place.write_bytes(self.vocabulary.save())
        return (str(place),)


def _names(known: Vocabulary) -> list[str]:
    """A name for each token: what it spells, a character for each byte, where that is its alone."""
    names: dict[str, int] = {name: number for number, name in SPECIAL.items()}
    for number in range(FIRST, known.size):
        if isinstance(known, TokenizerFile):
            name = known.tokenizer.id_to_token(number - FIRST) or ""
        else:
            name = known.spell(number).decode("latin-1")
        names[name if name and name not in names else f"<|{number}|>"] = number
    return list(names)
