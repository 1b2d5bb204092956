"""What the folder of a run says, and which settings may be others when it goes on."""

from dataclasses import replace
from pathlib import Path

import pytest

from perceiver_ar import Experiment, TrainConfig, train
from perceiver_ar.config import TransformerConfig
from perceiver_ar.run import check_same
from perceiver_ar.sealed import read_sealed

MODEL = TransformerConfig(259, 16, channels=8, heads=1, layers=1)


def test_a_run_records_the_kind_of_its_model(tmp_path: Path) -> None:
    experiment = Experiment("brief", "copy", MODEL, TrainConfig(steps=1, batch_size=2), {"length": 16})
    train(experiment, out=tmp_path / "run", show=False)
    for name in ("config.json", "model/experiment.json"):
        recorded = read_sealed(tmp_path / "run" / name)["experiment"]
        assert recorded["model"]["model_type"] == "transformer"
        assert Experiment.from_dict(recorded).model == experiment.model


def test_settings_that_an_older_version_did_not_record_are_the_usual_ones(tmp_path: Path) -> None:
    begun = Experiment("old", "tokens", MODEL, TrainConfig())
    check_same(begun, replace(begun, options={"dtype": "uint16"}), tmp_path)
    with pytest.raises(ValueError, match=r"options\.dtype was uint16 and is uint32"):
        check_same(begun, replace(begun, options={"dtype": "uint32"}), tmp_path)
