// The first page: how it stands, what is wrong, where the time goes, the curves. And the configuration.
function figure(label, value, change = "", sense = "") {
  return el("div", { class: "figure" }, el("div", { class: "value" }, value), el("div", { class: "label" }, label), el("div", { class: `change ${sense}` }, change));
}
function figures(run) {
  const m = run.metrics, ends = name => { const v = (m[name] ?? []).filter(x => x !== null), n = Math.max(1, Math.min(3, v.length >> 1)); const mean = a => a.reduce((x, y) => x + y, 0) / a.length; return v.length ? [mean(v.slice(0, n)), mean(v.slice(-n))] : null; };
  const out = [], reward = ends("reward/mean"), loss = ends("policy/loss");
  if (reward) out.push(figure("reward", fixed(reward[1], 3), `from ${fixed(reward[0], 3)}`, reward[1] > reward[0] ? "up" : "down"));
  else if (loss) out.push(figure("loss", fixed(loss[1], 4), `from ${fixed(loss[0], 4)}`, loss[1] < loss[0] ? "up" : "down"));
  const evals = run.evaluations, last = evals.at(-1);
  if (last) for (const [name, value] of Object.entries(last.metrics).filter(([name]) => name.endsWith("/accuracy")).slice(0, 2)) {
    const before = evals[0].metrics[name], points = before === undefined ? 0 : 100 * (value - before);
    out.push(figure(`held out, ${shortName(name)}`, `${(100 * value).toFixed(1)} %`, evals.length > 1 ? `${points >= 0 ? "+" : "−"}${Math.abs(points).toFixed(1)} points` : "", points >= 0 ? "up" : "down"));
  }
  const steady = (m["perf/step_seconds"] ?? []).slice(1).filter(x => x !== null).sort((a, b) => a - b);
  out.push(figure("steps", `${m.step.length}`, run.about.max_steps ? `of ${run.about.max_steps}` : ""));
  if (steady.length) out.push(figure("a step, median", duration(steady[steady.length >> 1]), `${duration(run.about.seconds)} in all`));
  const speed = ends("perf/rollout_tokens_per_second") ?? ends("perf/row_tokens_per_second");
  if (speed) out.push(figure("tokens a second", number(speed[1])));
  const length = ends("length/sampled_mean");
  if (length) out.push(figure("tokens an episode", number(length[1]), `from ${number(length[0])}`));
  return el("div", { class: "figures" }, ...out);
}
function warningOf(severity, what, advice, evidence = {}) {
  return el("div", { class: `warning s${severity}` }, el("span", { class: "dot", "aria-hidden": "true" }), what ? el("p", { class: "what" }, what) : null, advice ? el("p", { class: "advice" }, advice) : null,
    Object.keys(evidence).length ? el("p", {}, el("code", {}, Object.entries(evidence).map(([k, v]) => `${k} = ${number(v)}`).join("   "))) : null);
}
const capital = text => text.charAt(0).toUpperCase() + text.slice(1);
function health(run) {
  const lines = run.health.map(w => warningOf(w.severity, `${capital(w.text)}.`, `${capital(w.advice)}.`, w.evidence));
  return el("div", { class: "warnings" }, ...(lines.length ? lines : [warningOf(0, run.metrics.step.length < 2 ? "Too few steps to say anything yet." : "Nothing looks wrong.")]));
}
const TONES = {
  wait: ["waits for samples", "hover"], "gate.wait": ["waits for new weights", "hover"], "queue.put": ["waits for room", "hover"], idle: ["idle", "hover"],
  prepare: ["prepare", "soft"], update: ["update", "second"], score: ["score", "warn"], sync: ["sync", "bad"], save: ["save", "soft"], evaluate: ["evaluate", "soft"], other: ["other", "faint"],
  rollout: ["rollout", "accent"], data: ["data", "soft"], batch: ["batch", "soft"], computes: ["computes", "accent"],
};
function timing(run) {
  const t = run.time, out = el("div");
  if (!t) return null;
  const bar = parts => el("div", { class: "bar" }, ...parts.filter(([, share]) => share > .004).map(([name, share]) => {
    const [word, tone] = TONES[name] ?? [name, "faint"], label = `${word} ${percent(share)}`;
    return el("span", { class: tone === "hover" ? "wait" : "", style: `flex: ${share}; background: ${colour(tone)}`, title: label }, share > .012 * label.length ? label : share > .012 * word.length ? word : "");
  }));
  const free = parts => { const used = parts.reduce((sum, [, share]) => sum + share, 0); return used < .995 ? [...parts, ["idle", 1 - used]] : parts; };
  const role = (name, parts) => [el("span", { class: "name" }, name), bar(free(parts))];
  const { wait, ...work } = t.trainer;
  out.append(el("div", { class: "roles" }, ...role("trainer", [["wait", wait], ...Object.entries(work)]), ...(t.samples ? [...role("rollout", Object.entries(t.rollout)), ...role("engine", [["computes", t.engine_busy]])] : [])));
  const path = el("p", { class: "path" }, "A step of median length: ");
  t.path.filter(([, s]) => s > .005 * t.step_s).forEach(([name, s], i) => path.append(i ? " → " : "", el("b", {}, name), ` ${number(s)} s`));
  out.append(path);
  if (t.hidden !== null && t.environment.seconds > .01 * t.seconds) out.append(el("p", { class: "path" }, `${percent(t.hidden)} of the time of environments and tools is hidden behind the engine or the trainer.`));
  const advice = el("div", { class: "warnings", style: "margin-top: 14px" }, ...t.findings.map(f => f.alarm ? warningOf(2, `${capital(f.text)}.`) : warningOf(1, null, `${capital(f.text)}.`)));
  out.append(advice);
  return out;
}
function showOverview(main) {
  for (const run of app.runs) {
    const many = app.runs.length > 1;
    if (many) main.append(el("h2", {}, run.name));
    main.append(figures(run), el("h2", {}, "Health", many ? el("small", {}, run.name) : ""), health(run));
    const time = timing(run);
    if (time) main.append(el("h2", {}, "Time", el("small", {}, `${run.time.steps} steps; the first one compiles and isn't counted`)), time);
  }
  main.append(el("h2", {}, "Curves", el("small", {}, "by step")), drawCharts(app.runs));
}
function showConfig(main) {
  const [run, other] = app.runs, path = lines => { const stack = []; return lines.map(([depth, key]) => { stack.length = depth; stack[depth] = key; return stack.join("."); }); };
  const theirs = other ? new Map(path(other.config).map((p, i) => [p, other.config[i][2]])) : null, mine = path(run.config);
  const own = el("input", { type: "checkbox", id: "own", onchange: () => draw() });
  const body = el("table", { class: "config" });
  main.append(el("div", { class: "bar-of-tools" }, el("label", {}, own, " only what isn't a default"), other ? el("span", { class: "count" }, `shaded: ${other.name} differs`) : ""), el("div", { class: "wide" }, body));
  function draw() {
    body.replaceChildren(...run.config.map(([depth, key, value, source], i) => {
      const differs = theirs && value !== "" && theirs.get(mine[i]) !== value;
      if (own.checked && value !== "" && source === "default" && !differs) return null;
      return el("tr", { class: differs ? "differs" : "" }, el("td", { style: `padding-left: ${depth * 18}px` }, key), el("td", { class: source && source !== "default" ? "set" : "" }, value), theirs ? el("td", {}, differs ? theirs.get(mine[i]) ?? "–" : "") : null, el("td", { class: "source" }, source));
    }).filter(Boolean));
  }
  app.keys = {};
  draw();
}
