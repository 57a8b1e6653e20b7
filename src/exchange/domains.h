// Domains: neighbouring ranks whose partials become one, a fold, before a token's owner sums (twGroupConfig_t.domain).
// Which domain a rank is in, for hosts and kernels, and how hosts fold. What is given is a number of ranks, and nothing
// that was found out about hosts: so bits are the same on any of them.
//
// What breaks if this changes: the bits of results (docs/PROTOCOL.md, Order of summation; S9). The oracle is
// python/tokenway/domain_reference.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tw {

struct Domains {
  int32_t size = 0;  // ranks of a domain, of which the last may have fewer; 0: nothing is folded

  // One domain alone is the usual sum. So are domains of one rank, as a fold of one term is that term.
  static constexpr Domains make(int32_t given, int32_t ranks) { return {given > 1 && given < ranks ? given : 0}; }

  constexpr bool fold() const { return size > 0; }
  constexpr int32_t of(int32_t rank) const { return rank / size; }
  // How many folds of several terms a sum of so many terms has at most.
  constexpr int32_t most_folds(int32_t terms) const { return fold() ? terms / 2 : 0; }
};

// Folds a token's terms, which are by ranks ascending, in their place: one fold of each domain that has some, domains
// ascending. Returns how many there are. ranks[i]: who sent terms[i]. A fold of several terms is made by sum(out,
// terms, count): in float32, from the first term on, rounded once to the type that travels. These lie one behind the
// other at `made`, `bytes` each, at most most_folds(count) of them.
template <class Sum>
int32_t fold_terms(const Domains& domains, const void** terms, const int32_t* ranks, int32_t count, std::byte* made,
                   uint64_t bytes, Sum&& sum) {
  int32_t folds = 0;
  for (int32_t first = 0, next = 0; first < count; first = next) {
    while (next < count && domains.of(ranks[next]) == domains.of(ranks[first])) ++next;
    if (next - first == 1) {
      terms[folds++] = terms[first];
      continue;
    }
    sum(made, terms + first, next - first);
    terms[folds++] = made;
    made += bytes;
  }
  return folds;
}

}  // namespace tw
