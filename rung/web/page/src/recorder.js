// Runs in the browser's audio thread: hands over what the microphone hears.
class Recorder extends AudioWorkletProcessor {
  process(inputs) {
    const channel = inputs[0]?.[0];
    if (channel !== undefined) this.port.postMessage(channel.slice());
    return true;
  }
}
registerProcessor("recorder", Recorder);
