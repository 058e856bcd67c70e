// Unpacks the data, switches between the parts, listens to the keyboard.
const app = { runs: [], keys: {}, redraw: null, part: "overview", filterMs: 0 };
const PARTS = [["overview", "Overview", showOverview], ["samples", "Samples", showSamples], ["batches", "Batches", showBatches], ["timeline", "Timeline", showTimeline], ["config", "Configuration", showConfig]];

async function unpack() {
  const packed = atob($("data").textContent), bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}
app.show = part => {
  app.part = part; app.keys = {}; app.redraw = null;
  const main = $("main");
  main.replaceChildren();
  PARTS.find(([name]) => name === part)[2](main);
  for (const button of $("tabs").children) button.setAttribute("aria-selected", String(button.dataset.part === part));
  history.replaceState(null, "", `#${part}`);
};
function setTheme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  document.documentElement.style.colorScheme = dark ? "dark" : "light";
  if (app.runs.length) app.show(app.part);
}
function describe() {
  const run = app.runs[0], about = run.about, facts = $("facts"), state = $("state");
  $("name").textContent = app.runs.map(one => one.name).join("  ·  ");
  state.textContent = run.status.state === "failed" ? `failed${run.status.cause ? `: ${run.status.cause}` : ""}` : run.status.state;
  state.classList.add(run.status.state);
  const parts = [[about.model], [about.adapter ? `adapter of rank ${about.adapter}` : "every weight trained"], [about.algorithm && `${about.algorithm}${about.group ? `, ${about.batch} prompts × ${about.group} samples a step` : ""}`], [duration(about.seconds)]];
  parts.filter(([text]) => text).forEach(([text], i) => facts.append(i ? " · " : "", i ? text : el("b", {}, text)));
}
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (event.key === "Escape" && typing) return event.target.blur();
  if (typing) return;
  const part = PARTS[+event.key - 1];
  if (part) app.show(part[0]);
  else if (event.key === "t") setTheme(!document.documentElement.classList.contains("dark"));
  else if (event.key === "?") $("keys").showModal();
  else if (app.keys[event.key]) app.keys[event.key]();
  else if (event.key === "/") { app.show("samples"); app.keys["/"]?.(); }
  else return;
  event.preventDefault();
});
setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", event => setTheme(event.matches));
$("tabs").append(...PARTS.map(([name, text]) => el("button", { role: "tab", "data-part": name, "aria-selected": "false", onclick: () => app.show(name) }, text)));
$("theme").addEventListener("click", () => setTheme(!document.documentElement.classList.contains("dark")));
$("help").addEventListener("click", () => $("keys").showModal());
unpack().then(runs => {
  app.runs = runs;
  describe();
  app.show(PARTS.some(([name]) => `#${name}` === location.hash) ? location.hash.slice(1) : "overview");
  document.documentElement.dataset.ready = "yes";
});
