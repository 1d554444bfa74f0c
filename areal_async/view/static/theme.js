/* Dark or light before anything is drawn; a classic script, so that a dark room sees no white flash. */
try {
  const chosen = localStorage.getItem("areal-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // No storage (a private window): the system's choice holds.
}
