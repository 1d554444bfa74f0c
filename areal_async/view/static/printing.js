/* The page on paper: light, and as wide as figures are drawn for it (print.css).

What always holds: all of it is printed, also figures that nobody has scrolled to, but for what the reader left folded;
afterwards the page is as it was. */

let theme = null; // that the page had; null: it isn't being printed

const root = document.documentElement;
const themed = (name) => (name === undefined ? delete root.dataset.theme : (root.dataset.theme = name));

window.addEventListener("beforeprint", () => {
  if (theme !== null) return; // some browsers say it again, of their preview
  theme = { name: root.dataset.theme };
  themed("light");
  root.classList.add("printing");
});

window.addEventListener("afterprint", () => {
  if (theme === null) return;
  themed(theme.name);
  theme = null;
  root.classList.remove("printing");
});

export const isPrinting = () => theme !== null;

/** does: what to draw anew, when the page has become one for paper, and when it is one for the screen again. Returns what
 * ends it. */
export function onPaper(does) {
  for (const name of ["beforeprint", "afterprint"]) window.addEventListener(name, does);
  return () => {
    for (const name of ["beforeprint", "afterprint"]) window.removeEventListener(name, does);
  };
}
