// The live page of `dither watch`: asks for new contents, and keeps what the reader has chosen.

const LIVE = document.getElementById("live");
let stamp = LIVE.dataset.stamp;

function controls() {
  const found = new Map();
  document.querySelectorAll("main input, main select").forEach((control) => {
    const section = control.closest("[data-part]");
    const name = control.name ? `${control.name}=${control.value}` : `${section?.dataset.run} ${section?.dataset.part} ${control.dataset.of}`;
    found.set(name, control);
  });
  return found;
}

// A slider at its end stays at its end, which is the newest state; elsewhere it stays where it is.
function chosen(control) {
  if (control.type === "radio") return control.checked;
  return control.type === "hidden" || (control.type === "range" && control.value === control.max) ? null : control.value;
}

function renew(html) {
  const page = new DOMParser().parseFromString(html, "text/html"), old = controls();
  const kept = new Map([...old].map(([name, control]) => [name, chosen(control)]));
  const focused = [...old].find(([, control]) => control === document.activeElement)?.[0];
  const open = [...document.querySelectorAll("details")].map((each) => [each.querySelector("summary")?.textContent, each.open]);
  const at = window.scrollY;
  DATA = JSON.parse(page.getElementById("data").textContent);
  document.querySelector("main").replaceChildren(...page.querySelector("main").childNodes);
  document.title = page.title;
  const opened = new Map(open);
  document.querySelectorAll("details").forEach((each) => { each.open = opened.get(each.querySelector("summary")?.textContent) ?? each.open; });
  bind();
  const moved = [];
  for (const [name, control] of controls()) {
    const value = kept.get(name) ?? null;
    if (control.type === "radio") control.checked = value ?? control.checked;
    else if (value !== null && control.value !== value) {
      control.value = value;
      if (control.type === "range") moved.push(control);
    }
  }
  axis = document.querySelector("input[name=axis]:checked")?.value ?? "steps";
  drawAll();
  moved.filter((control) => visible(control.closest("[data-part]"))).forEach((control) => control.dispatchEvent(new Event("input")));
  controls().get(focused)?.focus({ preventScroll: true });
  window.scrollTo({ top: at, behavior: "instant" });
}

async function askOnce() {
  try {
    const answer = await fetch(`update.json?since=${encodeURIComponent(stamp)}`, { cache: "no-store" });
    const update = await answer.json();
    if (update.html) {
      renew(update.html);
      stamp = update.stamp;
      LIVE.dataset.stamp = stamp;
    }
    LIVE.querySelector("p").textContent = update.text;
    LIVE.querySelector("progress").hidden = update.share === null;
    LIVE.querySelector("progress").value = update.share ?? 0;
  } catch (error) {
    LIVE.querySelector("p").textContent = "`dither watch` has ended: this page is no longer renewed.";
  }
}

// One request at a time, so that no older answer replaces a newer one.
let asking = Promise.resolve();
function ask() {
  asking = asking.then(askOnce);
  return asking;
}

async function watch() {
  if (!document.hidden) await ask();
  setTimeout(watch, 2000);
}
setTimeout(watch, 2000);
