"""Sound files: read as one channel of a given rate and level, written as sound or as a spectrogram."""

import os
import wave
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perceiver_ar.extras import hushed, need

Sound = NDArray[np.float32]
"""Samples from -1 to 1; with several channels, (samples, channels)."""
SOUNDS = (".wav", ".flac", ".ogg", ".mp3")
RATES = (1_000, 768_000)
"""Lowest and highest plausible samples per second."""
BLOCK = 1 << 18
"""Numbers read at once, over all channels."""


def read_sound(path: Path, rate: int, level: float | None, seconds: float | None = None) -> Sound:
    """Reads a file as one channel, the mean of all, at the given rate and, if given, level in dB."""
    soundfile, soxr = need("soundfile", "audio"), need("soxr", "audio")
    parts, count = [], 0
    try:
        with hushed(), soundfile.SoundFile(os.fsencode(path)) as file:  # mpg123 warns of damaged files
            if not RATES[0] <= file.samplerate <= RATES[1]:
                raise ValueError(f"a rate of {file.samplerate} samples a second is not to be believed")
            if file.frames > 2**60:
                raise ValueError("it does not say how long it is: convert it")
            wanted = file.frames if seconds is None else min(file.frames, round(seconds * file.samplerate))
            told = file.format != "MP3"  # whose length may be a guess
            resampled = soxr.ResampleStream(file.samplerate, rate, 1, dtype="float32")
            size = max(1, BLOCK // file.channels)
            while count < wanted and len(block := _read(file, min(size, wanted - count))):
                count += len(block)
                parts.append(resampled.resample_chunk(block))
            parts.append(resampled.resample_chunk(np.zeros(0, np.float32), last=True))
    except soundfile.SoundFileError as error:
        raise ValueError(f"not a sound file that can be read ({error})") from None
    if told and count < wanted:
        raise ValueError(f"it is cut short: {count:,} of {wanted:,} samples are there")
    sound = np.concatenate(parts)
    if not len(sound):
        raise ValueError("it holds no sound")
    return at_level(sound, rate, level)


def _read(file: Any, count: int) -> Sound:
    """The mean of all channels."""
    block = file.read(count, dtype="float32", always_2d=True).mean(axis=1)
    if not np.isfinite(block).all():
        raise ValueError("it holds samples that are not numbers")
    return block


def at_level(sound: Sound, rate: int, level: float | None) -> Sound:
    """Scales so that the RMS of what is not silent is `level` dB (0 dB: 1), or less if it would clip."""
    peak = float(np.abs(sound).max(initial=0.0))
    if level is None or peak < 1e-9:
        return sound.clip(-1, 1)
    blocks = np.array_split(sound, max(1, len(sound) // (rate // 2)))
    powers = np.array([float(np.square(block, dtype=np.float64).mean()) for block in blocks])
    heard = powers[powers > 1e-6 * powers.max()].mean()
    return (sound * min(10 ** (level / 20) / np.sqrt(heard), 1 / peak)).astype(np.float32)


def write_wav(sound: Sound, rate: int, path: Path) -> None:
    """Writes 16 bits per sample, scaled down if it would clip."""
    frames = sound / max(1.0, float(np.abs(sound).max(initial=0.0)))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1 if sound.ndim == 1 else sound.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((frames * 32_767).astype("<i2").tobytes())


def write_spectrogram(sound: Sound, rate: int, path: Path) -> None:
    """Writes an image: time to the right, 10 ms or more a pixel; pitch upwards; 80 dB from light to dark."""
    image, size, hop = need("PIL.Image", "image"), 1024, max(rate // 100, len(sound) // 4000)
    padded = np.pad(sound, (size // 2, size // 2))
    frames = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop] * np.hanning(size)
    power = np.abs(np.fft.rfft(frames, axis=1)).T[::-1] ** 2  # (frequencies, time)
    loudness = 10 * np.log10(np.maximum(power / max(power.max(), 1e-12), 1e-8))
    image.fromarray((loudness * (-255 / 80)).astype(np.uint8)).save(path)
