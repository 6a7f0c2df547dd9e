// The search of the site: who asks how to do something finds a guide first, and long pages about all of it last.
var Scorer = {
  score: ([page, , , , score]) =>
    score + (/^(guides|operations)\//.test(page) ? 4 : /^(start|reference)/.test(page) ? 2 : /^explanation\/(arch|bench)/.test(page) ? -3 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
