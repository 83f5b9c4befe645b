// The clusters against the true groups, where those are known.

function drawTruth() {
  const { truth } = theRun();
  byId("truth").hidden = !truth;
  if (!truth) return;
  const verdict = truth.ari === 1
    ? "The clusters are exactly the true groups"
    : truth.ari > 0.9 ? "The clusters are nearly the true groups"
    : truth.ari > 0.5 ? "The clusters agree with the true groups in part"
    : "The clusters are not the true groups";
  byId("truth-words").textContent =
    `${verdict}: adjusted Rand index ${shown(truth.ari)} (1: the same, 0: no better than chance).`;
  byId("truth-table").hidden = !truth.counts.length; // folded away: too many
  const most = Math.max(1, ...truth.counts.flat());
  byId("truth-table").replaceChildren(tableOf(
    "Clients of each true group in each cluster",
    ["true group", ...truth.leaves.map((leaf) => `cluster ${leaf}`)],
    truth.groups.map((group, i) => [
      group,
      ...truth.counts[i].map((count) => make("span", {
        class: count ? "count" : "count none", style: { "--share": String(count / most) },
      }, count ? whole(count) : "·")),
    ]),
  ));
}

function drawNews() {
  const { news } = theRun();
  byId("news").hidden = !news.length;
  byId("news-list").replaceChildren(...[...news].reverse().map(([round, text]) =>
    make("li", {}, make("span", { class: "when" }, `Round ${round}`), ` ${text}`)));
}
