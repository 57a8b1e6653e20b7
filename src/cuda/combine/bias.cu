// Combine whose sums start from rows of the caller, or are by domain: the half of the step that waits for rows and sums
// them, of combines per rank and per expert. Takes BiasParams or DomainParams; gives each token's sum in the caller's
// output. combine/fp8.cu has the same for rows of e4m3 with a bias, and any combine's kernel has sent the rows, this
// rank's own too: they are in its inbox.
//
// One kernel serves all types, layouts and ways that rows come in, for it sums tiles by the geometry of packets,
// whatever its terms are. A kernel for each type, and one launch for the step, would be faster, by a launch and a wait
// with few tokens; they would take seconds more to compile. (Not measured yet.) Sums by domain are an instance of their
// own, so that those with a bias alone do not carry folds.
//
// The bias may lie where the sums go: each thread writes the elements alone that it has read before, and no two make
// the same sum.
//
// What breaks if this changes: S4 (chunks or flags), S9 (the bias first, then ranks or k or domains ascending; which
// terms a fold has, and that it is rounded), and that a thread stores the elements whose bias it has loaded.
#include "cuda/launch/bias.h"

#include <cuda_runtime.h>

#include "cuda/combine/choices.cuh"
#include "cuda/combine/end.cuh"
#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"

namespace tw::cuda {
namespace {

// Up to 32 terms of a token behind its bias; the thread's own is that of its lane.
struct Listed {
  uint32_t there;         // which there are, by bit
  unsigned long long at;  // where the row, or its first packet, is
  int rank;
  float weight;
  int packet;
};
__device__ Listed list_terms(const Sum& s, const ChoicesParams& c, int token, int fan, int base) {
  if (s.p.group.map.shape().per_expert != 0) {
    const Returned of = find_returned(s, c, token, base);
    return {of.there, of.at, of.rank, of.weight, c.packets};
  }
  Listed listed{0, 0, 0, 0.0f, 0};
  const int term = base + lane();
  if (term < fan) {
    listed.at = reinterpret_cast<unsigned long long>(s.places()[term]);
    listed.rank = s.from()[term].rank;
    listed.packet = s.kinds()[term] == kPacket ? 1 : 0;
  }
  listed.there = __ballot_sync(~0u, term < fan);
  return listed;
}

// Loads the elements of a row of the bias that stand where word w of the type that travels has its own.
__device__ inline Quad load_bias(const BiasParams& q, const std::byte* row, uint32_t w) {
  const CombineParams& p = q.call.call;
  const twDtype_t dtype = q.bias.dtype;
  const int per_word = 8 / float_bytes(p.wire_dtype);
  const int64_t first = int64_t{w} * per_word;
  const bool whole = q.bias.vectors_fit != 0 && first + per_word <= p.elements;
  if (whole && float_bytes(dtype) == float_bytes(p.wire_dtype)) {
    return widen_word(dtype, load_fresh<unsigned long long>(row + 8 * static_cast<uint64_t>(w)));
  }
  if (whole && dtype == twFloat32) {
    const uint4 bits = load_fresh<uint4>(row + 16 * static_cast<uint64_t>(w));
    return {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)};
  }
  Quad quad{};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (e < per_word && first + e < p.elements) quad.v[e] = load_element(row, dtype, first + e);
  }
  return quad;
}

