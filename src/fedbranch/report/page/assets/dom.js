// Elements and words. Text from a run goes into the page by these functions only, as text nodes:
// clients choose their own ids, and one of them may be hostile.

const SVG = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") {
      // One by one: the page's policy forbids style attributes.
      for (const [property, setting] of Object.entries(value)) {
        element.style.setProperty(property, setting);
      }
    } else if (name.startsWith("on")) {
      element.addEventListener(name.slice(2), value);
    } else {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const make = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);

const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

/** Fill an element anew; what had the focus in it gives the focus to what takes its place. */
function refill(holder, ...children) {
  const keyOf = (element) => element.dataset.focus ?? element.dataset.node ?? element.tagName;
  const alike = (key) =>
    [...holder.querySelectorAll("button, summary, [tabindex]")].filter((e) => keyOf(e) === key);
  const focused = holder.contains(document.activeElement) ? document.activeElement : null;
  const key = focused && keyOf(focused);
  const position = focused && alike(key).indexOf(focused);
  holder.replaceChildren(...children);
  if (focused && focused !== holder) alike(key)[position]?.focus({ preventScroll: true });
}

/** A number as people read it: three decimals, or three digits where that says too little. */
function shown(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2).replace("-", "−");
  const text = size >= 1000 ? Math.round(value).toLocaleString("en") : value.toFixed(3);
  return text.replace("-", "−");
}

const signed = (value) =>
  value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + shown(value);

/** A value by a name that clients chose: "constructor" is no value unless it was given one. */
const given = (values, name) => (values && Object.hasOwn(values, name) ? values[name] : null);

const whole = (number) => Number(number).toLocaleString("en");

const counted = (number, one, many = one + "s") => `${whole(number)} ${number === 1 ? one : many}`;

/** "a", "a and b", "a, b and c". */
function listed(words) {
  if (words.length < 2) return words.join("");
  return `${words.slice(0, -1).join(", ")} and ${words[words.length - 1]}`;
}

/** The first few of many words, and how many more there are. */
function listedShortly(words, most = 6) {
  if (words.length <= most) return listed(words);
  return `${words.slice(0, most).join(", ")} and ${whole(words.length - most)} more`;
}

function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value / known.length, 0) : null;
}

/** A plain table; a cell is a text, or an element. The first column names the row. */
function tableOf(caption, headings, rows) {
  return make(
    "table",
    { class: "small" },
    make("caption", {}, caption),
    make("thead", {}, make("tr", {}, headings.map((text) => make("th", { scope: "col" }, text)))),
    make(
      "tbody",
      {},
      rows.map(([first, ...others]) =>
        make("tr", {}, make("th", { scope: "row" }, first), others.map((c) => make("td", {}, c))),
      ),
    ),
  );
}
