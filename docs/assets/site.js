// Wide tables scroll: let keys reach them too. The theme wraps them when the page is ready.
addEventListener("load", () => {
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap")) wrap.tabIndex = 0;
});