// Takes the next two of the terms `left` into the parts; those that come as packets are looked at once.
struct Two {
  bool here[kTerms];
  int rank[kTerms];
  float weight[kTerms];
};
__device__ inline Two expect_terms_of(const Sum& s, const Listed& of, const Tile& tile, uint32_t* left,
                                      Parts<kTerms, kGroups>* parts) {
  const CombineParams& p = s.p;
  Two two;
#pragma unroll
  for (int t = 0; t < kTerms; ++t) {
    two.here[t] = *left != 0;
    const int source = max(__ffs(static_cast<int>(*left)) - 1, 0);
    *left &= *left - 1;
    const auto* const at = reinterpret_cast<const std::byte*>(__shfl_sync(~0u, of.at, source));
    two.rank[t] = __shfl_sync(~0u, of.rank, source);
    two.weight[t] = __shfl_sync(~0u, of.weight, source);
    const bool packet = __shfl_sync(~0u, of.packet, source) != 0;
    parts->at[t] = two.here[t] && packet ? at + packet_place(tile.begin) : nullptr;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const uint32_t w = first_word(tile.begin + g);
      if (!two.here[t] || packet || tile.begin + g >= tile.end) continue;
      parts->value[g][t] = p.words_fit ? load_two(at, w, p.tiles.words) : load_any_pair(s, at, false, w);
    }
  }
  parts->look();
  return two;
}

// Rounds to the type that travels.
__device__ inline Quad round_to(twDtype_t wire, const Quad& quad) {
  return wire == twFloat32 ? quad : widen_word(wire, narrow_word(wire, quad));
}

// Of the terms listed, bit by bit, those whose rows are to be read where other domains' rows have come as one: of these
// the first of each domain. `before`: the domain of the last term before them, -1 for none.
__device__ inline uint32_t firsts_of(const ByDomain& by, int me, const Listed& of, int32_t before) {
  const int32_t domain = (of.there >> lane() & 1) != 0 ? by.domains.of(of.rank) : -1;
  const int32_t previous = __shfl_sync(~0u, domain, max(lane() - 1, 0));  // terms of partials have no gaps
  const bool follows = domain == (lane() == 0 ? before : previous);
  return __ballot_sync(~0u, domain >= 0 && (domain == by.domains.of(me) || !follows));
}

// The fold of the domain whose terms come, and the sum behind those before; alike in all threads of a warp but for the
// words.
struct Fold {
  Quad words[kGroups][2];
  int32_t domain;  // -1: there was no term
  bool begun;      // the sum has a term
};
// Adds the fold to the sum, rounded: the sum's next term.
__device__ inline void end_fold(twDtype_t wire, Fold* fold, Quad (&sum)[kGroups][2]) {
  if (fold->domain < 0) return;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    add(&sum[g][0], round_to(wire, fold->words[g][0]), !fold->begun);
    add(&sum[g][1], round_to(wire, fold->words[g][1]), !fold->begun);
  }
  fold->begun = true;
}

// Sums up to kGroups groups of a token. `fan`: its terms, per rank; `first`: the first of them. `kFolds`: by `domains`,
// perhaps without a bias. False if packets did not come.
template <bool kFolds>
__device__ bool sum_from_bias(const Sum& s, const BiasParams& q, const ByDomain& by, int token, int fan,
                              const Listed& first, const Tile& tile) {
  const CombineParams& p = s.p;
  const ChoicesParams& c = q.call;
  const int most = p.group.map.shape().per_expert != 0 ? p.group.map.shape().top_k : fan;
  const bool biased = !kFolds || q.bias.rows != nullptr;
  const std::byte* const bias = q.bias.rows + token * q.bias.stride;
  Quad sum[kGroups][2] = {};
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const uint32_t w = first_word(tile.begin + g);
    if (!biased || tile.begin + g >= tile.end) continue;
    if (w < p.tiles.words) sum[g][0] = load_bias(q, bias, w);
    if (w + 1 < p.tiles.words && !is_flag()) sum[g][1] = load_bias(q, bias, w + 1);
  }
  Fold fold{{}, -1, biased};
  Parts<kTerms, kGroups> parts;
  parts.cover(p.tiles, tile);
