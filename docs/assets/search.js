// The search would read the hyphens before a flag as "without this word": take them away as they are typed.
document.addEventListener(
  "input",
  ({ target }) => {
    if (target.matches?.(".md-search__input")) target.value = target.value.replace(/(^|\s)-+/g, "$1");
  },
  true,
);
