// Status: how the gateway does now. Asked often while it starts, and seldom when nobody looks.

import { $, clock, element, milliseconds } from "./ui.js";

const WORDS = { ready: "Ready", starting: "Starting", draining: "Stopping", failed: "Failed" };

let heard = () => {};
let timer = 0;

export function watchStatus(tell) {
  heard = tell;
  document.addEventListener("visibilitychange", () => document.hidden || ask());
  ask();
}

async function ask() {
  clearTimeout(timer);
  let state;
  try {
    state = await (await fetch("health/ready")).json();
  } catch {
    state = { status: "unreachable", reason: "The gateway cannot be reached." };
  }
  show(state);
  heard(state);
  const often = state.status !== "ready" || !$("status").hidden;
  if (!document.hidden) timer = setTimeout(ask, often ? 1000 : 5000);
}

function show(state) {
  const word = WORDS[state.status] ?? "Unreachable";
  $("state").className = `pill ${state.status}`;
  $("state-text").textContent = state.status === "ready" ? `${state.model} is ready` : `${word}${state.seconds ? `, ${clock(state.seconds)}` : ""}`;
  $("status-big").textContent = state.seconds === undefined ? word : `${word} ${state.status === "ready" ? "for" : "since"} ${clock(state.seconds)}`;
  $("status-reason").textContent = state.reason || (state.status === "ready" ? `${state.model} on ${state.device}` : "");
  const facts = state.places === undefined ? {} : {
    "Live sessions": state.live_sessions,
    "Places taken": `${state.transcriptions} of ${state.places}`,
    "Waiting for a place": state.waiting,
    "Decodes in the engine": state.engine_requests,
    "First text, lately": milliseconds(state.first_text_ms),
    "Last text after speech, lately": milliseconds(state.final_ms),
  };
  $("facts").replaceChildren(...Object.entries(facts).map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
}