#pragma unroll 1
  for (int base = 0; base < most; base += 32) {
    const Listed of = base == 0 ? first : list_terms(s, c, token, fan, base);
    uint32_t left = kFolds && by.folded != 0 ? firsts_of(by, s.me(), of, fold.domain) : of.there;
#pragma unroll 1
    while (left != 0) {
      const Two two = expect_terms_of(s, of, tile, &left, &parts);
      if (!await_packets(
              p.group, s.step, &parts, [&](int t) { return t == 0 ? two.rank[0] : two.rank[1]; },
              [&](int source) { return source_failed(p.group, s.step, source); })) {
        return false;
      }
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
        const bool begins = kFolds && two.here[t] && by.domains.of(two.rank[t]) != fold.domain;
        if (begins) {
          end_fold(p.wire_dtype, &fold, sum);
          fold.domain = by.domains.of(two.rank[t]);
        }
        Quad(&to)[kGroups][2] = kFolds ? fold.words : sum;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          if (!two.here[t] || tile.begin + g >= tile.end) continue;
          add_word(c, &to[g][0], parts.value[g][t].a, two.weight[t], begins);
          add_word(c, &to[g][1], parts.value[g][t].b, two.weight[t], begins);
        }
      }
    }
  }
  if (kFolds) end_fold(p.wire_dtype, &fold, sum);
  store_sums(p, token, tile, sum);
  return true;
}

template <bool kFolds>
__device__ void sum_all_from_bias(const Sum& s, const BiasParams& q, const ByDomain& by) {
  const CombineParams& p = s.p;
  const bool per_rank = p.group.map.shape().per_expert == 0;
  const Shares shares = received_shares(p.roles);
  const uint32_t all = static_cast<uint32_t>(max(p.tokens, 0)) * p.tiles.per_row.divisor;
#pragma unroll 1
  for (uint32_t u = shares.first; u < all; u += shares.step) {
    const uint32_t row = divide(u, p.tiles.per_row);
    const auto token = static_cast<int>(row);
    const Tile tile = tile_of(p.tiles, u - row * p.tiles.per_row.divisor);
    Terms terms{0, true, false, -1};
    Sent sent{};
    if (per_rank || q.call.packets == 0) sent = load_sent(p, token, lane());
    if (per_rank) terms = find_terms(s, token, sent);
    bool here = terms.here;
    if (!per_rank && q.call.packets == 0) here = await_choices(s, token, sent);
    const Listed first = list_terms(s, q.call, token, terms.fan, 0);
#pragma unroll 1
    for (uint32_t begin = tile.begin; begin < tile.end && here; begin += kGroups) {
      const Tile groups{tile.number, begin, min(tile.end, begin + kGroups), 1};
      here = sum_from_bias<kFolds>(s, q, by, token, terms.fan, first, groups);
    }
    if (!here) give_up_token(s, token);
  }
}

template <bool kFolds>
__device__ inline void make_sums(const BiasParams& q, const ByDomain& by) {
  const CombineParams& p = q.call.call;
  Sum s{p, Step{0, p.channel, p.bound, twPhaseCombine, p.rows_digest}};
  await_earlier();
  if (!begin_sums(&s)) return;
  conclude_step(s, [&] {
    if (s.sums()) sum_all_from_bias<kFolds>(s, q, by);
  });
}

__global__ void __launch_bounds__(kThreads, 1) bias_kernel(const __grid_constant__ BiasParams q) {
  make_sums<false>(q, {});
}
__global__ void __launch_bounds__(kThreads, 1) domains_kernel(const __grid_constant__ DomainParams q) {
  make_sums<true>(q.sums, q.by);
}

}  // namespace

int launch_bias(const BiasParams& params, void* stream) {
  const CombineParams& p = params.call.call;
  return launch_kernel(bias_kernel, params, p.roles.grid(), p.at.bytes, false, stream);
}

int launch_domains(const DomainParams& params, void* stream) {
  const CombineParams& p = params.sums.call.call;
  return launch_kernel(domains_kernel, params, p.roles.grid(), p.at.bytes, false, stream);
}

int load_bias_kernels(const Shape& shape) {
  const uint32_t bytes = CombineScratch::make(shape).bytes;
  const int error = allow_shared(reinterpret_cast<const void*>(bias_kernel), bytes);
  return error != 0 ? error : allow_shared(reinterpret_cast<const void*>(domains_kernel), bytes);
}

}  // namespace tw::cuda
