"""The cells of a notebook that starts a server and workers, scores a data frame, and ranks passages.

pip install -c constraints.txt '.[worker]'
"""

# %% A server and workers on this host; they end with the notebook
from pathlib import Path

import pandas as pd

from rankmill import Client

client = Client.embedded(model="demo")

# %% Pairs from anywhere, such as the example that comes with rankmill
pairs = pd.read_json(Path(__file__).parent / "pairs.jsonl", lines=True)

# %% Their scores as another column
run = client.submit(pairs[["query", "passage"]])
pairs["score"] = run.scores(timeout=300)
print(f"{run.stats.rows} pairs, {run.stats.tokens} tokens, in {run.stats.precision}; errors: {run.errors}")

# %% The best passage of each query
best = pairs.loc[pairs.groupby("query")["score"].idxmax()]
print(f"the best passage is relevant for {(best['relevant'] == 2).mean():.0%} of {len(best)} queries")

# %% One query, ranked
for each in client.rank("how far is the moon", ["Cheese.", "About 384,400 km."], timeout=60):
    print(f"{each.score:8.2f}  passage {each.index}")

# %% The server and the workers end
client.close()
