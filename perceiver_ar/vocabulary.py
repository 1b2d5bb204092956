"""Text to tokens and back: bytes, subword pieces, words, or a tokenizer file of the user's.

Text is passed as bytes, so that what is not UTF-8 survives too. Token ids begin at FIRST.
"""

import codecs
import io
import re
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from perceiver_ar.extras import need
from perceiver_ar.special import FIRST
from perceiver_ar.windows import Tokens

Kind = Literal["bytes", "unigram", "bpe", "words", "tokenizers"]
FILES = {
    "unigram": "pieces.model",
    "bpe": "pieces.model",
    "words": "words.txt",
    "tokenizers": "tokenizer.json",
}
"""The file that each kind keeps in a store and in a model folder."""


class Vocabulary:
    """A mapping between text and tokens, in which a token usually stands for fixed bytes."""

    size: int
    """Number of tokens, special ones included."""
    ends = True
    """Whether documents end with EOS."""

    def encode(self, data: bytes, final: bool) -> Tokens:
        """Tokens of a text. final: False if more of it follows, as after a prompt."""
        raise NotImplementedError

    def spell(self, token: int) -> bytes:
        """The bytes of one token; empty if it is special."""
        raise NotImplementedError

    def save(self) -> bytes:
        """The content of its file."""
        raise NotImplementedError

    def decode(self, tokens: Tokens) -> bytes:
        return b"".join(map(self.spell, tokens.tolist()))

    def speller(self) -> Callable[[int], str]:
        """A function from successive tokens to text; a character appears with its last byte."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda token: decoder.decode(self.spell(token))

    def count_words(self, data: bytes, tokens: Tokens) -> int:
        """Number of words of a text, separated by white space, for perplexity per word."""
        plain = data if data.isascii() else _WIDE_SPACE.sub(b" ", data)
        space = _SPACE[np.frombuffer(plain, np.uint8)]
        return int((space[:-1] & ~space[1:]).sum() + (not space[0])) if len(space) else 0


_SPACE = np.zeros(256, dtype=bool)
_SPACE[list(b" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f")] = True
_WIDE_SPACE = re.compile("|".join(chr(c) for c in range(128, 0x3001) if chr(c).isspace()).encode())
"""The white space of Unicode in UTF-8."""


def as_utf8(text: str) -> bytes:
    """The bytes of a text, those that are no UTF-8 being escaped; other lone surrogates are replaced."""
    return _LONE.sub("\ufffd", text).encode("utf-8", "surrogateescape")


_LONE = re.compile("[\ud800-\udc7f\udd00-\udfff]")


class Bytes(Vocabulary):
    """The 256 byte values."""

    size = 256 + FIRST

    def encode(self, data: bytes, final: bool) -> Tokens:
        return np.frombuffer(data, np.uint8).astype(np.uint16) + np.uint16(FIRST)

    def spell(self, token: int) -> bytes:
        return bytes([token - FIRST]) if token >= FIRST else b""

    def decode(self, tokens: Tokens) -> bytes:
        return (tokens[tokens >= FIRST] - FIRST).astype(np.uint8).tobytes()

    def save(self) -> bytes:
        return b""


_UNSPOKEN = re.compile("([\x00\u2581\udc80-\udcff]+)")
"""What sentencepiece would not restore: its symbol for a space, NUL, and bytes that are not UTF-8."""


_TRIAL = " \ufb01 \u2460  e\u0301\n\tA\u00a0\u3000\U0001f600 "
"""Text that many tokenizers change: a ligature, a circled digit, a combining accent, unusual spaces."""


class Pieces(Vocabulary):
    """Sentencepiece, made lossless: rare characters, and words that it would change, become bytes."""

    def __init__(self, model: bytes) -> None:
        self.model, self.processor = (
            model,
            need("sentencepiece", "text").SentencePieceProcessor(model_proto=model),
        )
        self.processor.override_normalizer_spec(add_dummy_prefix=False, remove_extra_whitespaces=False)
        pieces = range(self.processor.get_piece_size())
        self.size = len(pieces) + FIRST
        self.spellings = [self._spelling(piece) for piece in pieces]
        self.byte_pieces = [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]

    def _spelling(self, piece: int) -> bytes:
        text = self.processor.id_to_piece(piece)
        if self.processor.is_byte(piece):
            return bytes([int(text[3:5], 16)])
        if self.processor.is_control(piece) or self.processor.is_unknown(piece):
            return b""
        return text.replace("\u2581", " ").encode()

    def encode(self, data: bytes, final: bool) -> Tokens:
        ids: list[int] = []
        for index, part in enumerate(_UNSPOKEN.split(data.decode("utf-8", "surrogateescape"))):
            if index % 2:
                ids += self._as_bytes(part)
            elif part:
                ids += self._exactly(part) or [
                    piece
                    for word in re.findall(r"\s*\S+|\s+", part)
                    for piece in self._exactly(word) or self._as_bytes(word)
                ]
        return np.array(ids, dtype=np.uint32) + np.uint32(FIRST)

    def _exactly(self, text: str) -> list[int] | None:
        """Pieces that spell the text exactly; None if the model changes it, as normalizing ones may."""
        found: list[int] = self.processor.encode(text)
        return found if b"".join(map(self.spellings.__getitem__, found)) == text.encode() else None

    def _as_bytes(self, text: str) -> list[int]:
        return [self.byte_pieces[byte] for byte in text.encode("utf-8", "surrogateescape")]

    def spell(self, token: int) -> bytes:
        return self.spellings[token - FIRST] if token >= FIRST else b""

    def save(self) -> bytes:
        return self.model

    @property
    def kind(self) -> Kind:
        """The type of the model: field 3 of its trainer's settings, which are field 2 of the protobuf."""
        settings = next((value for number, value in _fields(self.model) if number == 2), b"")
        return "bpe" if isinstance(settings, bytes) and (3, 2) in _fields(settings) else "unigram"

    @classmethod
    def train(cls, lines: Iterator[str], kind: Kind, size: int) -> "Pieces":
        """Learns pieces from lines of text."""
        model = io.BytesIO()
        try:
            need("sentencepiece", "text").SentencePieceTrainer.train(
                sentence_iterator=lines,
                model_writer=model,
                model_type=kind,
                vocab_size=size - FIRST,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                byte_fallback=True,
                character_coverage=0.9995,
                max_sentence_length=1 << 16,
                user_defined_symbols=["\n"],
                unk_id=0,
                bos_id=-1,
                eos_id=-1,
                pad_id=-1,
                minloglevel=2,
            )
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"no vocabulary of {size} could be made from this text: {_advice(str(error))}"
            ) from None
        return cls(model.getvalue())


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of a protobuf message."""
    stream = io.BytesIO(message)
    while stream.tell() < len(message):
        key = _varint(stream)
        if key & 7 == 0:
            yield key >> 3, _varint(stream)
        else:
            yield key >> 3, stream.read({1: 8, 5: 4}.get(key & 7) or _varint(stream))


def _varint(stream: io.BytesIO) -> int:
    value = shift = 0
    while (byte := stream.read(1)[0]) > 127:
        value, shift = value | (byte & 127) << shift, shift + 7
    return value | byte << shift


def _advice(error: str) -> str:
    """Sentencepiece's limit on the vocabulary size, special tokens included; else the end of its error."""
    for pattern, word in ((r"to a value <= (\d+)", "most"), (r"\d+ vs (\d+)", "least")):
        if found := re.search(pattern, error):
            return f"set --vocab-size to at {word} {int(found[1]) + FIRST}."
    return error.strip().splitlines()[-1]


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].split("] ")[-1]


