// Offers the other versions of this documentation, and says in an old one that it is old. scripts/list_versions.py writes which there are
// into a file above all of them, so that a version which was built long ago knows the newer ones.
"use strict";

addEventListener("DOMContentLoaded", async () => {
  const label = document.querySelector(".site-versions");
  const here = new URL(label.dataset.root, location.href);
  const root = new URL("../", here);
  let listed;
  try {
    listed = await (await fetch(new URL("versions.json", root))).json();
  } catch {
    return; // one version alone: `make site`, or files without a server
  }
  const { latest, versions } = listed;
  const own = label.dataset.version;
  const choice = label.querySelector("select");
  for (const version of versions) {
    choice.add(new Option(version === latest ? `${version} (latest)` : version, version, false, version === own));
  }
  label.hidden = false;
  choice.addEventListener("change", async () => {
    location.assign(await place(new URL(`${choice.value}/`, root), here));
  });
  if (latest !== null && own !== latest) {
    const banner = document.createElement("div");
    banner.className = "announcement";
    const text = document.createElement("aside");
    text.className = "announcement-content";
    const link = document.createElement("a");
    link.href = await place(new URL("latest/", root), here);
    link.textContent = `the latest release is ${latest}`;
    const what = versions.indexOf(own) < versions.indexOf(latest) ? "not released yet" : "an old version";
    text.append(`This is the documentation of ${own}, ${what}; `, link, ".");
    banner.append(text);
    document.querySelector(".page").before(banner);
  }
});

// The same page in another version, or that version's first page where it has no such page.
async function place(version, here) {
  const same = new URL(location.pathname.slice(here.pathname.length) || "index.html", version);
  const found = await fetch(same, { method: "HEAD" });
  return found.ok ? same : version;
}
