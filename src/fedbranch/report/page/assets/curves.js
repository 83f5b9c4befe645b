// Training: a metric over rounds, and below it, on the same axis, what the rules look at.

const MOST_BANDS = 8;
const MOST_CLIENT_LINES = 200;
const training = new CursorGroup();

function rangeOfRounds(run) {
  const first = run.series.rounds[0] ?? 1;
  return { from: Math.min(1, first), to: Math.max(run.rounds_done, 2) };
}

function splitMarks(run) {
  const splits = run.nodes.filter((n) => n.split_in_round !== null && isInSight(run, n.id));
  return splits.map((node) => ({
    round: node.split_in_round,
    text: node.parent === null ? "split" : `node ${node.id} splits`,
  }));
}

/** The lines of one metric: clusters, single clients of the selected one, plain FL. */
function metricLines(run, metric) {
  const looks = looksOf(run);
  const { series } = run;
  const byNode = Object.entries(given(series.nodes, metric.name) ?? {}).map(([id, s]) => [Number(id), s]);
  const lines = [];
  const bands = [];
  for (const [id, s] of byNode) {
    const node = nodesOf(run).get(id);
    const rounds = series.rounds.slice(s.first, s.first + s.mean.length);
    if (!node) {
      const title = `Node ${id}, merged back`;
      lines.push({ title, rounds, values: s.mean, look: NEUTRAL, isFaint: true });
      continue;
    }
    const isFaint = !isInSight(run, id);
    const look = looks.get(id);
    lines.push({ title: clusterName(node), rounds, values: s.mean, look, isFaint, node: id });
    if (!isFaint && (state.node !== null || byNode.length <= MOST_BANDS)) {
      bands.push({ rounds, low: s.low, high: s.high, look });
    }
  }
  const clients = given(series.clients, metric.name);
  if (clients && state.node !== null) {
    for (const index of nodesOf(run).get(state.node).clients.slice(0, MOST_CLIENT_LINES)) {
      lines.push({
        title: clientName(run, index), rounds: series.rounds, values: clients[index],
        look: { ...looks.get(run.clients.leaf[index]) ?? NEUTRAL, dash: "" },
        isThin: true,
      });
    }
  }
  const root = run.nodes.find((node) => node.parent === null).id;
  const plain = given(series.plain?.nodes, metric.name);
  const whose = plain?.[state.node] ? state.node : root;
  if (plain?.[whose]) {
    lines.push({
      title: whose === root ? "Plain FL" : "Plain FL, same clients", rounds: series.plain.rounds,
      values: plain[whose], look: { ...NEUTRAL, colour: "var(--ink)" }, isDotted: true,
    });
  }
  return { lines, bands };
}

const placeOf = (run) => run.measured_on ?? "held-out data";

const isKnown = (value) => value !== null && value !== undefined;

/** A value of a line and when it was measured; a cluster may be measured later than it is born. */
const toldAt = (line, position) =>
  position < 0 ? "–" : `${shown(line.values[position])} in round ${line.rounds[position]}`;

const lastOf = (values) => values.findLast((value) => value !== null && value !== undefined) ?? null;

function curveWords(run, metric, lines) {
  const clusters = lines.filter((line) => line.node !== undefined && isLeaf(nodesOf(run).get(line.node)));
  const ends = clusters.map((line) => lastOf(line.values)).filter((value) => value !== null);
  if (!ends.length) return "Nothing was evaluated on held-out data.";
  const plain = lines.find((line) => line.isDotted);
  const beside = plain ? ` Plain FL (dotted) ends at ${shown(lastOf(plain.values))}.` : "";
  const told = clusters.length <= 6
    ? clusters.map((line) => `${line.title} ends at ${shown(lastOf(line.values))}`).join(", ")
    : `the ${clusters.length} clusters end between ${shown(Math.min(...ends))} and ${shown(Math.max(...ends))}`;
  return `Mean ${metric.name} on ${placeOf(run)} by cluster (${metric.is_better} is better): ${told}.${beside}` +
    " Bands hold the clients from the 10 % to the 90 % quantile.";
}

function drawCurves() {
  const run = theRun();
  const metric = theMetric();
  byId("training").hidden = !run.rounds_done;
  if (!run.rounds_done) return;
  drawMetric(run, metric);
  drawGap(run);
  drawNorms(run);
}

