// The tree of clusters, from left to right: area for clients, colour for cluster.

const LARGEST = 24; // radius of the largest circle
const SMALLEST = 6;
const LABEL = 200; // width of the words beside the leaves

const clusterName = (node) =>
  node.parent === null && !isLeaf(node) ? "All clients" : `${isLeaf(node) ? "Cluster" : "Node"} ${node.id}`;

function groupsText(node) {
  const groups = Object.entries(node.groups);
  if (!groups.length) return "";
  const parts = groups.sort((a, b) => b[1] - a[1]).map(([group, count]) =>
    groups.length === 1 ? group : `${group} (${whole(count)})`);
  return `true group${groups.length > 1 ? "s" : ""} ${listedShortly(parts, 3)}`;
}

/** Where every node is: leaves below each other, parents in the middle of their children. */
function layoutOf(run) {
  const leaves = [];
  const depths = new Map();
  const walk = (node, depth) => {
    depths.set(node.id, depth);
    if (isLeaf(node)) leaves.push(node.id);
    else node.children.forEach((id) => walk(nodesOf(run).get(id), depth + 1));
  };
  walk(run.nodes.find((node) => node.parent === null), 0);
  const most = Math.max(1, ...run.nodes.map((node) => node.num_clients));
  const radius = (node) => Math.max(SMALLEST, LARGEST * Math.sqrt(node.num_clients / most));
  const largestLeaf = Math.max(...leaves.map((id) => radius(nodesOf(run).get(id))));
  const isDense = leaves.length > 12; // then a leaf's words are on one line
  const row = Math.max(isDense ? 25 : 52, 2 * largestLeaf + 8);
  const places = new Map();
  leaves.forEach((id, i) => places.set(id, { y: 40 + i * row }));
  const middle = (node) => {
    if (places.has(node.id)) return places.get(node.id).y;
    const ys = node.children.map((id) => middle(nodesOf(run).get(id)));
    const y = (Math.min(...ys) + Math.max(...ys)) / 2;
    places.set(node.id, { y });
    return y;
  };
  for (const node of run.nodes) if (depths.has(node.id)) middle(node);
  const deepest = Math.max(...depths.values());
  const room = (byId("tree").clientWidth - LABEL - 40) / Math.max(1, deepest);
  const column = Math.max(76, Math.min(260, room));
  for (const [id, place] of places) {
    place.x = 32 + depths.get(id) * column;
    place.r = radius(nodesOf(run).get(id));
  }
  return {
    places, column, isDense,
    width: 32 + deepest * column + LABEL,
    height: 84 + (leaves.length - 1) * row,
  };
}

function nodeWords(run, node, metric) {
  const parts = [clusterName(node), counted(node.num_clients, "client")];
  if (groupsText(node)) parts.push(groupsText(node));
  const last = metric && given(node.last, metric.name);
  if (last !== null && last !== undefined) parts.push(`mean ${metric.name} ${shown(last)}`);
  if (node.split_in_round !== null) {
    parts.push(`split in round ${node.split_in_round} into ${counted(node.children.length, "cluster")}`);
  }
  return parts.join(", ");
}

function drawTree() {
  const run = theRun();
  const metric = theMetric();
  const { places, column, isDense, width, height } = layoutOf(run);
  const looks = looksOf(run);
  const svg = draw("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, class: "tree",
    role: "group", "aria-label": "Tree of clusters",
  });
  for (const node of run.nodes) {
    const from = places.get(node.id);
    for (const id of node.children) {
      const to = places.get(id);
      const bend = from.x + column * 0.5;
      svg.append(draw("path", {
        d: `M${from.x} ${from.y}C${bend} ${from.y} ${bend} ${to.y} ${to.x} ${to.y}`,
        class: isInSight(run, id) ? "edge" : "edge faint",
        style: { stroke: looks.get(id).colour, "stroke-width": String(Math.max(1.5, to.r / 3)) },
      }));
    }
  }
  const focusable = state.node ?? run.nodes.find((node) => node.parent === null).id;
  for (const node of run.nodes) {
    const button = nodeButton(run, node, metric, places.get(node.id), isDense);
    button.setAttribute("tabindex", node.id === focusable ? "0" : "-1");
    svg.append(button);
  }
  refill(byId("tree"), svg);
  drawTreeWords(run, metric);
}

