// Cosine similarities at a split, clients in the order of the dendrogram.

const STRIP = 10; // width of the coloured strip that says whose rows these are
const decoded = new WeakMap(); // similarity -> its numbers
let pairCursor = null; // {row, column} of the cell that is named
let matrixShown = null; // what is drawn: similarity, cosines and sizes, for the cursor

function cosinesOf(similarity) {
  if (!decoded.has(similarity)) {
    const bytes = atob(similarity.matrix);
    const cosines = new Int8Array(bytes.length);
    for (let i = 0; i < bytes.length; i++) cosines[i] = (bytes.charCodeAt(i) << 24) >> 24;
    decoded.set(similarity, cosines);
  }
  return decoded.get(similarity);
}

const splitKey = (similarity) => `${similarity.node}@${similarity.round}`;

function chosenSimilarity(run) {
  const chosen = run.similarities.find((s) => splitKey(s) === state.split);
  if (chosen) return chosen;
  const path = state.node === null ? [] : pathTo(run, state.node).reverse();
  for (const id of path) {
    const own = run.similarities.findLast((s) => s.node === id);
    if (own) return own;
  }
  return run.similarities[0];
}

/** The clients behind one cell's row: one, or several neighbours that were folded. */
function clientsOfCell(similarity, cell) {
  const start = (number) => Math.floor((number * similarity.num_clients) / similarity.size);
  return [start(cell), start(cell + 1) - 1];
}

function drawMatrix() {
  const run = theRun();
  byId("similarity").hidden = !run.similarities.length;
  if (!run.similarities.length) return;
  const similarity = chosenSimilarity(run);
  const chooser = byId("split");
  const names = run.similarities.map((s) => {
    const node = nodesOf(run).get(s.node);
    return `${node ? clusterName(node).toLowerCase() : `node ${s.node}`}, round ${s.round}`;
  });
  if ([...chooser.options].map((o) => o.textContent).join("\n") !== names.join("\n")) {
    chooser.replaceChildren(...run.similarities.map((s, i) => make("option", { value: splitKey(s) }, names[i])));
  }
  chooser.value = splitKey(similarity);
  if (matrixShown?.similarity !== similarity) pairCursor = null;
  matrixShown = { run, similarity, cosines: cosinesOf(similarity) };
  paintMatrix();
  drawScale();
  drawBlocks(run, similarity);
  sayPair();
}

function childOfCell(similarity, cell) {
  return similarity.children[clientsOfCell(similarity, cell)[0]];
}

