// Talk: the microphone's sound goes to a live session piece by piece, and its events come back.

import { ApiError, post, request } from "./api.js";
import { talkSnippets } from "./code.js";
import { $, clock, element, notify, offer, showCode } from "./ui.js";

const PIECE_SECONDS = 2; // of sound, at most, in one request: more waits after the network was away
const RATE = 16000;
const PATIENCE_MS = 20000; // for one request's answer
const AWAY_PIECES = 600; // a minute of sound: then the session is over at the gateway
const BUSY = "The gateway is busy. Trying again; nothing you say is lost.";
const LOST = "The connection is lost. Trying again; nothing you say is lost, if it is back within half a minute.";

let session = null;

export function setUpTalk() {
  $("talk-start").addEventListener("click", () => (session ? session.stop() : start()));
  $("talk-commit").addEventListener("click", () => session?.commit());
  document.addEventListener("keydown", (event) => {
    const free = event.target === document.body || event.target.id === "talk";
    if (event.code === "Space" && free && !$("talk").hidden) {
      event.preventDefault();
      if (!event.repeat && !$("key-dialog").open) $("talk-start").click();
    }
  });
  for (const id of ["talk-model", "talk-language", "talk-prompt"]) $(id).addEventListener("change", tellCode);
}

export function tellCode() {
  showCode($("talk-code"), talkSnippets(wanted()));
}

function wanted(rate = RATE) {
  const fields = { model: $("talk-model").value || "whisper-1", content_type: `audio/pcm;rate=${rate}`, include: ["partials"] };
  if ($("talk-language").value) fields.language = $("talk-language").value;
  if ($("talk-prompt").value) fields.prompt = $("talk-prompt").value;
  return fields;
}

async function start() {
  notify("");
  $("talk-start").disabled = true;
  try {
    const microphone = await openMicrophone();
    try {
      session = new Session(microphone, await post("v1/audio/sessions", wanted(microphone.rate)));
    } catch (error) {
      microphone.close();
      throw error;
    }
  } catch (error) {
    notify(error instanceof ApiError ? error.message : microphoneTrouble(error));
  }
  $("talk-start").disabled = false;
}

function microphoneTrouble(error) {
  if (!window.isSecureContext) return "Browsers give the microphone only to pages that come by HTTPS or from this machine (localhost). Put a certificate in front, or drop a recording under File.";
  switch (error.name) {
    case "NotAllowedError": return "The microphone was refused. Allow it for this page in the browser's address bar, and try again.";
    case "NotFoundError": return "There is no microphone. Plug one in, or drop a recording under File.";
    case "NotReadableError": return "The microphone is in use by another program.";
    default: return `The microphone cannot be used: ${error.message}`;
  }
}