NEEDED = ("<unk>", "<eos>")


class Words(Vocabulary):
    """Words separated by white space, with `<eos>` for the end of each line and `<unk>` for unknown ones."""

    ends = False

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts
        self.words = list(counts)
        self.ids = {word: index + FIRST for index, word in enumerate(self.words)}
        self.size = len(self.words) + FIRST

    @classmethod
    def choose(cls, counts: dict[str, int], size: int | None) -> "Words":
        """Keeps the most frequent words, sorted by frequency, as adaptive embeddings require."""
        counts = dict.fromkeys(NEEDED, 0) | counts
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        others = [word for word in ranked if word not in NEEDED]
        kept = {*NEEDED, *others[: None if size is None else size - FIRST - len(NEEDED)]}
        return cls({word: counts[word] for word in ranked if word in kept})

    def encode(self, data: bytes, final: bool) -> Tokens:
        unknown = self.ids["<unk>"]
        return np.array([self.ids.get(word, unknown) for word in split_words(data, final)], dtype=np.uint32)

    def spell(self, token: int) -> bytes:
        if token < FIRST:
            return b""
        word = self.words[token - FIRST]
        return b"\n" if word == "<eos>" else f"{word} ".encode("utf-8", "surrogateescape")

    def count_words(self, data: bytes, tokens: Tokens) -> int:
        return len(tokens)

    def save(self) -> bytes:
        lines = (f"{word} {count}\n" for word, count in self.counts.items())
        return "".join(lines).encode("utf-8", "surrogateescape")

    @classmethod
    def load(cls, data: bytes) -> "Words":
        lines = data.decode("utf-8", "surrogateescape").split("\n")[:-1]
        try:
            found = cls({word: int(count) for word, count in (line.rsplit(" ", 1) for line in lines)})
        except ValueError:
            found = cls({})
        if found.save() != data or not {*NEEDED} <= found.ids.keys():
            raise ValueError("this is not the words.txt of a store: give one as `prepare` wrote it.")
        return found


