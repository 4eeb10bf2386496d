// Runs in the audio thread: collects a tenth of a second of 16 bit samples, and tells how loud it was.

class Recorder extends AudioWorkletProcessor {
  constructor() {
    super();
    this.packet = new Int16Array(Math.round(sampleRate / 10));
    this.filled = 0;
    this.peak = 0;
  }

  process([channels]) {
    for (const value of channels[0] || []) {
      const sample = Math.max(-1, Math.min(1, value));
      this.peak = Math.max(this.peak, Math.abs(sample));
      this.packet[this.filled++] = sample * 32767;
      if (this.filled === this.packet.length) {
        this.port.postMessage({ samples: this.packet, peak: this.peak });
        this.packet = new Int16Array(this.packet.length);
        this.filled = this.peak = 0;
      }
    }
    return true;
  }
}

registerProcessor("recorder", Recorder);
