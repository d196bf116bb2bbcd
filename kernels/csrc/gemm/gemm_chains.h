// Few activation rows against one panel of bf16, in the order in which the tile registers add (simd/tiles.h): they wait
// for memory, where tiles would be nearly empty.
//
// Promises: the sums of gemm_tiles.h bit for bit, where denormals are zeros. Must not know: who computes which panel,
// what becomes of the sums.
#pragma once

#include "simd/simd.h"

#if defined(QUIRE_AMX)

#include <type_traits>

#include "gemm/gemm_rows.h"
#include "simd/prefetch.h"
#include "simd/unroll.h"

namespace quire {

// Of the 32 registers, three rows take 24 for what they add to and 3 for what they multiply.
constexpr int kChainedRows = 3;

struct FloatsAsTheyAre {};
// What a worker holds while it multiplies weights of a kind.
template <typename Kind>
using FloatsOf = std::conditional_t<Kind::kChained, DenormalsAreZeros, FloatsAsTheyAre>;

// As `tile` of gemm_tile.h, all lanes in one pass; `count` is a multiple of a tile's depth.
template <typename Kind, int kRows, typename Steps>
[[gnu::flatten]] void chained_tile(const char* a, const Placing<Kind::kParts>& placing, Steps steps, int64_t count,
                                   float* sums, bool resume, Cold cold, const Ahead& ahead) {
  Vec total[kRows][kVecs];
  unrolled<kRows>([&](auto r) {
    unrolled<kVecs>([&](auto v) { total[r][v] = resume ? vload(sums + (r * kVecs + v) * kLanes) : vzero(); });
  });
  const int64_t turn = count - kPrefetchBytes / Steps::kBytes;
  for (int64_t first = 0; first < count; first += kTileDepth) {
    Vec chains[2][kRows][kVecs];  // of the pairs' first values, of the second ones
    unrolled<2>([&](auto part) {
      unrolled<kRows>([&](auto r) { unrolled<kVecs>([&](auto v) { chains[part][r][v] = vzero(); }); });
    });
    for (int64_t step = first; step < first + kTileDepth; ++step) {
      if (cold != Cold::kNo) {
        const char* next = step < turn ? steps.at() + kPrefetchBytes : ahead.follows + (step - turn) * Steps::kBytes;
        prefetch<Steps::kBytes>(cold, next);
      }
      for (int64_t line = 0; line < ahead.lines; ++line) {
        __builtin_prefetch(ahead.at + step * ahead.per_step + line * 64, 0, 2);
      }
      if (step < ahead.beside.count) __builtin_prefetch(ahead.beside.lines[step], 0, 2);
      Pairs weights[kVecs];
      steps.next(weights, 0);
      unrolled<2>([&](auto part) {
        Vec x[kRows];
        unrolled<kRows>([&](auto r) {
          const char* pair = a + placing.template step_offset<kRows>(step, 0, r);
          x[r] = pair_values<part>(pset(reinterpret_cast<const bf16*>(pair)));
        });
        unrolled<kVecs>([&](auto v) {
          const Vec w = pair_values<part>(weights[v]);
          unrolled<kRows>([&](auto r) { chains[part][r][v] = fused(chains[part][r][v], w, x[r]); });
        });
      });
    }
    unrolled<kRows>([&](auto r) {
      unrolled<kVecs>([&](auto v) { total[r][v] = vadd(total[r][v], vadd(chains[0][r][v], chains[1][r][v])); });
    });
  }
  unrolled<kRows>(
      [&](auto r) { unrolled<kVecs>([&](auto v) { vstore(sums + (r * kVecs + v) * kLanes, total[r][v]); }); });
}

}  // namespace quire

#endif
