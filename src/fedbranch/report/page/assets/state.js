// What is being looked at: one object, changed by `change` only, which draws the page again.

const state = {
  facts: null,
  run: 0, // position in facts.runs
  node: null, // the selected cluster; null: all of them
  metric: null,
  isLog: new Map(), // metric -> whether somebody wants its axis to be logarithmic
  split: null, // which similarity matrix: "node@round"; null: the first, or the selected cluster's
  query: "",
  sort: { column: "client", isDown: false },
  page: 0,
  open: new Set(), // clients whose refusals are shown
};

let drawAgain = () => {};

function change(changes) {
  Object.assign(state, changes);
  drawAgain(changes);
}

const theRun = () => state.facts.runs[state.run];

const theMetric = () =>
  theRun().metrics.find((metric) => metric.name === state.metric) ?? theRun().metrics[0] ?? null;

/** Node id -> node, worked out once for each run as it was read. */
function nodesOf(run) {
  if (!run.byId) {
    Object.defineProperty(run, "byId", { value: new Map(run.nodes.map((n) => [n.id, n])) });
  }
  return run.byId;
}

const isLeaf = (node) => node.children.length === 0;

const leavesOf = (run) => run.nodes.filter(isLeaf);

/** The ids from the root to a node. */
function pathTo(run, id) {
  const path = [];
  for (let node = nodesOf(run).get(id); node; node = nodesOf(run).get(node.parent)) {
    path.unshift(node.id);
  }
  return path;
}

/** Whether a node is the selected one, above it or below it; everything is, if none is. */
function isInSight(run, id) {
  if (state.node === null) return true;
  return pathTo(run, id).includes(state.node) || pathTo(run, state.node).includes(id);
}

function clientName(run, index) {
  return run.clients.names[index] ?? run.clients.ids[index];
}

function select(id) {
  change({ node: state.node === id ? null : id, page: 0, split: null });
}

// The address says what is selected, so that it can be kept and sent.

function hashOf() {
  const parts = [];
  if (state.run > 0) parts.push(`run-${state.run + 1}`);
  if (state.node !== null) parts.push(`cluster-${state.node}`);
  return parts.join("/");
}

function writeHash() {
  const hash = hashOf();
  if (location.hash === (hash ? "#" + hash : "")) return;
  if (!hash && !/^#(run|cluster)-/.test(location.hash)) return; // somebody else's
  try {
    history.replaceState(null, "", hash ? "#" + hash : location.pathname + location.search);
  } catch {
    // Some viewers of mailed files have no history; the page works without.
  }
}

function readHash() {
  const run = /(?:^|[#/])run-(\d+)/.exec(location.hash);
  const cluster = /(?:^|[#/])cluster-(\d+)/.exec(location.hash);
  const position = run ? Number(run[1]) - 1 : 0;
  const chosen = state.facts.runs[position] ? position : 0;
  const known = state.facts.runs[chosen];
  const node = cluster && known && nodesOf(known).has(Number(cluster[1])) ? Number(cluster[1]) : null;
  return { run: chosen, node };
}
