// While a run goes on: ask for news every two seconds, and change only what changed.

const isLive = document.documentElement.dataset.live === "true";
const SECONDS_BETWEEN = 2;
let tag = null; // of the facts that are shown

function showStatus(kind, words) {
  const status = byId("status");
  if (status.textContent !== words) status.textContent = words;
  status.className = `status ${kind}`;
}

function showProgress() {
  const run = state.facts.runs[0];
  if (!run) showStatus("waiting", "waiting for the run to begin");
  else if (isLive && run.is_complete) showStatus("ended", progressOf(run));
  else if (isLive) showStatus("live", `live, ${progressOf(run)}`);
  else showStatus(run.is_complete ? "" : "ended", run.is_complete ? "" : progressOf(run));
}

async function ask() {
  const answer = await fetch("/facts.json", tag ? { headers: { "If-None-Match": tag } } : {});
  if (answer.status === 304) return;
  if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
  const facts = await answer.json();
  tag = answer.headers.get("ETag");
  const before = state.facts;
  const hasBegun = before.runs.length === 0 && facts.runs.length > 0;
  state.facts = facts;
  if (!facts.runs[state.run]) state.run = 0;
  const node = facts.runs[state.run] && nodesOf(facts.runs[state.run]).has(state.node) ? state.node : null;
  change(hasBegun ? readHash() : { node });
}

async function poll() {
  try {
    await ask();
    showProgress();
  } catch {
    showStatus("lost", "connection lost, trying again");
  }
  setTimeout(poll, 1000 * SECONDS_BETWEEN);
}

function startLive() {
  showProgress();
  if (isLive) setTimeout(poll, 1000 * SECONDS_BETWEEN);
}
