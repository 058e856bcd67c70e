// The batch table: the groups of a step, and what was learned from each.
function showBatches(main) {
  const run = app.runs[0], steps = [...new Set(run.episodes.map(e => e.step))];
  if (!steps.length) return main.append(el("p", { class: "empty" }, "This run kept no episodes."));
  if (!steps.includes(view.batch)) view.batch = steps.at(-1);
  const select = el("select", { "aria-label": "Step", onchange: () => { view.batch = +select.value; table(); } }, ...steps.map(s => el("option", { value: s, selected: s === view.batch }, `step ${s}`)));
  const note = el("span", { class: "count" }), body = el("div", { class: "wide" });
  main.append(el("div", { class: "bar-of-tools" }, select, note), body);
  function table() {
    const groups = new Map();
    for (const e of run.episodes) if (e.step === view.batch) { if (!groups.has(e.group)) groups.set(e.group, []); groups.get(e.group).push(e); }
    const rewards = run.episodes.filter(e => e.step === view.batch && e.reward !== null).map(e => e.reward), low = Math.min(...rewards), high = Math.max(...rewards);
    const head = ["prompt", "rewards", "mean", "spread", "advantages", "tokens", "turns", "end"];
    const dull = [...groups.values()].filter(g => spread(g) === 0).length;
    note.textContent = `${groups.size} groups, ${dull} without signal`;
    body.replaceChildren(el("table", { class: "batch" }, el("thead", {}, el("tr", {}, ...head.map((h, i) => el("th", { style: i < 2 ? "text-align: left" : "" }, h)))),
      el("tbody", {}, ...[...groups].sort((a, b) => a[0] - b[0]).map(([group, episodes]) => row(group, episodes, low, high)))));
  }
  const values = g => g.map(e => e.reward).filter(r => r !== null);
  const mean = v => v.length ? v.reduce((a, b) => a + b, 0) / v.length : null;
  const spread = g => { const v = values(g), m = mean(v); return v.length ? Math.sqrt(mean(v.map(x => (x - m) ** 2))) : null; };
  function row(group, episodes, low, high) {
    const first = episodes[0], asked = run.texts[(first.messages.findLast((m, i) => m[0] === "user" && first.messages.slice(0, i).every(n => n[0] !== "assistant")) ?? [0, -1])[1]] ?? "";
    const strip = el("span", { class: "strip", title: episodes.map(e => fixed(e.reward, 2)).join("  ") }, ...episodes.map(e => el("i", e.reward === null ? {} : { style: `background: ${rgba("plus", (.12 + .8 * (high > low ? (e.reward - low) / (high - low) : .5)).toFixed(2))}` })));
    const worth = episodes.flatMap(e => e.tokens ? e.tokens.flatMap(t => t.advantages ?? []) : e.advantage === undefined || e.advantage === null ? [] : [1000 * e.advantage]);
    const range = worth.length ? `${fixed(Math.min(...worth) / 1000, 2)} … ${fixed(Math.max(...worth) / 1000, 2)}` : "–";
    const ends = [...new Set(episodes.map(e => e.status))].join(", "), dull = spread(episodes) === 0;
    return el("tr", { onclick: () => { view.step = view.batch; view.query = first.prompt ?? ""; app.show("samples"); } },
      el("td", { class: "left" }, asked.trim().split("\n").at(-1) || first.prompt || String(group)), el("td", { class: "left" }, strip), el("td", {}, fixed(mean(values(episodes)), 3)),
      el("td", {}, dull ? el("span", { class: "chip" }, "no signal") : fixed(spread(episodes), 3)), el("td", {}, range),
      el("td", {}, number(mean(episodes.map(e => e.sampled)))), el("td", {}, number(mean(episodes.map(e => e.stops.length)))), el("td", {}, ends));
  }
  app.keys = { "]": () => move(1), "[": () => move(-1) };
  function move(by) { const next = steps[steps.indexOf(view.batch) + by]; if (next !== undefined) { view.batch = next; select.value = next; table(); } }
  table();
}
