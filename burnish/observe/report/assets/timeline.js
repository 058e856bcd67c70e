// The pipeline timeline of a step, on a canvas: a lane a row, spans nested, the mouse says what is what.
const KINDS = { wait: "wait", "gate.wait": "wait", "queue.put": "wait", queued: "wait", step: "frame", episode: "frame", rollout: "frame", request: "engine", model: "engine", prefill: "engine", decode: "engine", "engine.prefill": "engine", "engine.decode": "engine", update: "train", "update.wait": "train", score: "train", sync: "sync", "sync.push": "sync", save: "sync", tool: "world", reward: "judge", data: "data", batch: "data" };
function kindColour(name) {
  const kind = name.startsWith("env.") ? "world" : KINDS[name] ?? "other";
  return { wait: colour("hover"), frame: colour("line"), engine: colour("accent"), train: colour("second"), sync: colour("bad"), world: colour("good"), judge: colour("warn"), data: colour("soft"), other: colour("faint") }[kind];
}
function showTimeline(main) {
  const run = app.runs[0], timeline = run.timeline, steps = timeline ? Object.keys(timeline.steps) : [];
  if (!steps.length) return main.append(el("p", { class: "empty" }, "This run has no trace (observe.trace_mib is 0), or no step has ended."));
  if (!steps.includes(view.drawn)) view.drawn = steps.at(-1);
  const select = el("select", { "aria-label": "Step", onchange: () => { view.drawn = select.value; zoom = null; draw(); } }, ...steps.map(s => el("option", { value: s, selected: s === view.drawn }, `step ${s}`)));
  const canvas = el("canvas", { id: "timeline", "aria-label": "Timeline of a step" });
  const keys = el("div", { class: "legend" }, ...[["engine", "decode"], ["trainer", "update"], ["environment", "env.step"], ["rewards", "reward"], ["sync, save", "sync"], ["waiting", "wait"]].map(([text, name]) => el("span", {}, el("i", { style: `background: ${kindColour(name)}; height: 9px` }), text)));
  main.append(el("div", { class: "bar-of-tools" }, select, el("button", { onclick: () => { zoom = null; draw(); } }, "Whole step"), keys, el("span", { class: "count" }, "drag to zoom; all of it: trace.pftrace in ui.perfetto.dev")), el("div", { class: "wide" }, canvas));
  const HEIGHT = 15, GAP = 3, LEFT = 132;
  let zoom = null, boxes = [], dragged = null;
  function draw() {
    const spans = timeline.steps[view.drawn], width = canvas.parentElement.clientWidth, ratio = devicePixelRatio || 1;
    const rows = new Map(), depths = new Map(), least = new Map();
    for (const [lane, , , , depth] of spans) { least.set(lane, Math.min(least.get(lane) ?? 99, depth)); depths.set(lane, Math.max(depths.get(lane) ?? 0, depth)); }
    let y = 26, group = "";
    for (const [lane] of spans) {
      if (rows.has(lane)) continue;
      const [heading] = timeline.lanes[lane].split("\t");
      if (heading !== group) { group = heading; y += 22; }
      rows.set(lane, y);
      y += (depths.get(lane) - least.get(lane) + 1) * HEIGHT + GAP;
    }
    canvas.width = width * ratio; canvas.height = (y + 10) * ratio; canvas.style.height = `${y + 10}px`;
    const pen = canvas.getContext("2d"), end = Math.max(...spans.map(s => s[3])), [from, to] = zoom ?? [0, end], scale = (width - LEFT - 8) / (to - from || 1);
    pen.scale(ratio, ratio); pen.font = `11px ${colour("sans")}`; pen.textBaseline = "middle";
    const unit = nice((to - from) / 8);
    for (let t = Math.ceil(from / unit) * unit; t <= to; t += unit) { const x = LEFT + (t - from) * scale; pen.fillStyle = colour("line"); pen.fillRect(x, 18, 1, y); pen.fillStyle = colour("faint"); pen.fillText(t >= 1e6 || end >= 2e6 ? `${+(t / 1e6).toFixed(3)} s` : `${+(t / 1e3).toFixed(2)} ms`, x + 3, 10); }
    group = "";
    for (const [lane, top] of rows) {
      const [heading, name] = timeline.lanes[lane].split("\t");
      if (heading !== group) { group = heading; pen.fillStyle = colour("soft"); pen.font = `600 11px ${colour("sans")}`; pen.fillText(heading, 0, top - 10); pen.font = `11px ${colour("sans")}`; }
      pen.fillStyle = colour("faint"); pen.fillText(name.slice(0, 20), 0, top + HEIGHT / 2);
    }
    boxes = [];
    for (const span of spans) {
      const [lane, name, start, stop, depth] = span;
      if (stop < from || start > to) continue;
      const x = LEFT + Math.max(0, (start - from) * scale), w = Math.max(.7, Math.min(width - 8, LEFT + (stop - from) * scale) - x), top = rows.get(lane) + (depth - least.get(lane)) * HEIGHT;
      pen.fillStyle = kindColour(timeline.names[name]); pen.fillRect(x, top, w, HEIGHT - 1.5);
      boxes.push([x, top, w, span]);
      if (w > 34) { const quiet = ["frame", "wait"].includes(KINDS[timeline.names[name]]); pen.fillStyle = quiet ? colour("soft") : colour("paper"); pen.save(); pen.beginPath(); pen.rect(x, top, w - 3, HEIGHT); pen.clip(); pen.fillText(timeline.names[name], x + 4, top + HEIGHT / 2 - .5); pen.restore(); }
    }
    canvas._view = { from, to, scale };
  }
  const nice = raw => { const base = 10 ** Math.floor(Math.log10(raw)); return base * ([1, 2, 5, 10].find(m => m * base >= raw)); };
  const at = event => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  canvas.addEventListener("mousemove", event => {
    const [x, y] = at(event);
    if (dragged !== null) return;
    const hit = boxes.findLast(([left, top, w]) => x >= left - 1 && x <= left + w + 1 && y >= top && y < top + HEIGHT);
    if (!hit) return tip("");
    const [, name, start, stop, , ids] = hit[3], ms = (stop - start) / 1000;
    tip(`${timeline.names[name]} · ${ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms.toFixed(2)} ms`}\n${Object.entries(ids).map(([k, v]) => `${k} ${typeof v === "number" ? number(v) : v}`).join("\n")}`.trim(), event.clientX, event.clientY);
  });
  canvas.addEventListener("mouseleave", () => tip(""));
  canvas.addEventListener("mousedown", event => { dragged = at(event)[0]; });
  addEventListener("mouseup", event => {
    if (dragged === null) return;
    const x = at(event)[0], { from, scale } = canvas._view, [a, b] = [Math.min(x, dragged), Math.max(x, dragged)].map(p => from + (p - LEFT) / scale);
    dragged = null;
    if ((b - a) * scale > 6) { zoom = [Math.max(0, a), b]; draw(); }
  });
  app.keys = { "]": () => move(1), "[": () => move(-1) };
  function move(by) { const next = steps[steps.indexOf(view.drawn) + by]; if (next) { view.drawn = next; select.value = next; zoom = null; draw(); } }
  app.redraw = draw;
  draw();
  new ResizeObserver(draw).observe(canvas.parentElement);
}
