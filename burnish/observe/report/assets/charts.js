// Curves: one small chart a question, all with the steps as their x, the second run as a second colour.
const CURVES = [
  ["Reward", "", ["reward/mean"]],
  ["Held-out accuracy", "", ["eval/*/accuracy"]],
  ["Loss", "", ["policy/loss"]],
  ["Groups without signal", "share", ["group/zero_std_fraction"]],
  ["Entropy", "nats", ["policy/entropy"]],
  ["KL to the reference", "nats", ["policy/kl"]],
  ["Sampled tokens an episode", "", ["length/sampled_mean", "length/sampled_max"]],
  ["Turns an episode", "", ["episode/turns"]],
  ["Sampler against trainer, mean", "nats", ["mismatch/mean"]],
  ["Effective sample", "share", ["mismatch/ess"]],
  ["Staleness", "versions", ["staleness/mean", "staleness/max"]],
  ["Clipped tokens", "share", ["policy/clip_low_fraction", "policy/clip_high_fraction"]],
  ["Gradient norm", "", ["optim/grad_norm"]],
  ["Learning rate", "", ["optim/learning_rate"]],
  ["Sampled tokens a second", "", ["perf/rollout_tokens_per_second"]],
  ["Rows' tokens a second", "", ["perf/row_tokens_per_second"]],
  ["Time of a step", "s", ["perf/step_seconds", "time/rollout_seconds", "time/update_seconds"]],
  ["Model flops used", "share", ["perf/mfu"]],
  ["Memory", "MiB", ["memory/host_peak_mib", "memory/device_peak_mib"]],
];
const STROKES = [["accent", []], ["second", []], ["good", [4, 3]]];
let plots = [];

function seriesOf(run, name) {
  const parts = name.startsWith("eval/") ? name.split("*") : null;
  if (!parts) return run.metrics[name] ? [[name, run.metrics.step, run.metrics[name]]] : [];
  const found = new Map();
  for (const one of run.evaluations) for (const [key, value] of Object.entries(one.metrics)) {
    if (!(key.startsWith(parts[0]) && key.endsWith(parts[1]))) continue;
    if (!found.has(key)) found.set(key, [key, [], []]);
    found.get(key)[1].push(one.step); found.get(key)[2].push(value);
  }
  return [...found.values()].filter(([, steps]) => steps.length > 1);
}
function rewardParts(run) {
  const names = Object.keys(run.metrics).filter(name => /^reward\/.+\/mean$/.test(name));
  return names.length > 1 ? [["Reward by function", "", names.slice(0, 3)]] : [];
}
function shortName(name) {
  return name.replace(/^(eval|reward|length|staleness|policy|time|perf|memory|mismatch|optim)\//, "").replace(/\/(accuracy|mean)$/, "").replace(/_seconds$/, "").replace(/_/g, " ");
}
function drawCharts(runs) {
  plots.forEach(plot => plot.destroy());
  plots = [];
  const grid = el("div", { class: "charts" });
  const curves = [CURVES[0], ...rewardParts(runs[0]), ...CURVES.slice(1)];
  for (const [title, unit, names] of curves) {
    const lines = runs.flatMap((run, r) => names.flatMap(name => seriesOf(run, name)).map(([name, x, y]) => ({ run, r, name, x, y })));
    if (!lines.some(line => line.y.some(v => v !== null)) || !lines.length) continue;
    if (names[0] === "policy/loss" && runs[0].metrics["reward/mean"]) continue;
    grid.append(chart(title, unit, lines, runs.length > 1));
  }
  return grid;
}
function chart(title, unit, lines, many) {
  const steps = [...new Set(lines.flatMap(line => line.x))].sort((a, b) => a - b);
  const data = [steps, ...lines.map(line => { const at = new Map(line.x.map((x, i) => [x, line.y[i]])); return steps.map(x => at.get(x) ?? null); })];
  const look = i => many ? [STROKES[lines[i].r % 2][0], lines.findIndex(l => l.r === lines[i].r) === i ? [] : [4, 3]] : STROKES[i % 3];
  const known = lines[0].y.filter(y => y !== null);
  const now = el("span", { class: "now" }, number(known.at(-1)));
  const label = (line) => many ? (lines.length > 2 ? `${line.run.name} ${shortName(line.name)}` : line.run.name) : shortName(line.name);
  const legend = el("div", { class: "legend" }, ...(lines.length > 1 ? lines.map((line, i) => el("span", {}, el("i", { style: `background: ${colour(look(i)[0])}` }), label(line))) : []));
  const body = el("div");
  const box = el("section", { class: "chart" }, el("h3", {}, title, el("span", { class: "unit" }, unit), now), legend, body);
  const grid = { stroke: colour("line"), width: 1 }, ticks = { show: false };
  const axis = { stroke: colour("faint"), font: `11px ${colour("sans")}`, grid, ticks };
  const options = {
    width: 340, height: 140, padding: [10, 8, 0, 0], cursor: { sync: { key: "steps" }, points: { size: 6 }, drag: { x: true, y: false } }, legend: { show: false },
    scales: { x: { time: false, range: (u, low, high) => low === high ? [low - 1, high + 1] : [low, high] } },
    axes: [{ ...axis, grid: { show: false }, size: 24, values: (u, xs) => xs.map(x => Number.isInteger(x) ? x : "") }, { ...axis, size: 46, values: (u, ys) => ys.map(y => number(y)) }],
    series: [{}, ...lines.map((line, i) => ({ stroke: colour(look(i)[0]), dash: look(i)[1], width: 1.6, points: { show: steps.length < 2 || steps.length <= 12, size: 5, fill: colour("paper") }, spanGaps: true }))],
    hooks: { setCursor: [u => { const i = u.cursor.idx; const at = i === null || i === undefined ? null : data[1][i]; now.textContent = i == null ? number(known.at(-1)) : `${number(at)} at ${steps[i]}`; }] },
  };
  const plot = new uPlot(options, data, body);
  plots.push(plot);
  new ResizeObserver(([entry]) => { const width = Math.floor(entry.contentRect.width); if (width > 40 && width !== plot.width) plot.setSize({ width, height: 140 }); }).observe(body);
  return box;
}
