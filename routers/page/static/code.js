// What was just done, in other words: lines that can be pasted.

const base = () => new URL(".", document.baseURI).href.replace(/\/$/, "");
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const string = (text) => JSON.stringify(text);

export function talkSnippets(wanted) {
  const query = new URLSearchParams({ model: wanted.model, stream: "true" });
  if (wanted.language) query.set("language", wanted.language);
  if (wanted.prompt) query.set("prompt", wanted.prompt);
  return {
    curl: `# speak; the text comes while you do (Linux; on a Mac: ffmpeg -f avfoundation -i :0 -ac 1 -ar 16000 -f s16le -)
arecord -q -f S16_LE -r 16000 -c 1 -t raw |
  curl -sN -X POST -T . -H 'Content-Type: audio/pcm;rate=16000' \\
    ${quoted(`${base()}/v1/audio/transcriptions?${query}`)}`,
    Python: `import httpx, sys

def microphone():  # arecord -f S16_LE -r 16000 -c 1 -t raw | python this.py
    while piece := sys.stdin.buffer.read(3200):
        yield piece

with httpx.stream("POST", ${string(`${base()}/v1/audio/transcriptions`)}, timeout=None, content=microphone(),
                  params=${string(Object.fromEntries(query))},
                  headers={"Content-Type": "audio/pcm;rate=16000"}) as answer:
    for line in answer.iter_lines():
        print(line)`,
    JavaScript: `// in a browser: make a session, post the samples, read the events
const session = await (await fetch(${string(`${base()}/v1/audio/sessions`)}, {
  method: "POST", headers: {"Content-Type": "application/json"},
  body: JSON.stringify(${JSON.stringify(wanted)}),
})).json();
const events = new EventSource(${string(base())} + session.events_url);
events.onmessage = ({data}) => console.log(JSON.parse(data));
// for each piece of 16 bit samples, from 0 on:
//   fetch(\`${base()}/v1/audio/sessions/\${session.id}/audio?sequence=\${n}\`, {method: "POST", body: samples})
// and at the end: fetch(\`${base()}/v1/audio/sessions/\${session.id}/stop\`, {method: "POST"})`,
  };
}

export function fileSnippets(fields, name) {
  const values = Object.fromEntries(fields);
  const granularities = fields.filter(([field]) => field === "timestamp_granularities[]").map(([, value]) => value);
  const plain = Object.entries(values).filter(([field]) => !["stream", "timestamp_granularities[]"].includes(field));
  const python = plain.map(([field, value]) => `${field}=${string(value)}`).join(", ");
  const script = plain.map(([field, value]) => `${field}: ${string(value)}`).join(", ");
  const list = JSON.stringify(granularities);
  return {
    curl: `curl -N ${base()}/v1/audio/transcriptions \\\n${fields.map(([field, value]) => `  -F ${quoted(`${field}=${value}`)}`).join(" \\\n")} \\\n  -F ${quoted(`file=@${name}`)}`,
    Python: `from openai import OpenAI

client = OpenAI(base_url=${string(`${base()}/v1`)}, api_key="none")
for event in client.audio.transcriptions.create(
    file=open(${string(name)}, "rb"), stream=True, ${python}, timestamp_granularities=${list},
):
    print(event)`,
    JavaScript: `import OpenAI from "openai";
import fs from "node:fs";

const client = new OpenAI({baseURL: ${string(`${base()}/v1`)}, apiKey: "none"});
const events = await client.audio.transcriptions.create({
  file: fs.createReadStream(${string(name)}), stream: true, ${script}, timestamp_granularities: ${list},
});
for await (const event of events) console.log(event);`,
  };
}

export function benchSnippets(order) {
  const flags = [`--workload ${order.workload}`, `--n ${order.n}`];
  if (order.levels) flags.push(`--concurrency ${order.levels.join(",")}`);
  if (order.slo) flags.push(`--slo ${order.slo}`);
  return {
    curl: `curl -X POST ${base()}/bench -d ${quoted(JSON.stringify(order))}`,
    shell: `steno bench --url ${base()} ${flags.join(" ")}`,
  };
}
