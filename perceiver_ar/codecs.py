"""Neural audio codecs: sound to codes and back, with several levels of codes for each short frame.

Letters: F frames, L levels.
"""

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from perceiver_ar.extras import hushed, need
from perceiver_ar.sound import Sound

Kind = Literal["lyra", "encodec", "dac", "mimi"]
Codes = NDArray[np.int64]


class Codec:
    """Converts sound (samples,) of one rate to codes (F, L), each below `codes`, and back."""

    rate: int
    """Samples per second."""
    hop: int
    """Samples per frame."""
    codes: int
    """Number of values of a code."""
    most: int
    """Available levels; fewer sound coarser."""
    usual: int
    """Default number of levels."""
    device: str = "cpu"
    """Device that it runs on."""

    def encode(self, sound: Sound, levels: int) -> Codes:
        """The codes (F, L) of a sound, whose last frame is padded with silence."""
        raise NotImplementedError

    def decode(self, codes: Codes) -> Sound:
        """The sound of codes (F, L): F * hop samples."""
        raise NotImplementedError

    def frames(self, sound: Sound) -> Sound:
        """The sound in frames, (F, hop)."""
        count = math.ceil(len(sound) / self.hop)
        return np.pad(sound, (0, count * self.hop - len(sound))).reshape(count, self.hop)


