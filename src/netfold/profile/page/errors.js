// First of all scripts: what goes wrong in a later one is said on the page, not only in a console that nobody opens.
"use strict";
window.addEventListener("error", (event) => {
  const said = document.createElement("p");
  said.className = "failed script-error";
  said.textContent = `A script of this page failed (${event.message}, line ${event.lineno}); tables and charts stand without it.`;
  (document.querySelector("main") ?? document.body).prepend(said);
});
