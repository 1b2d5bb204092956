"""Every table and figure of the paper as a command: each claim is a Study, run at one of three scales."""

from perceiver_ar.reproduce import books, caching, copying, images, music, speed
from perceiver_ar.reproduce.study import Bench, Row, Scale, Study, run
from perceiver_ar.strict import unknown

STUDIES = {
    study.name: study for part in (copying, images, books, music, speed, caching) for study in part.STUDIES
}


def get(name: str) -> Study:
    if name not in STUDIES:
        raise ValueError(unknown("study", name, tuple(STUDIES)))
    return STUDIES[name]


__all__ = ["STUDIES", "Bench", "Row", "Scale", "Study", "get", "run"]
