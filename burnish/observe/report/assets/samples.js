// The table of samples: a list drawn only where it is seen, filters, search, and the chosen episode with its turns.
const ROW = 46;
const view = { step: "all", status: "all", sort: "order", query: "", mode: "advantage", chosen: 0, beside: false, found: [] };

function allEpisodes() {
  if (!app.episodes) {
    app.episodes = app.runs.flatMap((run, r) => run.episodes.map(episode => ({ ...episode, run, r })));
    for (const e of app.episodes) {
      const texts = e.messages.map(m => e.run.texts[m[1]]);
      e.asked = texts[e.messages.findLastIndex((m, i) => m[0] === "user" && e.messages.slice(0, i).every(n => n[0] !== "assistant"))] ?? "";
      e.answer = texts[e.messages.findLastIndex(m => m[0] === "assistant")] ?? "";
      e.haystack = `${e.prompt}\n${texts.join("\n")}\n${e.messages.map(m => m[3].join(" ")).join(" ")}`.toLowerCase();
    }
  }
  return app.episodes;
}
function filterEpisodes() {
  const began = performance.now();
  const words = view.query.toLowerCase().split(/\s+/).filter(Boolean);
  const tests = words.map(word => {
    const rule = word.match(/^(reward|tokens|turns|step)(<=|>=|<|>|=)(-?[\d.]+)$/);
    if (!rule) return e => e.haystack.includes(word);
    const of = { reward: e => e.reward, tokens: e => e.sampled, turns: e => e.stops.length, step: e => e.step }[rule[1]], x = +rule[3];
    const how = { "<": v => v < x, ">": v => v > x, "<=": v => v <= x, ">=": v => v >= x, "=": v => v === x }[rule[2]];
    return e => of(e) !== null && how(of(e));
  });
  const found = allEpisodes().filter(e => (view.step === "all" || e.step === +view.step) && (view.status === "all" || e.status === view.status) && tests.every(test => test(e)));
  const by = { "reward": e => -(e.reward ?? -Infinity), "worst": e => e.reward ?? Infinity, "long": e => -e.sampled }[view.sort];
  if (by) found.sort((a, b) => by(a) - by(b));
  view.found = found;
  app.filterMs = performance.now() - began;
}
function showSamples(main) {
  const steps = [...new Set(allEpisodes().map(e => e.step))], statuses = [...new Set(allEpisodes().map(e => e.status))];
  if (!steps.length) return main.append(el("p", { class: "empty" }, "This run kept no episodes (observe.transcripts is false, or it learned from rows)."));
  const pick = (key, label, options) => el("select", { "aria-label": label, onchange: event => { view[key] = event.target.value; refresh(); } },
    ...options.map(([value, text]) => el("option", { value, selected: String(view[key]) === String(value) }, text)));
  const search = el("input", { type: "search", id: "search", placeholder: "Search text, or reward>0.5, tokens<20, turns>2", value: view.query, "aria-label": "Search" });
  const count = el("span", { class: "count", role: "status" }), scale = el("span");
  const list = el("div", { class: "list", role: "listbox", tabindex: 0, "aria-label": "Samples" }, el("div", { class: "space" }));
  const shown = el("div", { class: "episodes" });
  const mode = el("select", { "aria-label": "Colour of the tokens", id: "mode", onchange: event => { view.mode = event.target.value; draw(); } }, ...COLOURINGS.map(([value, text]) => el("option", { value, selected: view.mode === value }, `colour: ${text}`)));
  const left = app.runs.reduce((sum, run) => sum + run.left_out, 0);
  main.append(el("div", { class: "bar-of-tools" }, search,
    pick("step", "Step", [["all", "all steps"], ...steps.map(s => [s, `step ${s}`])]),
    pick("status", "Status", [["all", "any end"], ...statuses.map(s => [s, s])]),
    pick("sort", "Order", [["order", "in order"], ["reward", "best first"], ["worst", "worst first"], ["long", "longest first"]]),
    mode, scale, el("button", { onclick: () => { view.beside = !view.beside; draw(); } }, "Compare (c)"), count),
    el("div", { class: "samples" }, list, shown));

  function rows() {
    const space = list.firstChild, first = Math.max(0, Math.floor(list.scrollTop / ROW) - 4), last = Math.min(view.found.length, first + Math.ceil(list.clientHeight / ROW) + 8);
    space.style.height = `${view.found.length * ROW}px`;
    space.replaceChildren(...view.found.slice(first, last).map((e, k) => rowOf(e, first + k)));
  }
  function rowOf(e, index) {
    const where = `${app.runs.length > 1 ? `${e.run.name} · ` : ""}step ${e.step} · ${e.prompt ?? ""} · sample ${e.sample} · ${e.sampled} tokens${e.status === "ok" ? "" : ` · ${e.status}`}`;
    return el("div", { class: "row", role: "option", "aria-selected": String(index === view.chosen), style: `top: ${index * ROW}px`, onclick: () => choose(index) },
      el("span", { class: "reward" }, fixed(e.reward, 2)), el("span", { class: "text" }, e.answer.trim() || "(nothing)"), el("span", { class: "meta" }, where));
  }
  function draw() {
    const e = view.found[view.chosen];
    scale.replaceChildren(...[scaleOf(view.mode)].filter(Boolean));
    mode.value = view.mode;
    if (!e) return shown.replaceChildren(el("p", { class: "empty" }, "Nothing matches."));
    const beside = view.beside ? others(e) : [];
    shown.replaceChildren(episodeOf(e), ...(view.beside ? [beside.length ? episodeOf(beside[0]) : el("p", { class: "empty" }, "This prompt was sampled once.")] : []));
  }
  function others(e) {
    const same = allEpisodes().filter(o => o.prompt === e.prompt && (o.r !== e.r || o.step !== e.step));
    if (!same.length) return allEpisodes().filter(o => o !== e && o.r === e.r && o.step === e.step && o.group === e.group).sort((a, b) => Math.abs(b.reward - e.reward) - Math.abs(a.reward - e.reward));
    return same.sort((a, b) => (b.r !== e.r) - (a.r !== e.r) || Math.abs(b.step - e.step) - Math.abs(a.step - e.step) || a.sample - b.sample);
  }
  function choose(index) {
    view.chosen = Math.max(0, Math.min(view.found.length - 1, index));
    const top = view.chosen * ROW;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
    rows(); draw();
  }
  function refresh() {
    filterEpisodes();
    view.chosen = 0; list.scrollTop = 0;
    count.textContent = `${number(view.found.length)} of ${number(allEpisodes().length)} episodes${left ? `, ${left} left out` : ""}`;
    rows(); draw();
    app.filterMs = performance.now() - refresh.began;
  }
  search.addEventListener("input", () => { view.query = search.value; refresh.began = performance.now(); refresh(); });
  list.addEventListener("scroll", rows);
  list.addEventListener("keydown", event => { const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key]; if (by) { event.preventDefault(); choose(view.chosen + by); } });
  app.keys = {
    "/": () => { search.focus(); search.select(); }, j: () => choose(view.chosen + 1), k: () => choose(view.chosen - 1), c: () => { view.beside = !view.beside; draw(); },
    m: () => { view.mode = COLOURINGS[(COLOURINGS.findIndex(([name]) => name === view.mode) + 1) % COLOURINGS.length][0]; draw(); },
    "]": () => step(1), "[": () => step(-1),
  };
  function step(by) {
    const now = view.step === "all" ? (by > 0 ? -1 : steps.length) : steps.indexOf(+view.step), next = steps[now + by];
    if (next === undefined) return;
    view.step = next;
    main.querySelector("select[aria-label=Step]").value = next;
    refresh();
  }
  app.redraw = () => { rows(); draw(); };
  refresh.began = performance.now();
  const kept = view.chosen;
  refresh();
  choose(kept);
  new ResizeObserver(rows).observe(list);
}
function episodeOf(e) {
  const box = el("article", { class: "episode" });
  const good = e.status === "ok" ? "" : "bad";
  box.append(el("h3", {}, `${e.prompt ?? "episode"}`, el("span", { class: `chip ${good}` }, e.status), el("span", { class: "chip" }, e.stops.at(-1) ?? "")),
    el("p", { class: "meta" }, `${app.runs.length > 1 ? `${e.run.name} · ` : ""}step ${e.step}, group ${e.group}, sample ${e.sample} · ${e.shown} + ${e.sampled} tokens · ${duration(e.seconds)}${e.environment > .001 ? `, ${duration(e.environment)} of it in the environment` : ""}`));
  const advantage = e.advantage ?? (e.tokens && e.tokens.length ? advantageOf(e.tokens[0], 0) : null);
  box.append(el("table", { class: "rewards" }, ...Object.entries(e.rewards).map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", {}, fixed(value, 3)))),
    el("tr", {}, el("td", {}, "reward"), el("td", {}, fixed(e.reward, 3))), advantage === null ? null : el("tr", {}, el("td", {}, "advantage"), el("td", {}, fixed(advantage, 3)))));
  if (e.error) box.append(el("p", { class: "meta" }, `error: ${e.error}`));
  let turn = 0;
  const turns = e.messages.filter(m => m[0] === "assistant").length;
  e.messages.forEach((message, index) => message[0] === "system" && !e.run.texts[message[1]] ? null : box.append(turnOf(e, message, index, message[0] === "assistant" ? turn++ : null, turns)));
  return box;
}
function turnOf(e, [role, text, name, calls], index, turn, turns) {
  const said = e.run.texts[text], sampled = turn !== null && e.tokens && e.tokens[turn] && e.tokens[turn].text.length;
  const body = sampled ? tokenText(e.run, e.tokens[turn], e, view.mode) : el("div", { class: "said" }, said || (calls.length ? calls.join("\n") : "(nothing)"));
  const who = name ? `${role} · ${name}` : turns > 1 && turn !== null ? `${role} · turn ${turn + 1} of ${turns}` : role;
  const folded = role === "tool" || role === "system" || said.length > 1500 || (turns > 3 && turn !== null && turn > 0 && turn < turns - 1);
  const box = el("details", { class: `turn${turn === null ? " given" : ""}`, open: !folded }, el("summary", {}, who, folded ? el("span", { class: "peek" }, said.replace(/\s+/g, " ").slice(0, 90)) : null), body);
  return box;
}
