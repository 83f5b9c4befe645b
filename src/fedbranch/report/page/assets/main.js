// Read the facts, draw every part, and draw again what a change concerns.

const PARTS = [
  drawHeader, drawTree, drawPanel, drawCurves, drawMatrix, drawTable, drawTruth, drawComparison, drawNews,
];
const CONCERNED = { // change -> parts; any other change concerns all
  query: [drawTable],
  sort: [drawTable],
  page: [drawTable],
  split: [drawMatrix],
  isLog: [drawCurves],
};

drawAgain = (changes) => {
  const hasRun = state.facts.runs.length > 0;
  byId("main").hidden = !hasRun;
  if (!hasRun) {
    byId("name").textContent = "Waiting for the run to begin";
    byId("summary").textContent =
      state.facts.waiting ?? "There is nothing in its folder yet. This page goes on by itself.";
    return;
  }
  const names = Object.keys(changes);
  const isSmall = names.length > 0 && names.every((name) => CONCERNED[name]);
  const parts = isSmall ? new Set(names.flatMap((name) => CONCERNED[name])) : PARTS;
  for (const part of parts) part();
  document.title = `${theRun().name} – fedbranch`;
  writeHash();
};

function start() {
  state.facts = JSON.parse(byId("facts").textContent);
  Object.assign(state, readHash());
  startTheme(() => change({ split: state.split }));
  startTable();
  startMatrix();
  byId("run").addEventListener("change", (event) =>
    change({ run: Number(event.target.value), node: null, split: null, page: 0 }));
  byId("metric").addEventListener("change", (event) => change({ metric: event.target.value }));
  byId("log").addEventListener("change", (event) =>
    change({ isLog: new Map(state.isLog).set(theMetric().name, event.target.checked) }));
  byId("show-all").addEventListener("click", () => change({ node: null, page: 0, split: null }));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && state.node !== null && event.target.id !== "search") select(state.node);
  });
  addEventListener("hashchange", () => {
    const { run, node } = readHash();
    if (/^#(run|cluster)-/.test(location.hash) && (run !== state.run || node !== state.node)) change({ run, node });
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar comes and goes
    width = innerWidth;
    requestAnimationFrame(() => change({}));
  });
  change({});
  startLive();
  // After the first paint: what tests call ready is what people see.
  requestAnimationFrame(() => setTimeout(() => {
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
  }));
}

start();
