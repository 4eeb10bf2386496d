// Transcribe a file, and print its text as it comes: `node examples/stream.mjs speech.mp3`. Needs `npm install openai`.
import fs from "node:fs";
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: `${process.env.STENO_URL ?? "http://127.0.0.1:8000"}/v1`,
  apiKey: process.env.STENO_API_KEY ?? "none",
});
const events = await client.audio.transcriptions.create({
  model: "whisper-1", file: fs.createReadStream(process.argv[2]), stream: true,
});
for await (const event of events) {
  if (event.type === "transcript.text.delta") process.stdout.write(event.delta);
}
console.log();
