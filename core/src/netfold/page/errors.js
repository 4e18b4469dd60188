// The first script: it shows the error of a later script on the page, where people see it, and not only in the console.
"use strict";
window.addEventListener("error", (event) => {
  const shown = document.createElement("p");
  shown.className = "failed script-error";
  shown.textContent = `A script of this page failed (${event.message}, line ${event.lineno}); tables and charts do not need it.`;
  (document.querySelector("main") ?? document.body).prepend(shown);
});
