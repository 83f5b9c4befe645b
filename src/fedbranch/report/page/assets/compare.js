// Several runs, or a run and its baselines: curves over each other and a table.

const comparing = new CursorGroup();

function drawComparison() {
  const { comparison } = state.facts;
  byId("comparison").hidden = !comparison;
  if (!comparison) return;
  let next = 0;
  const looks = comparison.curves.map((curve) => curve.is_reference
    ? { ...NEUTRAL, colour: "var(--ink)" }
    : {
        colour: `var(--cluster-${next % NUM_COLOURS})`,
        dash: DASHES[Math.floor(next++ / NUM_COLOURS) % DASHES.length],
      });
  const lines = comparison.curves.map((curve, i) => ({
    title: curve.num_runs > 1 ? `${curve.title} (${curve.num_runs} runs)` : curve.title,
    rounds: curve.rounds, values: curve.mean, look: looks[i], isDotted: curve.is_reference,
  }));
  const bands = comparison.curves
    .map((curve, i) => ({ rounds: curve.rounds, low: curve.low, high: curve.high, look: looks[i] }))
    .filter((band) => band.low && band.high);
  const rounds = comparison.curves.flatMap((curve) => curve.rounds);
  const ends = lines.map((line) => `${line.title} ends at ${shown(lastOf(line.values))}`);
  const spread = bands.length ? " Bands go from the lowest to the highest of several runs." : "";
  const words = `Mean ${comparison.metric} over clients: ${listedShortly(ends, 8)}.${spread}`;
  const known = state.facts.runs.flatMap((run) => run.metrics).find((m) => m.name === comparison.metric);
  new Plot(byId("comparison-curves"), comparing, {
    label: words, height: 300, from: Math.min(1, ...rounds), to: Math.max(2, ...rounds), lines, bands,
    isLog: known?.is_log ?? false,
  });
  byId("comparison-words").textContent = words;
  drawComparisonTable(comparison);
}

function drawComparisonTable({ table, metric }) {
  const metrics = [metric, ...new Set(table.flatMap((row) => Object.keys(row.last)))].filter(
    (name, i, all) => all.indexOf(name) === i);
  byId("comparison-table").replaceChildren(tableOf(
    "At the end of every run: mean over clients, and the worst client",
    ["run", "method", "seed", ...metrics.flatMap((name) => [name, `worst ${name}`]),
      "clusters", "ARI", "rounds"],
    table.map((row) => [
      row.run, row.title, row.seed === null ? "–" : String(row.seed),
      ...metrics.flatMap((name) => [shown(given(row.last, name)), shown(given(row.worst, name))]),
      row.clusters === null ? "–" : whole(row.clusters), shown(row.ari), whole(row.rounds),
    ]),
  ));
}
