// The search of the site: a page comes first that has the words in its headings, best in its title; of equals a guide,
// and last the pages about all of it and the tables.
var Scorer = {
  score: ([page, title, , , score]) => {
    const place = /^(guides|operations)\//.test(page) ? 4 : /^(start|reference)/.test(page) ? 2 : /^explanation\/(arch|bench)/.test(page) ? -3 : /^explanation/.test(page) ? 0 : -6;
    return score + place + Scorer.inHeadings(page);
  },
  inHeadings: (page) => {
    const { docnames, titles, titleterms } = Search._index, number = docnames.indexOf(page), stemmer = new Stemmer();
    const words = (text) => (text.toLowerCase().match(/\w+/g) ?? []).map((word) => stemmer.stemWord(word));
    const title = words(titles[number]), asked = words(new URLSearchParams(window.location.search).get("q") ?? "");
    return asked.reduce((sum, word) => sum + ([titleterms[word] ?? []].flat().includes(number) ? 3 : 0) + (title.includes(word) ? 3 : 0), 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