class Lyra(Codec):
    """The SoundStream of Lyra v2: 50 frames per second, up to 46 levels of 16 codes.

    Its networks are stateful, so a recording of any length passes through them frame by frame; every
    recording starts with fresh ones.
    """

    rate, hop, codes, most, usual = 16_000, 320, 16, 46, 16
    FILES = ("soundstream_encoder.tflite", "quantizer.tflite", "lyragan.tflite")

    def __init__(self, folder: Path) -> None:
        missing = [name for name in self.FILES if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{folder} has no {', '.join(missing)}: give the folder of Lyra's models.")
        self.encoder, self.quantizer, self.decoder = ((folder / name).read_bytes() for name in self.FILES)

    def encode(self, sound: Sound, levels: int) -> Codes:
        encoder, quantizer = _network(self.encoder), _network(self.quantizer)
        quantize = quantizer.get_signature_runner("encode")
        count = np.array(levels, np.int32)
        found = [
            quantize(input_frames=_pass(encoder, frame[None]), num_quantizers=count)["output_0"]
            for frame in self.frames(sound)
        ]
        return np.array(found, np.int64).reshape(-1, self.most)[:, :levels]

    def decode(self, codes: Codes) -> Sound:
        decoder, quantizer = _network(self.decoder), _network(self.quantizer)
        restore = quantizer.get_signature_runner("decode")
        filled = np.full((len(codes), self.most, 1, 1), -1, np.int32)  # -1: level left out
        filled[:, : codes.shape[1], 0, 0] = codes
        found = [_pass(decoder, restore(encoding_indices=frame)["output_0"]) for frame in filled]
        return np.array(found, np.float32).reshape(-1)


def _network(content: bytes) -> Any:
    interpreter = need("ai_edge_litert.interpreter", "audio").Interpreter
    with hushed():
        network = interpreter(model_content=content, num_threads=1)
        network.allocate_tensors()
    return network


def _pass(network: Any, value: NDArray[Any]) -> NDArray[Any]:
    network.set_tensor(network.get_input_details()[0]["index"], value)
    network.invoke()
    return network.get_tensor(network.get_output_details()[0]["index"])


class Neural(Codec):
    """A codec of transformers, applied to overlapping chunks, so that a recording may have any length.

    Frames in the margins of a chunk are discarded: the neighbouring chunk has them too, with more
    context around them.
    """

    MODEL: str
    CHUNK, BEFORE, AFTER = 20.0, 2.0, 2.0
    """Seconds of a chunk, and of the margins before and after it."""

    def __init__(self, name: str) -> None:
        transformers = need("transformers", "audio")
        transformers.utils.logging.disable_progress_bar()  # downloads still show theirs
        try:
            model = getattr(transformers, self.MODEL).from_pretrained(name)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"{name} is no {self.MODEL} that can be read: {reason}") from None
        config = model.config
        if getattr(config, "audio_channels", 1) != 1:
            raise ValueError(f"{name} is a codec of several channels; only those of one can be used.")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = model.eval().to(self.device)
        self.rate, self.codes = config.sampling_rate, config.codebook_size
        exact = getattr(config, "hop_length", None)  # DAC's frame rate is rounded up
        self.hop = exact or round(self.rate / config.frame_rate)
        self.most = config.n_codebooks if hasattr(config, "n_codebooks") else config.num_quantizers
        self.usual = min(8, self.most)
        lengths = (self.CHUNK, self.BEFORE, self.AFTER)
        self.chunk, self.before, self.after = (math.ceil(x * self.rate / self.hop) for x in lengths)

    def codes_of(self, sound: torch.Tensor, levels: int) -> torch.Tensor:
        """Sound (1, 1, samples) to codes (1, at least L, F)."""
        raise NotImplementedError

    def sound_of(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes (1, L, F) to sound (1, 1, samples)."""
        raise NotImplementedError

    @torch.inference_mode()
    def encode(self, sound: Sound, levels: int) -> Codes:
        frames, parts = self.frames(sound), []
        for low, high, kept in self._chunks(len(frames)):
            x = torch.from_numpy(frames[low:high]).reshape(1, 1, -1).to(self.model.device)
            parts.append(self.codes_of(x, levels)[0, :levels].T[kept].cpu().numpy())
        return np.concatenate(parts)[: len(frames)]

    @torch.inference_mode()
    def decode(self, codes: Codes) -> Sound:
        parts = [np.zeros((0, self.hop), np.float32)]
        for low, high, kept in self._chunks(len(codes)):
            x = torch.from_numpy(codes[low:high].T).contiguous()[None].to(self.model.device)
            parts.append(self.frames(self.sound_of(x).flatten().float().cpu().numpy())[kept])
        return np.concatenate(parts)[: len(codes)].reshape(-1)

    def _chunks(self, count: int) -> Iterator[tuple[int, int, slice]]:
        """The frames of each chunk, first and end, and the slice of them to keep."""
        for start in range(0, count, self.chunk):
            low, stop = max(0, start - self.before), min(count, start + self.chunk)
            yield low, min(count, stop + self.after), slice(start - low, stop - low)


class Encodec(Neural):
    """EnCodec by Meta: 75 frames per second, up to 32 levels of 1,024 codes."""

    MODEL = "EncodecModel"

    def codes_of(self, sound: torch.Tensor, levels: int) -> torch.Tensor:
        widest = self.model.config.target_bandwidths[-1]  # all levels; later ones refine the first
        return self.model.encode(sound, bandwidth=widest).audio_codes[0]

    def sound_of(self, codes: torch.Tensor) -> torch.Tensor:
        return self.model.decode(codes[None], [None]).audio_values


class Dac(Neural):
    """DAC by Descript: 86 frames per second at 44.1 kHz, 9 levels of 1,024 codes."""

    MODEL = "DacModel"

    def codes_of(self, sound: torch.Tensor, levels: int) -> torch.Tensor:
        return self.model.encode(sound, n_quantizers=levels).audio_codes

    def sound_of(self, codes: torch.Tensor) -> torch.Tensor:
        return self.model.decode(audio_codes=codes).audio_values


class Mimi(Neural):
    """Mimi by Kyutai: 12.5 frames per second, up to 32 levels of 2,048 codes.

    Each of its 8 layers attends to the last 10 seconds, and never to the future.
    """

    MODEL, CHUNK, BEFORE, AFTER = "MimiModel", 80.0, 82.0, 0.0

    def codes_of(self, sound: torch.Tensor, levels: int) -> torch.Tensor:
        return self.model.encode(sound, num_quantizers=levels).audio_codes

    def sound_of(self, codes: torch.Tensor) -> torch.Tensor:
        return self.model.decode(codes).audio_values


HUB = {"encodec": "facebook/encodec_24khz", "dac": "descript/dac_44khz", "mimi": "kyutai/mimi"}
"""Default weights, by their name on the hub."""


@functools.cache
def load(kind: Kind, weights: str) -> Codec:
    """Loads a codec: Lyra from a folder, the others from a folder or by their name on the hub."""
    if kind == "lyra":
        return Lyra(Path(weights))
    return {"encodec": Encodec, "dac": Dac, "mimi": Mimi}[kind](weights)
