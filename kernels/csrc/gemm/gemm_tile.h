// Blocks of a matrix product in registers: some activation rows against one panel.
//
// Promises: every sum is one accumulator that walks k in order, whatever the number of rows.
// Must not know: who computes which panel, what becomes of the sums.
#pragma once

#include "gemm/gemm_chains.h"
#include "gemm/gemm_rows.h"
#include "simd/prefetch.h"
#include "simd/unroll.h"

namespace quire {

// How many vectors of a panel's width a tile of so many rows takes in one pass: see kTileRows. Few rows wait for
// memory, which a single pass reads in order.
constexpr int pass_vecs(int rows) { return kRegisters >= 32 || rows <= 2 ? kVecs : 1; }

// Rows of a tile: where they add in the order of the tile registers, there are two sets of sums.
#if defined(QUIRE_AMX)
template <typename Kind>
constexpr int kMostRows = Kind::kChained ? kChainedRows : kTileRows;
#else
template <typename Kind>
constexpr int kMostRows = kTileRows;
#endif

// Reads the steps of one panel whose weights lie in memory as they are, one after the other.
template <typename Kind>
class PlainSteps {
 public:
  explicit PlainSteps(const char* first) : at_(first) {}
  static constexpr int64_t kBytes = kStepBytes;
  const char* at() const { return at_; }
  // The vectors of the step from `first` on.
  template <int kWide>
  void next(typename Kind::Lane (&weights)[kWide], int first) {
    unrolled<kWide>([&](auto v) { weights[v] = Kind::load(at_ + (first + v) * kLanes * 4); });
    at_ += kStepBytes;
  }

 private:
  const char* at_;
};

// `count` steps of `kRows` activation rows, which begin at `a`, against kWide vectors of a panel from `first` on. Sums
// are carried in `sums` [kRows][64] when `resume`. Flattened: gcc would call single products where they take many
// instructions.
template <typename Kind, int kRows, int kWide, typename Steps>
[[gnu::flatten]] void tile(const char* a, const Placing<Kind::kParts>& placing, Steps steps, int first, int64_t count,
                           float* sums, bool resume, Cold cold, const Ahead& ahead) {
  typename Kind::Sum acc[kRows][kWide];
  sums += first * kLanes;
  unrolled<kRows>([&](auto r) {
    unrolled<kWide>(
        [&](auto v) { acc[r][v] = resume ? Kind::load_sum(sums + (r * kVecs + v) * kLanes) : Kind::zero(); });
  });
  const int64_t turn = count - kPrefetchBytes / Steps::kBytes;
  for (int64_t step = 0; step < count; ++step) {
    if (cold != Cold::kNo) {
      const char* next = step < turn ? steps.at() + kPrefetchBytes : ahead.follows + (step - turn) * Steps::kBytes;
      prefetch<Steps::kBytes>(cold, next);
    }
    for (int64_t line = 0; line < ahead.lines; ++line) {
      __builtin_prefetch(ahead.at + step * ahead.per_step + line * 64, 0, 2);
    }
    if (step < ahead.beside.count) __builtin_prefetch(ahead.beside.lines[step], 0, 2);
    typename Kind::Lane weights[kWide];
    steps.next(weights, first);
    const auto factor = [&](auto part, auto r) {
      return Kind::factor(a + placing.template step_offset<kRows>(step, part, r));
    };
    if constexpr (Kind::kParts > 1 && kWide > 1 && kRegisters < 32) {  // too few for the parts of all weights
      unrolled<kWide>([&](auto v) {
        unrolled<Kind::kParts>([&](auto part) {
          const typename Kind::Part w = Kind::template part<part>(weights[v]);
          unrolled<kRows>([&](auto r) { acc[r][v] = Kind::dot(acc[r][v], w, factor(part, r)); });
        });
      });
    } else {
      unrolled<Kind::kParts>([&](auto part) {
        typename Kind::Part w[kWide];
        unrolled<kWide>([&](auto v) { w[v] = Kind::template part<part>(weights[v]); });
        unrolled<kRows>([&](auto r) {
          const typename Kind::Part x = factor(part, r);
          unrolled<kWide>([&](auto v) { acc[r][v] = Kind::dot(acc[r][v], w[v], x); });
        });
      });
    }
  }
  unrolled<kRows>(
      [&](auto r) { unrolled<kWide>([&](auto v) { Kind::store_sum(sums + (r * kVecs + v) * kLanes, acc[r][v]); }); });
}

// `ahead()`: what the next pass over the panel fetches. Only the first meets weights that are still in memory.
template <typename Kind, int kMost, typename Steps, typename Next>
void any_tile(int64_t rows, const char* a, const Placing<Kind::kParts>& placing, const Steps& steps, int64_t count,
              float* sums, bool resume, Cold cold, const Next& ahead) {
  with_count<std::min(kMost, kMostRows<Kind>)>(static_cast<int>(rows), [&](auto number) {
    constexpr int kWide = pass_vecs(number);
#if defined(QUIRE_AMX)
    if constexpr (Kind::kChained) {
      return chained_tile<Kind, number>(a, placing, steps, count, sums, resume, cold, ahead());
    }
#endif
    for (int pass = 0; pass < kVecs / kWide; ++pass) {
      tile<Kind, number, kWide>(a, placing, steps, pass * kWide, count, sums, resume, pass == 0 ? cold : Cold::kNo,
                                ahead());
    }
  });
}

}  // namespace quire