function drawMetric(run, metric) {
  const chooser = byId("metric");
  const names = run.metrics.map((m) => m.name);
  if ([...chooser.options].map((o) => o.value).join("\n") !== names.join("\n")) {
    chooser.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  }
  for (const id of ["metric", "log"]) byId(id).closest("label").hidden = !metric;
  byId("curves-table").hidden = !metric;
  if (!metric) {
    training.charts.delete(byId("curves"));
    byId("curves-words").textContent = "Nothing was evaluated on held-out data.";
    for (const id of ["curves-title", "curves"]) byId(id).replaceChildren();
    return;
  }
  chooser.value = metric.name;
  const isLog = state.isLog.get(metric.name) ?? metric.is_log;
  byId("log").checked = isLog;
  byId("curves-title").textContent = `${metric.name} on ${placeOf(run)}`;
  const { lines, bands } = metricLines(run, metric);
  const words = curveWords(run, metric, lines);
  new Plot(byId("curves"), training, {
    label: words, height: 320, ...rangeOfRounds(run), lines, bands, marks: splitMarks(run), isLog,
  });
  byId("curves-words").textContent = words;
  const rows = run.nodes.map((node) => {
    const line = lines.find((l) => l.node === node.id);
    const plain = given(node.plain, metric.name);
    return [clusterName(node), whole(node.num_clients),
      line ? toldAt(line, line.values.findIndex(isKnown)) : "–",
      line ? toldAt(line, line.values.findLastIndex(isKnown)) : "–",
      shown(plain)];
  });
  byId("curves-table").lastElementChild.replaceChildren(
    tableOf(`Mean ${metric.name} by cluster, while it was one`,
      ["cluster", "clients", "first", "last", "plain FL at its end"], rows));
}

/** Which nodes' measurements to draw: all, or the selected one and those above and below. */
const normsInSight = (run) =>
  Object.entries(run.norms)
    .map(([id, series]) => [Number(id), series])
    .filter(([id]) => nodesOf(run).has(id) && isInSight(run, id));

/** A solid line and its dashed partner for each node, where there is something to draw. */
function pairedLines(run, solid, dashed, hasDots) {
  return normsInSight(run).flatMap(([id, series]) => {
    if (![...series[solid], ...series[dashed]].some((value) => value !== null)) return [];
    const look = { ...looksOf(run).get(id), dash: "" };
    const common = { title: clusterName(nodesOf(run).get(id)), rounds: series.rounds, look, hasDots };
    const partner = { ...common, values: series[dashed], isDashed: true };
    return [{ ...common, values: series[solid], partner, node: id }, partner];
  });
}

const pairWords = (lines) => listedShortly(
  lines.filter((line) => line.partner).map((line) =>
    `${line.title} ${shown(lastOf(line.values))} and ${shown(lastOf(line.partner.values))}`), 3);

function drawGap(run) {
  const lines = pairedLines(run, "gap", "cross", true);
  byId("gap-figure").hidden = !lines.length;
  if (!lines.length) return training.charts.delete(byId("gap"));
  const words =
    "The gap between similarities inside and across the best cut (solid), and the largest similarity " +
    `across it (dashed), whenever a cluster was examined. Last: ${pairWords(lines)}.`;
  new Plot(byId("gap"), training, {
    label: words, height: 180, ...rangeOfRounds(run), lines, marks: splitMarks(run), isZeroLine: true,
    keys: [{ title: "gap" }, { title: "cross-similarity", isDashed: true }],
  });
  byId("gap-words").textContent = words;
}

function drawNorms(run) {
  const lines = pairedLines(run, "mean", "max", false);
  byId("norms-figure").hidden = !lines.length;
  if (!lines.length) return training.charts.delete(byId("norms"));
  const values = lines.flatMap((line) => line.values).filter((value) => value > 0);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const words =
    "Length of a cluster's mean update (solid) and of its longest (dashed). A cluster whose mean is " +
    `short while single updates stay long pulls in different directions. Last: ${pairWords(lines)}.`;
  new Plot(byId("norms"), training, {
    label: words, height: 190, ...rangeOfRounds(run), lines, marks: splitMarks(run),
    isLog: values.length > 0 && high / low > 5,
    keys: [{ title: "mean update" }, { title: "longest update", isDashed: true }],
  });
  byId("norms-words").textContent = words;
}
