// The page: tabs, the key, and what the server offers.

import { get, setKey } from "./api.js";
import { setUpBench, showBench } from "./bench.js";
import { setUpFile, tellCode as tellFileCode } from "./file.js";
import { watchStatus } from "./status.js";
import { setUpTalk, tellCode as tellTalkCode } from "./talk.js";
import { $, fillSelect, notify } from "./ui.js";

const TABS = ["talk", "file", "bench", "status"];

function choose(name, { focus = false } = {}) {
  for (const tab of TABS) {
    const button = $(`tab-${tab}`);
    button.setAttribute("aria-selected", tab === name);
    button.tabIndex = tab === name ? 0 : -1;
    $(tab).hidden = tab !== name;
    if (focus && tab === name) button.focus();
  }
  notify("");
  history.replaceState(null, "", `#/${name}`);
  if (name === "bench") showBench();
}

function setUpTabs() {
  for (const [i, tab] of TABS.entries()) {
    $(`tab-${tab}`).addEventListener("click", () => choose(tab));
    $(`tab-${tab}`).addEventListener("keydown", ({ key }) => {
      const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: TABS.length - 1 }[key];
      if (to !== undefined) choose(TABS[(to + TABS.length) % TABS.length], { focus: true });
    });
  }
  const wanted = location.hash.slice(2);
  choose(TABS.includes(wanted) ? wanted : "talk");
  $("state").addEventListener("click", () => choose("status", { focus: true }));
}

function setUpKey() {
  const dialog = $("key-dialog");
  $("key-open").addEventListener("click", () => { dialog.showModal(); $("key").focus(); });
  $("key-forget").addEventListener("click", () => { $("key").value = ""; dialog.close(); });
  dialog.addEventListener("close", () => {
    setKey($("key").value);
    $("key-open").textContent = $("key").value ? "API key ✓" : "API key";
    if (!$("bench").hidden) showBench();
  });
}

let known = false;
let asked = false;

async function learn() {
  const options = await get("page/options.json");
  for (const place of ["talk", "file"]) {
    fillSelect($(`${place}-model`), options.models.map((model) => [model, model]));
    fillSelect($(`${place}-language`), [["", "as spoken"], ...options.languages.map(({ code, name }) => [code, name])]);
  }
  $("file-limits").textContent = `Any format, audio or video, up to ${options.max_upload_mb} MB and ${options.max_audio_minutes} minutes.`;
  tellTalkCode();
  tellFileCode();
  $("key-open").hidden = !options.takes_key;
  if (options.needs_key && !asked) $("key-dialog").showModal();
  asked = true;
}

setUpTabs();
setUpTalk();
setUpFile();
setUpBench();
setUpKey();
learn().catch((error) => notify(error.message));
watchStatus(async ({ status }) => {
  $("talk-start").title = status === "ready" ? "" : "The engine is not ready yet";
  if (status === "ready" && !known) {
    known = true;
    await learn().catch(() => { known = false; });
  }
});
