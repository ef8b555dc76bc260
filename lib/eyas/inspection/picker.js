// Runs on every input; `this` is the element around the picker. A token's attributes hold its
// numbers, one value a boundary with a bar between.
const one = selector => this.querySelector(selector);
const all = selector => [...this.querySelectorAll(selector)];
const boundary = one('[name=boundary]').selectedIndex;
const position = one('[name=position]');
const sample = one('[name=sample]').selectedIndex;
const samples = all('[data-sample]');
samples.forEach((element, n) => element.hidden = n != sample);
const tokens = [...samples[sample].querySelectorAll('span')];
const first = +tokens[0].dataset.at;
position.min = first;
position.max = first + tokens.length - 1;
const chosen = tokens[Math.max(0, Math.min(position.value - first, tokens.length - 1))];
for (const token of tokens) {
  const shade = 0.6 * (token.dataset.p.split('|')[boundary] || 0) / 100;
  token.style.background = 'rgba(47, 127, 193, ' + shade + ')';
  token.style.outline = token == chosen ? '2px solid' : '';
}
if (event.target != position) position.value = chosen.dataset.at;
const quoted = token => JSON.stringify(token.textContent.replaceAll('⏎', ''));
const next = tokens[tokens.indexOf(chosen) + 1];
one('output').textContent = 'Token ' + chosen.dataset.at + ', ' + quoted(chosen)
  + ', is followed by ' + (next ? quoted(next) : 'nothing that is shown');
all('tbody tr').forEach((row, n) => {
  ['norm', 'choice', 'p'].forEach((name, k) => {
    row.cells[k + 1].textContent = chosen.dataset[name].split('|')[n];
  });
});
