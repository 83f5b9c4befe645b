// The run in one sentence, and the small facts about it.

/** "20 clients split into 4 clusters in round 15; ...": what a reader should take away. */
function summaryOf(run) {
  const leaves = leavesOf(run);
  const root = run.nodes.find((node) => node.parent === null);
  const all = run.clients.ids.length;
  const present = run.rounds_done ? root.num_clients : all; // others have left, or not come yet
  const clients = counted(present, "client") + (present < all ? ` (of ${whole(all)})` : "");
  const splits = [...new Set(run.nodes.map((n) => n.split_in_round).filter((r) => r !== null))];
  splits.sort((a, b) => a - b);
  const parts = [];
  if (leaves.length < 2) {
    parts.push(`${clients} in one cluster, not split`);
  } else if (splits.length === 0) {
    parts.push(`${clients} in ${counted(leaves.length, "cluster")}`);
  } else {
    const rounds = splits.length > 4
      ? `between rounds ${splits[0]} and ${splits[splits.length - 1]}`
      : `in round${splits.length > 1 ? "s" : ""} ${listed(splits.map(String))}`;
    parts.push(`${clients} split into ${counted(leaves.length, "cluster")} ${rounds}`);
  }
  const metric = run.metrics[0];
  // Of those who are there now, as in the tree: some may have left.
  const last = metric ? given(root.last, metric.name) : null;
  if (last !== null) {
    const plain = given(root.plain, metric.name);
    const beside = plain === null ? "" : ` against ${shown(plain)} under plain FL`;
    parts.push(`mean ${metric.name} ${shown(last)}${beside}`);
  }
  if (run.truth) {
    parts.push(run.truth.ari === 1
      ? "the clusters are exactly the true groups"
      : `the clusters agree with the true groups to an adjusted Rand index of ${shown(run.truth.ari)}`);
  }
  const numRefusing = run.clients.refused.filter((count) => count > 0).length;
  if (numRefusing) parts.push(`replies of ${counted(numRefusing, "client")} were refused`);
  return parts.join("; ") + ".";
}

function progressOf(run) {
  if (run.is_complete) return `ended after ${counted(run.rounds_done, "round")}`;
  const of = run.rounds_planned === null ? "" : ` of ${whole(run.rounds_planned)}`;
  return `round ${whole(run.rounds_done)}${of}`;
}

function drawHeader() {
  const { runs } = state.facts;
  const run = theRun();
  const chooser = byId("run");
  chooser.closest("label").hidden = runs.length < 2;
  const names = runs.map((r) => `${r.name} (${r.title}${r.seed === null ? "" : `, seed ${r.seed}`})`);
  if ([...chooser.options].map((o) => o.textContent).join("\n") !== names.join("\n")) {
    chooser.replaceChildren(...names.map((name, i) => make("option", { value: i }, name)));
  }
  chooser.value = String(state.run);

  byId("name").replaceChildren(run.name, make("span", { class: "method" }, run.title));
  byId("summary").textContent = summaryOf(run);
  const notice = byId("notice");
  notice.hidden = run.is_complete || !run.how_to_go_on || isLive;
  notice.textContent = `Not complete: ${progressOf(run)}; ${run.how_to_go_on ?? ""}`;
  const about = [["rounds", `${whole(run.rounds_done)} of ${whole(run.rounds_planned ?? run.rounds_done)}`]];
  if (run.seed !== null && run.seed !== undefined) about.push(["seed", String(run.seed)]);
  if (run.rule) about.push(["rule", run.rule]);
  const told = new Set(run.about.map(([name]) => name));
  about.push(...run.about);
  byId("about").replaceChildren(
    ...about
      .filter(([name], i) => i >= about.length - run.about.length || !told.has(name))
      .map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
  );
  drawSelection(run);
}

function drawSelection(run) {
  const node = nodesOf(run).get(state.node);
  byId("show-all").hidden = !node;
  byId("selection").textContent = node
    ? `${clusterName(node)}, ${counted(node.num_clients, "client")}`
    : "";
}