// A browser that cannot resample the microphone itself (Firefox) keeps its rate: then the gateway does.
async function openMicrophone() {
  if (!navigator.mediaDevices) throw new DOMException("", "NotAllowedError");
  const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1, echoCancellation: false, noiseSuppression: false } });
  let context;
  const close = () => {
    for (const track of stream.getTracks()) track.stop();
    return context?.close().catch(() => {});
  };
  try {
    let source;
    context = new AudioContext({ sampleRate: RATE });
    try {
      source = context.createMediaStreamSource(stream);
    } catch {
      await context.close();
      context = new AudioContext();
      source = context.createMediaStreamSource(stream);
    }
    await context.audioWorklet.addModule(new URL("recorder.js", import.meta.url));
    const node = new AudioWorkletNode(context, "recorder", { numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit" });
    return {
      rate: context.sampleRate,
      close,
      listen: (hear) => { node.port.onmessage = ({ data }) => hear(data); source.connect(node); },
      // What the audio thread has handed over still comes.
      mute: async () => { source.disconnect(); await new Promise((resolve) => setTimeout(resolve, 150)); node.port.onmessage = null; },
      onGone: (tell) => { stream.getTracks()[0].onended = tell; context.onstatechange = () => context.state === "suspended" && context.resume().catch(tell); },
    };
  } catch (error) {
    await close();
    throw error;
  }
}

class Session {
  constructor(microphone, { id, events_url: events }) {
    Object.assign(this, { microphone, path: `v1/audio/sessions/${id}`, lines: new Map(), waiting: [], sequence: 0, ending: false, began: Date.now() });
    $("utterances").replaceChildren();
    $("talk-empty").hidden = true;
    $("talk-actions").hidden = true;
    $("talk-commit").disabled = false;
    $("talk-start").setAttribute("aria-pressed", "true");
    $("talk-label").textContent = "Stop";
    this.say("Listening.");
    tellCode();
    Object.assign(this, { url: events.replace(/^\//, ""), seen: 0 });
    this.follow();
    microphone.onGone(() => { notify("The microphone is gone."); this.stop(); });
    microphone.listen(({ samples, peak }) => {
      showLevel(peak);
      this.waiting.push(samples);
      if (this.waiting.length > AWAY_PIECES) this.end("The connection was away for a minute, and the session is over.");
      else this.send();
    });
  }

  say(words) { $("talk-hint").textContent = words; }

  sayAllIsWell() { this.say(this.ending ? "Writing the rest." : "Listening."); }

  // An EventSource comes back by itself, but for some errors; then another one, which is told all anew.
  follow() {
    this.events?.close();
    this.events = new EventSource(this.url);
    this.events.onmessage = ({ data, lastEventId }) => {
      const [event, number] = [JSON.parse(data), Number(lastEventId)];
      if (event.type !== "session.events_missed") {
        if (number <= this.seen) return;
        this.seen = number;
      }
      this.hear(event);
    };
    this.events.onopen = () => this.sayAllIsWell();
    this.events.onerror = () => {
      this.say(LOST);
      if (this.events.readyState !== EventSource.CLOSED) return;
      setTimeout(async () => {
        if (await this.untilTaken((signal) => request(this.path, { signal })) && !this.over) this.follow();
      }, 2000);
    };
  }

  // One request at a time, each with all that waits; one whose answer is lost is sent again, under the same number.
  async send() {
    if (this.sending) return;
    this.sending = true;
    while (this.waiting.length && !this.over) {
      const piece = new Blob(this.waiting.splice(0, PIECE_SECONDS * 10));
      await this.untilTaken((signal) => request(`${this.path}/audio?sequence=${this.sequence}`, { method: "POST", body: piece, signal }));
      this.sequence += 1;
    }
    this.sending = false;
    this.sent?.();
  }

  async untilTaken(attempt) {
    let trouble = "";
    for (let pause = 250; !this.over; pause = Math.min(2 * pause, 4000)) {
      try {
        const answer = await attempt(AbortSignal.timeout(PATIENCE_MS));
        if (trouble === LOST) this.follow(); // its connection may be dead, too
        else if (trouble) this.sayAllIsWell();
        return answer;
      } catch (error) {
        if (error.code === "session_ended") return this.drained();
        if (error.status && ![408, 429, 502, 503, 504].includes(error.status)) return this.end(error.message);
        this.say(trouble = error.status ? BUSY : LOST);
        await new Promise((resolve) => setTimeout(resolve, Math.max(pause, 1000 * (error.retryAfter || 0))));
      }
    }
    return undefined;
  }

  // The gateway takes no more, since it stops; the rest still comes by the events.
  drained() {
    this.waiting.length = 0;
    if (this.ending) return;
    this.close();
    this.microphone.mute();
    this.say("The gateway takes no more. Writing the rest.");
  }

  close() {
    this.ending = true;
    $("talk-commit").disabled = true;
    $("talk-label").textContent = "Leave";
  }

  async commit() {
    await this.untilTaken((signal) => request(`${this.path}/commit`, { method: "POST", signal }));
  }

  async stop() {
    if (this.ending) return this.end("Left before the rest had come.");
    this.close();
    this.say("Writing the rest.");
    await this.microphone.mute();
    if (this.sending) await new Promise((resolve) => { this.sent = resolve; });
    await this.untilTaken((signal) => request(`${this.path}/stop`, { method: "POST", signal }));
  }

  line(utterance, start = 0) {
    if (!this.lines.has(utterance)) {
      const line = { start, end: start, text: "", time: element("time", {}, clock(start)), certain: element("span", { class: "certain" }), tail: element("span", { class: "tail", "aria-hidden": "true" }) };
      line.item = element("li", {}, line.time, element("p", {}, line.certain, line.tail));
      $("utterances").append(line.item);
      this.lines.set(utterance, line);
    }
    return this.lines.get(utterance);
  }

  hear(event) {
    const wasAtEnd = window.innerHeight + window.scrollY >= document.body.scrollHeight - 120;
    const line = event.utterance === undefined ? null : this.line(event.utterance, event.start);
    switch (event.type) {
      case "transcript.text.delta":
        line.text += event.delta;
        write(line, line.text, "");
        break;
      case "transcript.text.partial":
        write(line, line.text, event.text);
        break;
      case "transcript.text.changed":
        line.text = event.text;
        write(line, event.text, "");
        break;
      case "utterance.final":
        Object.assign(line, { text: event.text, start: event.start, end: event.end, language: event.language });
        if (event.text) write(line, event.text, "");
        else line.item.remove();
        break;
      case "session.events_missed":
        this.say(`${event.count} events were missed while the connection was lost.`);
        break;
      case "error":
        this.end(event.error.message);
        break;
      case "transcript.text.done":
        this.transcript = event;
        this.end("");
        break;
    }
    if (line && wasAtEnd) line.item.scrollIntoView({ block: "nearest" });
  }

  end(trouble) {
    if (this.over) return;
    this.over = true;
    this.events.close();
    this.microphone.close();
    const unsent = this.waiting.length / 10;
    this.waiting.length = 0;
    if (unsent > 1) trouble = `${trouble} ${Math.round(unsent)} seconds of speech could not be sent.`.trim();
    session = null;
    showLevel(0);
    for (const line of this.lines.values()) line.tail.textContent = "";
    notify(trouble);
    const lines = () => [...this.lines.values()].filter((line) => line.text.trim());
    this.say(lines().length ? "Done." : "Nothing was heard.");
    $("talk-start").disabled = false;
    $("talk-commit").disabled = true;
    $("talk-start").setAttribute("aria-pressed", "false");
    $("talk-label").textContent = "Start talking";
    $("talk-empty").hidden = lines().length > 0;
    $("talk-actions").hidden = lines().length === 0;
    const name = `speech-${new Date(this.began).toISOString().slice(0, 19).replaceAll(":", "-")}`;
    const whole = () => ({ text: this.transcript?.text ?? lines().map((line) => line.text).join(" "), utterances: lines().map(({ start, end, text, language }) => ({ start, end, text: text.trim(), language })) });
    offer($("talk-actions"), () => name, lines, whole);
  }
}

// Only what is new is added: a screen reader says what changes.
function write(line, certain, tail) {
  const [now, was] = [certain.trimStart(), line.certain.textContent];
  if (!now.startsWith(was)) line.certain.textContent = now;
  else if (now.length > was.length) line.certain.append(now.slice(was.length));
  line.tail.textContent = tail ? ` ${tail}` : "";
}

function showLevel(peak) {
  const share = Math.min(1, Math.sqrt(peak));
  $("level").firstElementChild.style.transform = `scaleX(${share})`;
  $("level").setAttribute("aria-valuenow", Math.round(100 * share));
}
