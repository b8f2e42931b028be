"use strict";
// Asks for the page again when the service has something new, and replaces what is marked with data-live.
// One stream a page, and none while it is hidden: a browser allows six an address.
let stream = null, timer = null;

function say(text) { document.getElementById("connection").textContent = text; }

async function refresh() {
  timer = null;
  const answer = await fetch(location.href).catch(() => null);
  if (!answer || !answer.ok || answer.redirected) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const old of document.querySelectorAll("[data-live]")) {
    const fresh = page.getElementById(old.id);
    if (!fresh || fresh.innerHTML === old.innerHTML) continue;
    const focused = old.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    old.replaceWith(fresh);
    if (focused) fresh.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus();
  }
}

function watch() {
  if (document.hidden) { stream?.close(); stream = null; return; }
  if (stream || !document.querySelector("[data-live]")) return;
  stream = new EventSource("/api/v1/events");
  stream.addEventListener("runs", () => { timer ??= setTimeout(refresh, 1000); });
  stream.onopen = () => say("live");
  stream.onerror = () => say("not connected");
}

document.addEventListener("visibilitychange", watch);
watch();
