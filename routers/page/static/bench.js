// Bench: start a run against this gateway, follow it, draw what comes, and list earlier runs.

import { follow, get, hasKey, post, request } from "./api.js";
import { benchSnippets } from "./code.js";
import { $, element, milliseconds, notify, showCode } from "./ui.js";

let following = null;
let levels = new Map(); // load -> {load, p50_ms, p95_ms, rtfx, done, total}

export function setUpBench() {
  $("bench-form").addEventListener("submit", (event) => { event.preventDefault(); start(); });
  $("bench-cancel").addEventListener("click", () => remove(following.id));
  for (const id of ["bench-workload", "bench-levels", "bench-n", "bench-slo"]) $(id).addEventListener("change", tellCode);
}

export function tellCode() {
  showCode($("bench-code"), benchSnippets(wanted()));
}

function wanted() {
  const order = { workload: $("bench-workload").value, n: Number($("bench-n").value) || 20 };
  const numbers = $("bench-levels").value.split(/[\s,;]+/).filter(Boolean).map(Number);
  if (numbers.length) order.levels = numbers;
  if ($("bench-slo").value.trim()) order.slo = $("bench-slo").value.trim();
  return order;
}

export async function showBench() {
  tellCode();
  try {
    const { data } = await get("bench");
    list(data);
    const current = data.find((run) => run.status === "running");
    if (current && !following) watch(current);
  } catch (error) {
    notify(error.message);
  }
}

async function start() {
  notify("");
  try {
    watch(await post("bench", wanted()));
  } catch (error) {
    notify(error.message);
  }
}

async function watch(run) {
  following = { id: run.id, leave: new AbortController() };
  levels = new Map();
  draw();
  $("bench-answer").hidden = true;
  $("bench-start").disabled = true;
  $("bench-cancel").hidden = $("bench-progress-row").hidden = false;
  $("bench-phase").textContent = "Starting";
  $("bench-progress").removeAttribute("value");
  try {
    await follow(run.events_url.slice(1), hear, following.leave.signal);
  } catch (error) {
    if (error.name !== "AbortError") notify(error.message);
  }
  following = null;
  $("bench-start").disabled = false;
  $("bench-cancel").hidden = $("bench-progress-row").hidden = true;
  showBench();
}

function hear(event) {
  if (event.type === "bench.progress") {
    const found = { ...levels.get(event.load), ...event };
    if (event.phase !== "warm-up") levels.set(event.load, found);
    const words = { "warm-up": "Warming up", measuring: "Measuring", sustaining: "Sustaining" }[event.phase] ?? event.phase;
    $("bench-phase").textContent = `${words} with ${event.load} at once: ${event.done} of ${event.total}${event.failed ? `, ${event.failed} failed` : ""}`;
    $("bench-progress").value = event.total ? event.done / event.total : 0;
    draw();
  } else if (event.type === "bench.failed") {
    notify(`The run failed. ${event.detail}`);
  } else if (event.type === "bench.done") {
    showResult(event.result);
  }
}

function showResult(result) {
  if (!result) return;
  const main = { file: "e2e", stream: "e2e", live: "final" }[result.workload];
  levels = new Map(result.levels.map((level) => [level.load, { load: level.load, p50_ms: level.metrics[main]?.p50, p95_ms: level.metrics[main]?.p95, rtfx: level.rtfx }]));
  draw();
  const best = [...levels.values()].reduce((a, b) => (b.rtfx > a.rtfx ? b : a));
  const [large, small] = result.slo
    ? [result.slo.last_passing === null ? "None" : `${result.slo.last_passing} at once`, result.slo.words]
    : [`${best.rtfx.toFixed(1)}× real time`, `with ${best.load} at once; half of them within ${milliseconds(best.p50_ms)}. ${(result.reading ?? []).join(" ")}`];
  $("bench-answer").replaceChildren(element("strong", {}, large), element("span", {}, small));
  $("bench-answer").hidden = false;
}

function list(runs) {
  $("bench-empty").hidden = runs.length > 0;
  $("bench-runs").replaceChildren(...runs.map((run) => {
    const when = new Date(run.created * 1000).toLocaleString();
    const what = `${run.order.workload}, ${run.order.levels?.join(", ") || run.order.concurrency?.join(", ") || run.order.slo}`;
    const buttons = [];
    if (run.status === "done") buttons.push(element("button", { type: "button", onclick: async () => showResult((await get(`bench/${run.id}`)).result) }, "Show"));
    if (run.status === "done" && !hasKey()) buttons.push(element("a", { href: `bench/${run.id}` }, "Report"));
    if (run.status !== "running") buttons.push(element("button", { type: "button", class: "quiet", "aria-label": `Delete the run of ${when}`, onclick: () => remove(run.id) }, "Delete"));
    return element("li", {}, element("span", {}, `${when} – ${what}`), element("span", { class: "hint" }, run.status), ...buttons);
  }));
}

async function remove(id) {
  try {
    await request(`bench/${id}`, { method: "DELETE" });
    if (following?.id === id) following.leave.abort();
    else showBench();
  } catch (error) {
    notify(error.message);
  }
}

function draw() {
  const points = [...levels.values()].sort((a, b) => a.load - b.load);
  $("bench-charts").replaceChildren(...(points.length ? [
    chart("Latency: p50, and p95 dashed", points, [["p50_ms", "line"], ["p95_ms", "line second"]], milliseconds),
    chart("Seconds of audio a second", points, [["rtfx", "line"]], (value) => value.toFixed(1)),
  ] : []));
}

// Levels of load along the bottom, each as far from the next as the other.
function chart(title, points, series, write) {
  const [width, height, left, bottom, top] = [320, 190, 52, 24, 12];
  const most = Math.max(...points.flatMap((point) => series.map(([name]) => point[name] ?? 0)), 1e-9);
  const x = (i) => left + ((i + 0.5) * (width - left - 8)) / points.length;
  const y = (value) => height - bottom - ((height - bottom - top) * value) / most;
  const lines = [0, 0.5, 1].map((share) => [
    element("line", { class: share ? "grid" : "axis", x1: left, x2: width, y1: y(share * most), y2: y(share * most) }),
    element("text", { x: left - 6, y: y(share * most) + 4, "text-anchor": "end" }, write(share * most)),
  ]);
  const labels = points.map((point, i) => element("text", { x: x(i), y: height - 7, "text-anchor": "middle" }, String(point.load)));
  const curves = series.flatMap(([name, kind]) => {
    const known = points.map((point, i) => [x(i), point[name]]).filter(([, value]) => value != null);
    return [
      element("polyline", { class: kind, points: known.map(([at, value]) => `${at},${y(value)}`).join(" ") }),
      ...known.map(([at, value]) => element("circle", { class: "point", cx: at, cy: y(value), r: 3.5 }, element("title", {}, write(value)))),
    ];
  });
  const told = points.map((point) => `${point.load} at once: ${series.map(([name]) => (point[name] == null ? "–" : write(point[name]))).join(", ")}`).join("; ");
  const drawing = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}. ${told}` }, ...lines.flat(), ...labels, ...curves);
  return element("figure", {}, element("figcaption", {}, title), drawing);
}