function leafLabels(node, value, { x, y, r }, isDense) {
  const name = `${clusterName(node)}${value}`;
  const clients = counted(node.num_clients, "client");
  if (isDense) {
    return draw("text", { x: x + r + 8, y: y + 4, class: "node-name" }, name,
      draw("tspan", { class: "tick", dx: 6 }, clients));
  }
  const groups = shortened(groupsText(node), 22);
  return [
    draw("text", { x: x + r + 8, y: y - 2, class: "node-name" }, name),
    draw("text", { x: x + r + 8, y: y + 13, class: "tick" }, groups ? `${clients}, ${groups}` : clients),
  ];
}

function innerLabels(node, { x, y, r }) {
  const size = node.parent === null
    ? counted(node.num_clients, "client") : `node ${node.id}: ${whole(node.num_clients)}`;
  return [
    draw("text", { x: Math.max(x, 34), y: y - r - 6, class: "tick", "text-anchor": "middle" }, size),
    draw("text", { x: Math.max(x, 34), y: y + r + 14, class: "tick", "text-anchor": "middle" },
      node.split_in_round === null ? "" : `round ${node.split_in_round}`),
  ];
}

function nodeButton(run, node, metric, place, isDense) {
  const { x, y, r } = place;
  const look = looksOf(run).get(node.id);
  const classes = ["node", isLeaf(node) ? "leaf" : "inner"];
  if (node.id === state.node) classes.push("selected");
  if (!isInSight(run, node.id)) classes.push("faint");
  const last = metric && given(node.last, metric.name);
  const value = last === null || last === undefined ? "" : ` · ${shown(last)}`;
  return draw(
    "g",
    {
      class: classes.join(" "), role: "button", "data-node": node.id,
      "aria-pressed": String(node.id === state.node),
      "aria-label": nodeWords(run, node, metric),
      onclick: () => select(node.id),
      onkeydown: (event) => treeKey(event, run, node),
    },
    draw("circle", { class: "ring", cx: x, cy: y, r: r + 4 }),
    draw("circle", {
      class: "disc", cx: x, cy: y, r,
      style: isLeaf(node) ? { fill: look.colour } : { stroke: look.colour },
    }),
    isLeaf(node) ? markerOf(look, x, y, r) : null,
    isLeaf(node) ? leafLabels(node, value, place, isDense) : innerLabels(node, place),
  );
}

const shortened = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);

function treeKey(event, run, node) {
  const places = layoutOf(run).places;
  const sameColumn = run.nodes
    .filter((other) => places.get(other.id).x === places.get(node.id).x)
    .sort((a, b) => places.get(a.id).y - places.get(b.id).y);
  const here = sameColumn.indexOf(node);
  const target = {
    ArrowLeft: node.parent,
    ArrowRight: node.children[0],
    ArrowUp: sameColumn[here - 1]?.id,
    ArrowDown: sameColumn[here + 1]?.id,
    Home: run.nodes.find((other) => other.parent === null).id,
  }[event.key];
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    select(node.id);
  } else if (event.key.startsWith("Arrow") || event.key === "Home") {
    event.preventDefault();
    const next = byId("tree").querySelector(`[data-node="${target}"]`);
    if (!next) return;
    for (const button of byId("tree").querySelectorAll("[data-node]")) button.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }
}

function drawTreeWords(run, metric) {
  const leaves = leavesOf(run);
  const words = leaves.slice(0, 8).map((leaf) => {
    const last = metric && given(leaf.last, metric.name);
    const value = last === null || last === undefined ? "" : `, ${metric.name} ${shown(last)}`;
    return `cluster ${leaf.id} (${counted(leaf.num_clients, "client")}${value})`;
  });
  const more = leaves.length > 8 ? `, and ${whole(leaves.length - 8)} more` : "";
  byId("tree-words").textContent =
    `${counted(leaves.length, "cluster")}: ${leaves.length > 8 ? words.join(", ") : listed(words)}${more}. ` +
    "The area of a circle is its number of clients; rings were split.";
}
