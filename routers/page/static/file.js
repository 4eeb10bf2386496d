// Drop a file: it is sent, its text comes while it is transcribed, and each word can be heard.

import { authorized, eventReader } from "./api.js";
import { fileSnippets } from "./code.js";
import { $, clock, element, notify, offer, showCode } from "./ui.js";

let running = null;
let named = "speech.mp3"; // the last recording
let times = []; // {start, end, shown} of words or segments, in order

export function setUpFile() {
  const [drop, input] = [$("drop"), $("file-input")];
  input.addEventListener("click", () => { input.value = ""; }); // the same one may be sent again
  input.addEventListener("change", () => input.files[0] && transcribe(input.files[0]));
  for (const kind of ["dragenter", "dragover"]) drop.addEventListener(kind, (event) => { event.preventDefault(); drop.classList.add("over"); });
  for (const kind of ["dragleave", "drop"]) drop.addEventListener(kind, () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files[0]) transcribe(event.dataTransfer.files[0]);
  });
  for (const kind of ["dragover", "drop"]) window.addEventListener(kind, (event) => event.preventDefault());
  $("file-cancel").addEventListener("click", () => running?.abort());
  $("player").addEventListener("timeupdate", markNow);
  $("player").addEventListener("seeked", markNow);
  for (const id of ["file-model", "file-language", "file-prompt", "file-words"]) $(id).addEventListener("change", tellCode);
}

export function tellCode() {
  showCode($("file-code"), fileSnippets(wanted(), named));
}

function wanted() {
  const fields = [["model", $("file-model").value || "whisper-1"], ["stream", "true"], ["response_format", "verbose_json"]];
  if ($("file-language").value) fields.push(["language", $("file-language").value]);
  if ($("file-prompt").value) fields.push(["prompt", $("file-prompt").value]);
  fields.push(["timestamp_granularities[]", "segment"]);
  if ($("file-words").checked) fields.push(["timestamp_granularities[]", "word"]);
  return fields;
}

function transcribe(file) {
  running?.abort();
  notify("");
  named = file.name;
  tellCode();
  times = [];
  URL.revokeObjectURL($("player").src);
  $("player").src = URL.createObjectURL(file);
  $("file-name").textContent = file.name;
  $("file-work").hidden = $("file-cancel").hidden = false;
  $("file-actions").hidden = true;
  const text = element("p");
  $("file-text").replaceChildren(text);

  const form = new FormData();
  for (const [name, value] of [...wanted(), ["stream_progress", "true"]]) form.append(name, value);
  form.append("file", file);
  // Not fetch, which cannot tell how much of the upload has gone.
  const sending = running = new XMLHttpRequest();
  let done = false;
  const finish = (phase, trouble = "") => {
    if (running !== sending) return;
    running = null;
    $("file-cancel").hidden = true;
    progress(phase, phase === "Done" ? 1 : 0);
    notify(trouble);
  };
  const read = eventReader((event) => {
    if (event.type === "transcript.text.delta") text.append(event.delta);
    else if (event.type === "transcript.progress") showDone(event.seconds);
    else if (event.type === "transcript.text.done") { done = true; show(event, file.name); finish("Done"); }
    else if (event.error) { done = true; finish("Stopped", event.error.message); }
  });
  let seen = 0;
  sending.open("POST", "v1/audio/transcriptions");
  for (const [name, value] of Object.entries(authorized())) sending.setRequestHeader(name, value);
  sending.upload.onprogress = ({ loaded, total }) => progress(loaded < total ? `Sending ${Math.round((100 * loaded) / total)}%` : "Transcribing", loaded < total ? loaded / total : null);
  sending.onprogress = () => {
    if (sending.status !== 200) return;
    read(sending.responseText.slice(seen));
    seen = sending.responseText.length;
  };
  sending.onload = () => {
    sending.onprogress();
    if (sending.status !== 200) finish("Refused", messageOf(sending));
    else if (!done) finish("Stopped", "The answer broke off before its end.");
  };
  sending.onerror = () => finish("Stopped", "The connection to the gateway was lost.");
  sending.onabort = () => finish("Cancelled");
  progress("Sending", 0);
  sending.send(form);
}

function messageOf(answer) {
  try {
    return JSON.parse(answer.responseText).error.message;
  } catch {
    return `The gateway answered with ${answer.status}.`;
  }
}

// A browser does not know how long some recordings are.
function showDone(seconds) {
  const whole = $("player").duration;
  const known = Number.isFinite(whole) && whole > 0;
  progress(`Transcribed ${clock(seconds)}${known ? ` of ${clock(whole)}` : ""}`, known ? Math.min(1, seconds / whole) : null);
}

function progress(phase, share) {
  $("file-phase").textContent = phase;
  if (share === null) $("file-progress").removeAttribute("value");
  else $("file-progress").value = share;
}

function show(transcript, name) {
  const words = [...(transcript.words ?? [])];
  times = [];
  const play = (start) => { $("player").currentTime = start; $("player").play(); };
  const paragraphs = (transcript.segments ?? []).map((segment) => {
    const line = element("p");
    const mine = words.splice(0, words.findLastIndex((word) => word.start < segment.end) + 1);
    for (const piece of mine.length ? mine : [{ word: segment.text.trim(), start: segment.start, end: segment.end }]) {
      const shown = element("span", { class: "word", onclick: () => play(piece.start) }, piece.word.trim());
      times.push({ start: piece.start, end: piece.end, shown });
      line.append(shown, " ");
    }
    const from = element("button", { type: "button", "aria-label": `Play from ${clock(segment.start)}`, onclick: () => play(segment.start) }, clock(segment.start));
    return element("div", { class: "segment" }, from, line);
  });
  if (!paragraphs.length) paragraphs.push(element("p", { class: "empty" }, "Nobody speaks in this recording."));
  $("file-text").replaceChildren(...paragraphs);
  $("file-actions").hidden = !transcript.text;
  offer($("file-actions"), () => name.replace(/\.[^.]*$/, ""), () => transcript.segments ?? [], () => {
    const { type, ...whole } = transcript;
    return whole;
  });
}

function markNow() {
  const at = $("player").currentTime;
  for (const { start, end, shown } of times) shown.classList.toggle("now", at >= start && at < end);
}