function paintMatrix() {
  const { run, similarity, cosines } = matrixShown;
  const { size } = similarity;
  const canvas = byId("matrix");
  const theme = theTheme();
  const side = Math.max(200, Math.min(520, canvas.parentElement.clientWidth || 520));
  const ratio = Math.min(3, window.devicePixelRatio || 1);
  canvas.width = canvas.height = Math.round(side * ratio);
  canvas.style.width = canvas.style.height = `${side}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);

  const cells = new OffscreenCanvas(size, size);
  const image = cells.getContext("2d").createImageData(size, size);
  for (let i = 0; i < size * size; i++) {
    const [r, g, b] = colourOfCosine(cosines[i] / 127, theme);
    image.data.set([r, g, b, 255], 4 * i);
  }
  cells.getContext("2d").putImageData(image, 0, 0);
  const inner = side - STRIP - 2;
  const start = STRIP + 2;
  const cell = inner / size;
  Object.assign(matrixShown, { cell, start });
  context.imageSmoothingEnabled = size > inner * ratio;
  context.drawImage(cells, start, start, inner, inner);

  const style = getComputedStyle(document.documentElement);
  const real = (colour) => style.getPropertyValue(colour.slice(4, -1)).trim();
  context.strokeStyle = real("var(--ink)");
  context.lineWidth = 1;
  for (let i = 0; i < size; i++) {
    const child = childOfCell(similarity, i);
    context.fillStyle = real((looksOf(run).get(child) ?? NEUTRAL).colour);
    context.fillRect(start + i * cell, 0, cell + 0.5, STRIP);
    context.fillRect(0, start + i * cell, STRIP, cell + 0.5);
    if (i && child !== childOfCell(similarity, i - 1)) {
      const at = Math.round(start + i * cell) + 0.5;
      context.beginPath();
      context.moveTo(at, 0);
      context.lineTo(at, side);
      context.moveTo(0, at);
      context.lineTo(side, at);
      context.stroke();
    }
  }
  if (pairCursor) {
    context.lineWidth = 2;
    context.strokeRect(
      start + pairCursor.column * cell, start + pairCursor.row * cell, Math.max(cell, 3), Math.max(cell, 3));
  }
}

function drawScale() {
  const width = 240;
  const stops = [-1, -0.5, 0, 0.5, 1];
  const theme = theTheme();
  const gradient = draw("linearGradient", { id: "cosines" }, stops.map((c) =>
    draw("stop", { offset: (c + 1) / 2, "stop-color": `rgb(${colourOfCosine(c, theme)})` })));
  byId("matrix-legend").replaceChildren(
    draw("svg", { width, height: 30, viewBox: `0 0 ${width} 30`, role: "img", "aria-label":
        "Colours: orange for cosine −1, neutral for 0, blue for 1" },
      gradient,
      draw("rect", { x: 20, y: 2, width: width - 40, height: 10, fill: "url(#cosines)", class: "scale" }),
      [-1, 0, 1].map((c) => draw("text", {
        class: "tick", x: 20 + ((c + 1) / 2) * (width - 40), y: 26, "text-anchor": "middle",
      }, c === 0 ? "cosine 0" : c === 1 ? "1" : "−1"))));
}

/** The mean cosine inside and between the new clusters, in words and as a table. */
function drawBlocks(run, similarity) {
  const children = [...new Set(similarity.children)];
  const cosines = cosinesOf(similarity);
  const { size } = similarity;
  const position = new Map(children.map((child, i) => [child, i]));
  const sums = children.map(() => children.map(() => [0, 0]));
  const blocks = Array.from({ length: size }, (_, cell) => position.get(childOfCell(similarity, cell)));
  for (let row = 0; row < size; row++) {
    for (let column = 0; column < size; column++) {
      if (row === column) continue;
      const block = sums[blocks[row]][blocks[column]];
      block[0] += cosines[row * size + column] / 127;
      block[1] += 1;
    }
  }
  const means = sums.map((row) => row.map(([sum, count]) => (count ? sum / count : null)));
  const inside = mean(means.map((row, i) => row[i]));
  const across = mean(means.flatMap((row, i) => row.filter((_, j) => j !== i)));
  const node = nodesOf(run).get(similarity.node);
  const name = node ? clusterName(node) : `Node ${similarity.node}`;
  const folded = size < similarity.num_clients
    ? ` Neighbours are averaged: ${similarity.num_clients} clients in ${size} rows.` : "";
  const measured = similarity.gap === null || similarity.gap === undefined
    ? "" : ` The separation gap is ${shown(similarity.gap)}.`;
  const words =
    `${name} in round ${similarity.round}: ${counted(similarity.num_clients, "client")}. Updates inside ` +
    `a new cluster have a mean cosine of ${shown(inside)}, across clusters ${shown(across)}.` +
    `${measured}${folded}`;
  byId("matrix-words").textContent =
    `${words} Move over the figure, or use the arrow keys in it, to name a pair.`;
  byId("matrix").setAttribute("aria-label",
    `Similarity matrix. ${words} Arrow keys move a cursor that names the pair.`);
  byId("matrix-table").replaceChildren(
    children.length <= 12
      ? tableOf("Mean cosine between the new clusters",
          ["", ...children.map((child) => `cluster ${child}`)],
          means.map((row, i) => [`cluster ${children[i]}`, ...row.map(shown)]))
      : "");
}

function cellName({ run, similarity }, cell) {
  const [first, last] = clientsOfCell(similarity, cell);
  const name = (position) => clientName(run, similarity.order[position]);
  const who = first === last ? name(first) : `${name(first)} … ${name(last)}`;
  return `${who} (cluster ${similarity.children[first]})`;
}

function sayPair() {
  if (!pairCursor) {
    byId("pair").textContent = "";
    return;
  }
  const { row, column } = pairCursor;
  const cosine = matrixShown.cosines[row * matrixShown.similarity.size + column] / 127;
  byId("pair").textContent = row === column
    ? `${cellName(matrixShown, row)} with itself`
    : `${cellName(matrixShown, row)} and ${cellName(matrixShown, column)}: cosine ${cosine.toFixed(2).replace("-", "−")}`;
}

function movePair(row, column) {
  const { size } = matrixShown.similarity;
  const within = (value) => Math.max(0, Math.min(size - 1, value));
  pairCursor = { row: within(row), column: within(column) };
  paintMatrix();
  sayPair();
}

function startMatrix() {
  const canvas = byId("matrix");
  const follow = (event) => {
    const box = canvas.getBoundingClientRect();
    const { start, cell } = matrixShown;
    const column = Math.floor((event.clientX - box.left - start) / cell);
    const row = Math.floor((event.clientY - box.top - start) / cell);
    if (pairCursor?.row !== row || pairCursor?.column !== column) movePair(row, column);
  };
  canvas.addEventListener("pointermove", follow);
  canvas.addEventListener("pointerdown", follow); // a finger does not hover
  canvas.addEventListener("pointerleave", () => {
    pairCursor = null;
    paintMatrix();
    sayPair();
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    if (pairCursor) movePair(pairCursor.row + step[0], pairCursor.column + step[1]);
    else movePair(0, 1);
  });
  byId("split").addEventListener("change", (event) => change({ split: event.target.value }));
}
