// Talking to the server: events of a stream, and errors in the server's own words.

/** Headers for a request; the key is sent only if one was entered. */
function headers(key) {
  const out = { "Content-Type": "application/json" };
  if (key) out.Authorization = `Bearer ${key}`;
  return out;
}

/** The server's message for an answer that is not OK. */
async function failure(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server answered with status ${answer.status}.`;
  }
}

/** Payloads of the server-sent events of an answer, parsed, until it ends or says [DONE]. */
async function* payloads(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const frames = held.split("\n\n");
    held = frames.pop();
    for (const frame of frames) {
      const data = frame.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

/** Chunks of a chat answer. Throws an Error with the server's message; `signal` stops it. */
export async function* chat(body, key, signal) {
  const options = { method: "POST", headers: headers(key), body: JSON.stringify(body), signal };
  const answer = await fetch("/v1/chat/completions", options);
  if (!answer.ok) throw new Error(await failure(answer));
  for await (const chunk of payloads(answer)) {
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
}

/** Snapshots of the server's numbers, for ever; reconnects after a second when the connection breaks. */
export async function* live(key) {
  for (;;) {
    try {
      const answer = await fetch("/live", { headers: headers(key()) });
      if (!answer.ok) throw new Error(await failure(answer));
      yield* payloads(answer);
    } catch (error) {
      yield { error: error.message };
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}
