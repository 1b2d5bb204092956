"""Screenshots of the playground for the docs, desktop and phone: python -m tests.screens FOLDER RUN..."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.test_playground import choose
from tests.visited import CHROMIUM, served

WIDTHS = {"desktop": 1280, "phone": 390}


def main(folder: Path, *runs: str) -> None:
    """Takes all screenshots: of a run named wikipedia, for instance, folder/wikipedia-desktop.png."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as place, served(Path(place), *runs) as server, sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for kind, width in WIDTHS.items():
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.goto(server.url)
            page.wait_for_selector(".go:visible")
            for run in map(Path, runs):
                if len(runs) > 1:
                    choose(page, run.name)
                shoot(page, folder / f"{run.name}-{kind}.png")
                if (run / "metrics.jsonl").exists():
                    page.locator("button[role=tab]:visible", has_text="Training").click()
                    page.wait_for_selector(".samples img:visible, .samples .drawn:visible", timeout=120_000)
                    page.screenshot(path=folder / f"{run.name}-training-{kind}.png", full_page=True)
                    page.locator("button[role=tab]:visible", has_text="Draw").click()
            page.close()
        browser.close()


def shoot(page: Any, path: Path) -> None:
    """Takes a screenshot of a drawn sample, with the comparison of numbers of latents."""
    prompt = page.locator(".prompt textarea:visible")
    if prompt.count():
        prompt.fill("The city of ")
    page.locator(".go:visible").click()
    page.wait_for_selector(".files a:visible", timeout=120_000)
    page.locator(".compare:visible").click()
    rows, before = page.locator(".latents-table tr:visible"), -1
    while rows.count() > before:  # the last takes longest
        before = rows.count()
        page.wait_for_timeout(15_000)
    page.screenshot(path=path, full_page=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
