// Sampled text, piece by piece, coloured by what is known of each piece.
const COLOURINGS = [["advantage", "advantage"], ["surprise", "log-prob when sampled"], ["apart", "trainer − sampler log-prob"], ["mask", "trained or not"], ["none", "no colour"]];
const NOTES = {
  advantage: ["below the group", "above"], surprise: ["expected", "surprising"], apart: ["less likely now", "more likely now"], mask: ["", "carries loss"], none: ["", ""],
};
function shade(mode, turn, i, episode) {
  if (mode === "mask") return episode.trained ? rgba("plus", .22) : "";
  if (mode === "surprise") { const p = Math.min(1, -turn.logps[i] / 4000); return p > .03 ? rgba("minus", (.55 * p).toFixed(3)) : ""; }
  const value = mode === "advantage" ? advantageOf(turn, i) : turn.apart ? turn.apart[i] / 1000 : null;
  if (value === null) return "";
  const strength = Math.min(1, Math.abs(value) / (mode === "advantage" ? 2 : .2));
  return strength > .02 ? rgba(value > 0 ? "plus" : "minus", (.08 + .42 * strength).toFixed(3)) : "";
}
function advantageOf(turn, i) {
  if (turn.advantages === undefined) return null;
  return (Array.isArray(turn.advantages) ? turn.advantages[i] : turn.advantages) / 1000;
}
function aboutToken(run, turn, i, episode) {
  const lines = [JSON.stringify(run.pieces[turn.text[i]]), `probability ${percent(Math.exp(turn.logps[i] / 1000))}, log-prob ${fixed(turn.logps[i] / 1000, 3)}`];
  const advantage = advantageOf(turn, i);
  lines.push(advantage === null ? "carries no loss" : `advantage ${fixed(advantage, 3)}`);
  if (turn.apart) lines.push(`trainer − sampler ${fixed(turn.apart[i] / 1000, 3)}`);
  return lines.join("\n");
}
function tokenText(run, turn, episode, mode) {
  const box = el("div", { class: "said" });
  turn.text.forEach((piece, i) => {
    const text = run.pieces[piece];
    if (text === "") return;
    const span = el("span", { class: "token" });
    const background = shade(mode, turn, i, episode);
    if (background) span.style.background = background;
    text.split(/(\n)/).forEach(part => { if (part === "\n") span.append(el("span", { class: "nl" }, "↵"), "\n"); else if (part) span.append(part); });
    span.dataset.i = i;
    box.append(span);
  });
  box.addEventListener("mousemove", event => { const token = event.target.closest(".token"); tip(token ? aboutToken(run, turn, +token.dataset.i, episode) : "", event.clientX, event.clientY); });
  box.addEventListener("mouseleave", () => tip(""));
  return box;
}
function scaleOf(mode) {
  const [low, high] = NOTES[mode];
  if (mode === "none") return null;
  const left = mode === "surprise" || mode === "mask" ? "transparent" : rgba("minus", .5), right = mode === "surprise" ? rgba("minus", .55) : rgba("plus", mode === "mask" ? .22 : .5);
  const strip = mode === "mask" ? right : `linear-gradient(90deg, ${left}, transparent, ${right})`;
  return el("span", { class: "scale" }, low, el("i", { style: `background: ${mode === "surprise" ? `linear-gradient(90deg, transparent, ${right})` : strip}` }), high);
}
