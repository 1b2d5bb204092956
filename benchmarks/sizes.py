"""The models that are benchmarked, by name."""

from dataclasses import dataclass

from perceiver_ar import ModelConfig


@dataclass(frozen=True)
class Size:
    """A model and the batch size to train it with."""

    model: ModelConfig
    batch: int


SIZES = {
    "laptop": Size(ModelConfig(259, 4096, 512, channels=256, heads=8, layers=6), 4),
    "8k": Size(ModelConfig(259, 8192, 1024, layers=12), 32),
    "12k-60": Size(ModelConfig(259, 12_289, 1024, layers=60), 32),
    "131k": Size(ModelConfig(259, 131_072, 1024, layers=6), 16),
    "1m": Size(ModelConfig(259, 1_048_576, 1024, layers=6), 1),
    "8m": Size(ModelConfig(259, 8_388_608, 1024, layers=6), 1),
}
