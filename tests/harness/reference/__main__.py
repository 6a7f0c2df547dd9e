"""Write the pages of docs/reference/."""

from tests.harness.reference import FOLDER, PAGES, written

for name in PAGES:
    (FOLDER / name).write_text(written(name))
