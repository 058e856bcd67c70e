// Numbers, elements and colours. Nothing of a run is ever set as HTML.
const $ = id => document.getElementById(id);
function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key === "class") node.className = value;
    else if (key === "style") node.style.cssText = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}
function number(x, digits = 3) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  const size = Math.abs(x);
  if (x !== 0 && (size < 1e-3 || size >= 1e7)) {
    const [digit, power] = x.toExponential(1).split("e");
    return `${digit.replace("-", "−")}·10${[...power.replace("+", "")].map(c => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻").join("")}`;
  }
  if (size >= 1000) return Math.round(x).toLocaleString("en").replace(/,/g, "\u202f");
  return String(+x.toPrecision(digits)).replace("-", "−");
}
const fixed = (x, places) => x === null || x === undefined ? "–" : x.toFixed(places).replace("-", "−");
const percent = x => `${Math.round(100 * x)} %`;
function duration(seconds) {
  if (seconds < 90) return `${number(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const rgba = (name, alpha) => `rgba(${colour(name)}, ${alpha})`;
function debounce(work, ms) {
  let timer;
  return (...args) => { clearTimeout(timer); timer = setTimeout(() => work(...args), ms); };
}
function tip(text, x, y) {
  const box = $("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
  box.style.top = `${y + 18 + height > innerHeight ? y - height - 10 : y + 18}px`;
}
