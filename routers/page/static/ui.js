// Small helpers: elements, notices, times, and what a transcript can be downloaded as.

export const $ = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG.has(name) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml", name);
  for (const [attribute, value] of Object.entries(attributes)) {
    if (attribute.startsWith("on")) made.addEventListener(attribute.slice(2), value);
    else if (value !== false && value !== undefined) made.setAttribute(attribute, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}
const SVG = new Set(["svg", "path", "line", "circle", "text", "g", "polyline", "title"]);

export function notify(message) {
  $("notice").textContent = message;
  $("notice").hidden = !message;
}

export function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (number) => String(number).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

export const milliseconds = (ms) => (ms == null ? "–" : ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

function stamp(seconds, comma) {
  const ms = Math.round(seconds * 1000);
  const part = (value, size) => String(value).padStart(size, "0");
  const [h, m, s] = [Math.floor(ms / 3600000), Math.floor(ms / 60000) % 60, Math.floor(ms / 1000) % 60];
  return `${part(h, 2)}:${part(m, 2)}:${part(s, 2)}${comma}${part(ms % 1000, 3)}`;
}

// `lines` are {start, end, text}; `whole` is what JSON holds.
export const FORMATS = {
  txt: (lines) => `${lines.map((line) => line.text.trim()).join("\n")}\n`,
  srt: (lines) => lines.map((line, i) => `${i + 1}\n${stamp(line.start, ",")} --> ${stamp(line.end, ",")}\n${line.text.trim()}\n`).join("\n"),
  vtt: (lines) => `WEBVTT\n\n${lines.map((line) => `${stamp(line.start, ".")} --> ${stamp(line.end, ".")}\n${line.text.trim().replaceAll("-->", "→")}\n`).join("\n")}`,
  json: (lines, whole) => `${JSON.stringify(whole, null, 2)}\n`,
};

// Buttons to copy the text, and to download it in each format.
export function offer(place, name, lines, whole) {
  const copy = element("button", { type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(FORMATS.txt(lines()));
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Not allowed here";
    }
    setTimeout(() => { copy.textContent = "Copy"; }, 2000);
  } }, "Copy");
  const buttons = Object.entries(FORMATS).map(([format, write]) => element("button", {
    type: "button", "aria-label": `Download as ${format}`, onclick: () => {
      const url = URL.createObjectURL(new Blob([write(lines(), whole())], { type: "text/plain;charset=utf-8" }));
      element("a", { href: url, download: `${name()}.${format}` }).click();
      setTimeout(() => URL.revokeObjectURL(url), 60000);
    },
  }, `.${format}`));
  place.replaceChildren(copy, ...buttons);
}

export function fillSelect(select, entries) {
  const chosen = select.value;
  select.replaceChildren(...entries.map(([value, label]) => element("option", { value }, label)));
  if (entries.some(([value]) => value === chosen)) select.value = chosen;
}

// The same request in other words: {name: code}.
export function showCode(place, snippets) {
  const was = place.querySelector("details")?.open ?? false;
  const pre = element("pre", { tabindex: "0" });
  const choose = (name) => {
    pre.textContent = snippets[name];
    for (const button of row.children) button.setAttribute("aria-pressed", button.textContent === name);
  };
  const row = element("div", { class: "actions" }, ...Object.keys(snippets).map((name) => element("button", { type: "button", onclick: () => choose(name) }, name)));
  place.replaceChildren(element("details", { open: was }, element("summary", {}, "The same from code"), row, pre));
  choose(Object.keys(snippets)[0]);
}