def split_words(data: bytes, final: bool) -> list[str]:
    """Words, and `<eos>` for the end of each line; in a final text, also of a last line without newline."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    found = [word for line in lines[:-1] for word in (*line.split(), "<eos>")]
    return found + lines[-1].split() + ["<eos>"] * bool(final and lines[-1])


class TokenizerFile(Vocabulary):
    """A tokenizer.json file of the tokenizers library."""

    def __init__(self, content: bytes) -> None:
        tokenizers = need("tokenizers", "text")
        self.content, self.decoders = content, tokenizers.decoders
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(f"this is not a tokenizer.json: {_reason(error)}") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1 + FIRST

    def encode(self, data: bytes, final: bool) -> Tokens:
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"a tokenizer.json takes UTF-8 only, and there is none: {error}.") from None
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if self.tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise ValueError("this tokenizer.json changes or loses some of the text")
        return np.array(ids, dtype=np.uint32) + np.uint32(FIRST)

    def decode(self, tokens: Tokens) -> bytes:
        ids = (tokens[tokens >= FIRST] - FIRST).tolist()
        return self.tokenizer.decode(ids, skip_special_tokens=False).encode()

    def speller(self) -> Callable[[int], str]:
        stream = self.decoders.DecodeStream(skip_special_tokens=False)
        return lambda token: (stream.step(self.tokenizer, token - FIRST) or "") if token >= FIRST else ""

    def save(self) -> bytes:
        return self.content


def load(kind: Kind, content: bytes) -> Vocabulary:
    """The vocabulary of a kind, from the content of its file."""
    match kind:
        case "bytes":
            return Bytes()
        case "unigram" | "bpe":
            return Pieces(content)
        case "words":
            return Words.load(content)
        case "tokenizers":
            return TokenizerFile(content)


def check_exact(vocabulary: Vocabulary, name: str) -> None:
    """Refuses a tokenizer that does not restore a difficult text exactly when it is encoded in two parts."""
    data = _TRIAL.encode()
    try:
        parts = [vocabulary.encode(data, final=False), vocabulary.encode(data, final=True)]
        exact = vocabulary.decode(np.concatenate(parts)) == 2 * data
    except ValueError:
        exact = False
    if not exact:
        raise ValueError(
            f"{name} changes or loses some text: take one with byte pieces or a byte-level one, or let "
            "--tokenizer make one."
        )
