"""Draw every picture of the documents anew, from what is recorded beside this file.

python -m docs.figures
"""

from docs.figures import FOLDER, PICTURES

for name, draw in PICTURES.items():
    (FOLDER / name).write_text(draw())
