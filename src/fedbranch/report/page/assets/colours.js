// A look for each cluster: six of Okabe and Ito's colours, which colour-blind people tell apart
// (their yellow is lost on white), then the same with other dashes and markers.

const NUM_COLOURS = 6;
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "12 4", "5 2 1 2 1 2"];
const NEUTRAL = { colour: "var(--neutral)", dash: "", marker: 0 };

/** Node id -> look. A first child goes on with its parent's, so that looks stay while it grows. */
function looksOf(run) {
  if (run.looks) return run.looks;
  const looks = new Map();
  let next = 0;
  const fresh = () => {
    const number = next++;
    const variation = Math.floor(number / NUM_COLOURS) % DASHES.length;
    return {
      colour: `var(--cluster-${number % NUM_COLOURS})`,
      dash: DASHES[variation],
      marker: variation,
    };
  };
  for (const node of [...run.nodes].sort((a, b) => a.id - b.id)) {
    const parent = nodesOf(run).get(node.parent);
    if (!parent) {
      looks.set(node.id, run.nodes.length === 1 ? fresh() : NEUTRAL);
    } else if (parent.parent !== null && parent.children[0] === node.id) {
      looks.set(node.id, looks.get(parent.id));
    } else {
      looks.set(node.id, fresh());
    }
  }
  Object.defineProperty(run, "looks", { value: looks });
  return looks;
}

/** The marker inside a node's circle, so that colour is not all that tells clusters apart. */
function markerOf(look, x, y, size) {
  const s = size * 0.45;
  const shapes = [
    null,
    `M${x - s} ${y}H${x + s}`,
    `M${x} ${y - s}V${y + s}M${x - s} ${y}H${x + s}`,
    `M${x - s} ${y - s}L${x + s} ${y + s}M${x - s} ${y + s}L${x + s} ${y - s}`,
    `M${x} ${y - s}V${y + s}`,
    `M${x - s} ${y + s}L${x + s} ${y - s}`,
  ];
  const path = shapes[look.marker];
  return path ? draw("path", { d: path, class: "marker" }) : null;
}

/** A short piece of a cluster's line, for legends and tables. */
function swatch(look, isDotted = false) {
  return draw(
    "svg",
    { class: "swatch", viewBox: "0 0 26 10", width: 26, height: 10, "aria-hidden": "true" },
    draw("line", {
      x1: 1, y1: 5, x2: 25, y2: 5,
      "stroke-dasharray": isDotted ? "1 4" : look.dash,
      style: { stroke: look.colour, "stroke-width": "3" },
    }),
  );
}

// Cosines, from −1 by 0 to 1: orange to blue, which nobody confuses.

const COSINES = {
  light: [[166, 76, 4], [245, 177, 105], [247, 247, 245], [120, 176, 214], [10, 74, 138]],
  dark: [[250, 160, 70], [150, 86, 30], [38, 41, 46], [44, 104, 156], [120, 196, 255]],
};

function colourOfCosine(cosine, theme) {
  const stops = COSINES[theme];
  const place = (Math.max(-1, Math.min(1, cosine)) + 1) * 2;
  const low = Math.min(3, Math.floor(place));
  return stops[low].map((c, i) => Math.round(c + (stops[low + 1][i] - c) * (place - low)));
}
