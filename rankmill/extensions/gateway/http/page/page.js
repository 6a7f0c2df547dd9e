"use strict";

const at = (id) => document.getElementById(id);

function headers() {
  const key = at("key").value.trim();
  return key ? { authorization: `Bearer ${key}` } : {};
}

function complain(text) {
  at("notice").textContent = text;
  at("notice").hidden = !text;
}

async function ask(path, options) {
  const reply = await fetch(path, options);
  const found = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Error(found.message || found.detail || `the gateway answers with status ${reply.status}`);
  return found;
}

async function showModels() {
  const before = at("model").value;
  const { data } = await ask("v1/models", { headers: headers() });
  at("model").replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === before)));
}

function row(...texts) {
  const line = document.createElement("tr");
  line.append(...texts.map((text) => {
    const cell = document.createElement("td");
    cell.textContent = text;
    return cell;
  }));
  return line;
}

const PATH = "jina/v1/rerank"; // gateway_dialect decides what v1/rerank is

// The request as a person would write it; a key is named, and never shown.
function showCode({ return_documents: _, ...body }) {
  const url = new URL(PATH, location.href.split(/[?#]/)[0]).href;
  const hasKey = Boolean(at("key").value.trim());
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  at("curl").textContent = [`curl ${quoted(url)}`, "  -H 'content-type: application/json'",
    ...(hasKey ? ['  -H "authorization: Bearer $RANKMILL_KEY"'] : []),
    `  -d ${quoted(JSON.stringify(body))}`].join(" \\\n");
  const fields = Object.entries(body).map(([name, value]) => `    "${name}": ${JSON.stringify(value)},`);
  const key = hasKey ? ', headers={"authorization": f"Bearer {os.environ[\'RANKMILL_KEY\']}"}' : "";
  at("python").textContent = [hasKey ? "import os\n\nimport requests\n" : "import requests\n", "body = {", ...fields, "}",
    `found = requests.post(${JSON.stringify(url)}, json=body${key}).json()`,
    'for result in found["results"]:', '    print(result["relevance_score"], body["documents"][result["index"]])'].join("\n");
}

async function rank() {
  const documents = at("passages").value.split("\n").map((line) => line.trim()).filter(Boolean);
  const body = { query: at("query").value, documents, return_documents: true };
  if (at("model").value) body.model = at("model").value;
  const began = performance.now();
  const { results } = await ask(PATH, {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify(body),
  });
  const took = Math.round(performance.now() - began);
  at("summary").textContent = `${results.length} passages in ${took} ms`;
  at("ranked").replaceChildren(...results.map(({ index, relevance_score: score }, place) =>
    row(`${place + 1}`, score.toFixed(4), documents[index])));
  showCode(body);
  at("answer").hidden = false;
}

async function attempt(work) {
  try {
    await work();
    complain("");
  } catch (error) {
    complain(error.message);
  }
}

at("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  at("send").disabled = true;
  await attempt(rank);
  at("send").disabled = false;
});
at("key").addEventListener("change", () => attempt(showModels));
attempt(async () => {
  await showModels();
  const asked = new URLSearchParams(location.search);
  if (!asked.has("query")) return;
  at("query").value = asked.get("query");
  at("passages").value = asked.getAll("passage").join("\n");
  await rank();
});
