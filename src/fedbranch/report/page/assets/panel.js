// The selected cluster in words: what it is, and every examination with its reason.

const MOST_EXAMINATIONS = 40;

function drawPanel() {
  const run = theRun();
  const node = nodesOf(run).get(state.node);
  const content = node ? clusterWords(run, node) : overallWords(run);
  const panel = byId("panel");
  // While a run goes on most updates change nothing here; what a reader opened stays open.
  const next = make("div", {}, content);
  if (panel.dataset.shown === next.textContent) return;
  const open = new Set([...panel.querySelectorAll("details[open]")].map((d) => d.dataset.key));
  for (const details of next.querySelectorAll("details")) {
    if (open.has(details.dataset.key)) details.open = true;
  }
  refill(panel, ...next.childNodes);
  panel.dataset.shown = panel.textContent;
}

const nodeLink = (run, id) => {
  const node = nodesOf(run).get(id);
  return node
    ? make("button", { type: "button", class: "link", onclick: () => select(id) },
        clusterName(node).toLowerCase())
    : `node ${id}, which is gone`;
};

function clusterWords(run, node) {
  const rows = [];
  const row = (name, ...value) => rows.push(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  row("clients", whole(node.num_clients));
  const path = pathTo(run, node.id).slice(0, -1);
  if (path.length) row("part of", nodeLink(run, path[path.length - 1]));
  if (node.born) row("born in", `round ${node.born}`);
  if (node.split_in_round !== null) {
    row("split in", `round ${node.split_in_round} into `,
      node.children.flatMap((id, i) => [i ? ", " : "", nodeLink(run, id)]));
  }
  if (Object.keys(node.groups).length) row("true groups", groupsText(node).replace(/^true groups? /, ""));
  for (const metric of run.metrics) {
    const last = given(node.last, metric.name);
    if (last === null) continue;
    const plain = given(node.plain, metric.name);
    row(metric.name, shown(last), plain === null ? "" : ` (plain FL ${shown(plain)})`);
  }
  const decisions = run.decisions.filter((decision) => decision.node === node.id);
  return [
    make("h3", {}, clusterName(node)),
    make("dl", { class: "facts" }, rows),
    make("h4", {}, "Examinations"),
    decisions.length
      ? examinations(run, decisions, false)
      : make("p", { class: "hint" }, "It has not been examined."),
  ];
}

function overallWords(run) {
  const isOfSplit = (decision) => decision.verdict === "split";
  const leaves = new Set(leavesOf(run).map((leaf) => leaf.id));
  const latest = new Map();
  for (const decision of run.decisions) if (leaves.has(decision.node)) latest.set(decision.node, decision);
  const splits = run.decisions.filter(isOfSplit);
  const others = [...latest.values()].filter((decision) => !isOfSplit(decision));
  const told = new Set([...splits, ...others]);
  const rest = run.decisions.filter((decision) => !told.has(decision));
  return [
    make("h3", {}, "Why"),
    splits.length
      ? [make("h4", {}, "Why each cluster was split"), examinations(run, splits, true)]
      : make("p", {}, "No cluster was split."),
    others.length
      ? [make("h4", {}, splits.length ? "Why the others were not" : "Why not"), examinations(run, others, true)]
      : [],
    rest.length
      ? make("details", { "data-key": "rest" },
          make("summary", {}, `${counted(rest.length, "earlier examination")} that did not split`),
          examinations(run, rest, true))
      : [],
  ].flat();
}

function examinations(run, decisions, isNamed) {
  const shownOnes = decisions.slice(-MOST_EXAMINATIONS);
  const left = decisions.length - shownOnes.length;
  return make("div", {},
    left ? make("p", { class: "hint" }, `The last ${MOST_EXAMINATIONS} of ${decisions.length}.`) : null,
    make("ol", { class: "examinations" }, shownOnes.map((d) => examination(run, d, isNamed))));
}

function examination(run, decision, isNamed) {
  const when = decision.first_round === decision.round
    ? `Round ${decision.round}` : `Rounds ${decision.first_round} to ${decision.round}`;
  const who = isNamed ? [", ", nodeLink(run, decision.node)] : [];
  const into = decision.children.length
    ? [" into ", decision.children.flatMap((id, i) => [i ? ", " : "", nodeLink(run, id)])].flat() : [];
  const moved = (decision.moves ?? []).map(([index, id]) => `${clientName(run, index)} to cluster ${id}`);
  return make("li", { class: `verdict-${decision.verdict}` },
    make("p", {}, make("span", { class: "when" }, when, who), " ",
      make("strong", {}, decision.title), into, `: ${decision.reason}`),
    moved.length ? make("p", {}, `Moved: ${listedShortly(moved)}.`) : null,
    decision.measured.length
      ? make("details", { "data-key": `${decision.node}@${decision.first_round}` },
          make("summary", {}, "What was measured"),
          make("ul", {}, decision.measured.map((text) => make("li", {}, text))))
      : null);
}
